def ids(chosen):
    """A constraint on {model}: these alone, and where there are none, nothing."""
    return "|".join(m.id for m in SETTINGS.models.values() if chosen(m)) or "[^ -~]"


rule unpack_model:
    input:
        lambda wildcards: model_files(SETTINGS.models[wildcards.model].source),
        "evals/reference_model/pack.py",
    output:
        directory("results/models/{model}"),
    log:
        "results/logs/unpack_model/{model}.log",
    wildcard_constraints:
        model=ids(lambda model: model.packed),
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
        cpus_per_task=SETTINGS.threads,
    params:
        source=lambda wildcards: SETTINGS.models[wildcards.model].source,
    shell:
        "python -m evals.reference_model.pack unpack {params.source:q} {output} 2>&1 | tee {log}"


# links into the hub's own cache, with the commit
rule fetch_model:
    output:
        directory("results/models/{model}"),
    log:
        "results/logs/fetch_model/{model}.log",
    wildcard_constraints:
        model=ids(lambda model: model.revision),
    params:
        source=lambda wildcards: SETTINGS.models[wildcards.model].source,
        revision=lambda wildcards: SETTINGS.models[wildcards.model].revision,
    shell:
        "python -m engine.hub --model {params.source:q} --revision {params.revision:q} --out {output} 2>&1 | tee {log}"


rule calibrate_model:
    input:
        model_input,
        ENGINE,
        EVALS,
        script="workflow/scripts/calibrate_model.py",
        texts=expand("results/texts/{text}.json", text=SETTINGS.calibration_texts),
    output:
        demand="results/calibration/{model}.safetensors",
        record="results/calibration/{model}.json",
    log:
        "results/logs/calibrate_model/{model}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
        cpus_per_task=SETTINGS.threads,
    params:
        model=model_flags,
        context=SETTINGS.context_tokens,
        threads=SETTINGS.threads,
        documents=DOCUMENTS,
    shell:
        "python {input.script} {params.model} --texts {input.texts} {params.documents}"
        " --context {params.context} --threads {params.threads}"
        " --out-demand {output.demand} --out {output.record} 2>&1 | tee {log}"


rule record_routing:
    input:
        model_input,
        ENGINE,
        EVALS,
        script="workflow/scripts/record_routing.py",
        texts=expand("results/texts/{text}.json", text=SETTINGS.test_texts),
    output:
        directory("results/traces/{model}"),
    log:
        "results/logs/record_routing/{model}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
        cpus_per_task=SETTINGS.threads,
    params:
        model=model_flags,
        context=SETTINGS.context_tokens,
        threads=SETTINGS.threads,
        documents=DOCUMENTS,
    shell:
        "python {input.script} --model {wildcards.model} {params.model} --texts {input.texts} {params.documents}"
        " --context {params.context} --threads {params.threads} --out {output} 2>&1 | tee {log}"


# On calibration text, before any claim is drawn from a model: snakemake --cores 1 results/gate/<model>.md
rule gate_model:
    input:
        model_input,
        ENGINE,
        EVALS,
        "evals/fitness.py",
        "evals/stats.py",
        script="workflow/scripts/gate_model.py",
        texts=expand("results/texts/{text}.json", text=SETTINGS.calibration_texts),
        demand="results/calibration/{model}.safetensors",
    output:
        record="results/gate/{model}.json",
        page=reported("results/gate/{model}.md"),
    log:
        "results/logs/gate_model/{model}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
        cpus_per_task=SETTINGS.threads,
    params:
        model=model_flags,
        policies=config["policies_sheet"],
        rows=policy_rows(BUNDLES),
        context=SETTINGS.context_tokens,
        threads=SETTINGS.threads,
        documents=DOCUMENTS,
    shell:
        "python {input.script} --model {wildcards.model} {params.model} --texts {input.texts} {params.documents}"
        " --policies {params.policies:q} --demand {input.demand} --context {params.context}"
        " --threads {params.threads} --out {output.record} --out-page {output.page} 2>&1 | tee {log}"
