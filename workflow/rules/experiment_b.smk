# Few heavy against many light substitutions of the same mass: a pilot, then its arms, of one model in one job.

EXPERIMENT_B = expand("results/experiment_b/{model}", model=MODELS)


# what it writes depends on its pilot: a folder
rule run_experiment_b:
    input:
        model_input,
        ENGINE,
        EVALS,
        expand(
            "evals/{name}.py",
            name="bootstrap experiment_b stats stream watch".split(),
        ),
        script="workflow/scripts/run_experiment_b.py",
        preregistration="config/preregistration.yaml",
        calibration=expand("results/texts/{text}.json", text=SETTINGS.calibration_texts),
        texts=expand("results/texts/{text}.json", text=SETTINGS.test_texts),
        demand="results/calibration/{model}.safetensors",
        traces="results/traces/{model}",
    output:
        directory("results/experiment_b/{model}"),
    log:
        "results/logs/run_experiment_b/{model}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
        cpus_per_task=SETTINGS.threads,
    params:
        model=model_flags,
        slots=f"{SETTINGS.experiment_b.slots}={SETTINGS.slots[SETTINGS.experiment_b.slots]!r}",
        tokens=SETTINGS.experiment_b.tokens,
        context=SETTINGS.context_tokens,
        threads=SETTINGS.threads,
        documents=DOCUMENTS,
    shell:
        "python {input.script} --model {wildcards.model} {params.model} --calibration {input.calibration}"
        " --texts {input.texts} {params.documents} --tokens {params.tokens} --slots {params.slots}"
        " --demand {input.demand} --traces {input.traces} --preregistration {input.preregistration}"
        " --context {params.context} --threads {params.threads} --out {output}"
        " 2>&1 | tee {log}"


rule tabulate_experiment_b:
    input:
        expand(
            "evals/{name}.py",
            name="bootstrap experiment_b quality quality_tables records stats watch".split(),
        ),
        script="workflow/scripts/tabulate_experiment_b.py",
        records=EXPERIMENT_B,
    output:
        reported("results/tables/local/experiment_b.csv"),
    log:
        "results/logs/tabulate_experiment_b.log",
    params:
        statistics=STATISTICS,
    shell:
        "python {input.script} --records {input.records} {params.statistics} --out {output} 2>&1 | tee {log}"
