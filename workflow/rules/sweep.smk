# Many policies over documents of the test texts in turn, all of one model in one job, and the tables made of them.

SWEEP = list(SETTINGS.sweep.policies)
SWEEP_RECORDS = expand(
    "results/sweep/{model}/{policy}.json", model=MODELS, policy=SWEEP
)
SWEEP_LOSSES = expand(
    "results/sweep/{model}/{policy}.safetensors", model=MODELS, policy=SWEEP
)


rule score_sweep:
    input:
        model_input,
        ENGINE,
        EVALS,
        "evals/stream.py",
        script="workflow/scripts/score_sweep.py",
        texts=expand("results/texts/{text}.json", text=SETTINGS.test_texts),
        demand="results/calibration/{model}.safetensors",
    output:
        records=expand("results/sweep/{{model}}/{policy}.json", policy=SWEEP),
        losses=expand("results/sweep/{{model}}/{policy}.safetensors", policy=SWEEP),
    log:
        "results/logs/score_sweep/{model}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
        cpus_per_task=SETTINGS.threads,
    params:
        model=model_flags,
        rows=" ".join(map(str, SETTINGS.sweep.policies.values())),
        policies=config["sweep"]["sheet"],
        slots=f"{SETTINGS.sweep.slots}={SETTINGS.slots[SETTINGS.sweep.slots]!r}",
        tokens=SETTINGS.sweep.tokens,
        context=SETTINGS.context_tokens,
        delay=SETTINGS.delay_tokens,
        threads=SETTINGS.threads,
        documents=DOCUMENTS,
    shell:
        "python {input.script} --model {wildcards.model} {params.model} --policies {params.policies:q}"
        " --texts {input.texts} {params.documents} --tokens {params.tokens} --slots {params.slots}"
        " --demand {input.demand} --context {params.context} --delay {params.delay} --threads {params.threads}"
        " --out results/sweep/{wildcards.model} 2>&1 | tee {log}"


rule tabulate_sweep:
    input:
        "evals/quality.py",
        "evals/quality_tables.py",
        "evals/records.py",
        "evals/stats.py",
        script="workflow/scripts/tabulate_sweep.py",
        records=SWEEP_RECORDS,
        losses=SWEEP_LOSSES,
    output:
        sweep=reported("results/tables/local/sweep.csv"),
        topics=reported("results/tables/local/topic_changes.csv"),
        standins=reported("results/tables/local/standins.csv"),
    log:
        "results/logs/tabulate_sweep.log",
    params:
        statistics=STATISTICS,
    shell:
        "python {input.script} --records {input.records} {params.statistics} --out-sweep {output.sweep}"
        " --out-topics {output.topics} --out-standins {output.standins} 2>&1 | tee {log}"


rule tabulate_documents:
    input:
        "evals/records.py",
        "evals/stats.py",
        script="workflow/scripts/tabulate_documents.py",
        records=RECORDS,
        losses=LOSSES,
    output:
        reported("results/tables/local/documents.csv"),
    log:
        "results/logs/tabulate_documents.log",
    params:
        slots=SETTINGS.sweep.slots,
    shell:
        "python {input.script} --records {input.records} --slots {params.slots} --out {output} 2>&1 | tee {log}"
