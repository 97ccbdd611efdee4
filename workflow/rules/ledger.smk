# From losses and speeds to verdicts and an answer. The rules that decide were committed before what they decide.

SPEED = "results/tables/local/speed.csv"
LEDGER = """bootstrap correlations ledger ledger_correlations ledger_documents ledger_engine ledger_evidence ledger_groups
    ledger_measures ledger_page ledger_quantities ledger_recall ledger_statistics ledger_times measured_tables
    preregistration records speed standing stats"""


rule tabulate_claims:
    input:
        expand("evals/{name}.py", name=LEDGER.split()),
        script="workflow/scripts/tabulate_claims.py",
        preregistration="config/preregistration.yaml",
        speed=SPEED,
        documents="results/tables/local/speed_documents.csv",
        measured="results/tables/local/measured_documents.csv",
        peers="results/tables/local/peers_documents.csv",
        gates=expand("results/gate/{model}.json", model=MODELS),
        records=RECORDS,
        losses=LOSSES,
        sweep=SWEEP_RECORDS,
        sweep_losses=SWEEP_LOSSES,
        experiment_b=EXPERIMENT_B,
        agreement="results/tables/local/agreement.csv",
        predictors="engine/predictors.py",
        recall=expand("results/predictions/{model}/recall.json", model=MODELS),
    output:
        table=reported("results/claims.csv"),
        page=reported("results/claims.md"),
        documents="results/tables/local/claims_by_documents.csv",
    log:
        "results/logs/tabulate_claims.log",
    params:
        sweep=" ".join(expand("results/sweep/{model}", model=MODELS)),
    shell:
        "python {input.script} --preregistration {input.preregistration} --records {input.records}"
        " --speed {input.speed} --speed-documents {input.documents} --measured-documents {input.measured} --peers-documents {input.peers}"
        " --sweep {params.sweep} --experiment-b {input.experiment_b} --agreement {input.agreement}"
        " --recall {input.recall}"
        " --gates {input.gates} --out {output.table} --out-page {output.page} --out-documents {output.documents}"
        " 2>&1 | tee {log}"


rule write_answer:
    input:
        "evals/measured_tables.py",
        "evals/speed.py",
        script="workflow/scripts/write_answer.py",
        preregistration="config/preregistration.yaml",
        speed=SPEED,
        quality="results/tables/local/quality.csv",
        measured="results/tables/local/measured.csv",
    output:
        reported("results/answer.md"),
    log:
        "results/logs/write_answer.log",
    shell:
        "python {input.script} --speed {input.speed} --quality {input.quality} --measured {input.measured}"
        " --preregistration {input.preregistration} --out {output} 2>&1 | tee {log}"
