# From losses and speeds to verdicts and an answer. The rules that decide were committed before what they decide.

SPEED = "results/tables/local/speed.csv"
LEDGER = (
    "ledger ledger_measures ledger_page ledger_quantities preregistration records speed standing stats"
)
CLAIMS_PICTURES = multiext(
    "results/plots/local/claims_by_documents", ".svg", ".png", ".csv"
)


rule tabulate_claims:
    input:
        expand("evals/{name}.py", name=LEDGER.split()),
        script="workflow/scripts/tabulate_claims.py",
        preregistration="config/preregistration.yaml",
        speed=SPEED,
        records=expand(
            "results/quality/{model}/{policy}/perplexity.json",
            model=MODELS,
            policy=POLICIES,
        ),
        losses=expand(
            "results/losses/{model}/{policy}.safetensors",
            model=MODELS,
            policy=POLICIES,
        ),
    output:
        table="results/claims.csv",
        page="results/claims.md",
        documents="results/tables/local/claims_by_documents.csv",
    log:
        "results/logs/tabulate_claims.log",
    shell:
        "python {input.script} --preregistration {input.preregistration} --records {input.records}"
        " --speed {input.speed} --out {output.table} --out-page {output.page} --out-documents {output.documents}"
        " 2>&1 | tee {log}"


rule write_answer:
    input:
        "evals/speed.py",
        script="workflow/scripts/write_answer.py",
        preregistration="config/preregistration.yaml",
        speed=SPEED,
        quality=TABLES["local"],
    output:
        "results/answer.md",
    log:
        "results/logs/write_answer.log",
    shell:
        "python {input.script} --speed {input.speed} --quality {input.quality}"
        " --preregistration {input.preregistration} --out {output} 2>&1 | tee {log}"


rule plot_claims_by_documents:
    input:
        "evals/figures.py",
        script="workflow/scripts/plot_claims_by_documents.py",
        table="results/tables/local/claims_by_documents.csv",
    output:
        CLAIMS_PICTURES,
    log:
        "results/logs/plot_claims_by_documents.log",
    shell:
        "python {input.script} --table {input.table} --out-prefix results/plots/local/claims_by_documents"
        " 2>&1 | tee {log}"
