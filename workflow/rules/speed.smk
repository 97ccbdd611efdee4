# From recorded routing to seconds: every policy on every host, by the simulator. Adding a host is adding its profile.

SIMULATOR = expand(
    "engine/{name}.py",
    name="anatomy clock decision geometry host host_times policies predictions quantisation residency scheduler simulator timing trace trace_file trace_schema".split(),
)


wildcard_constraints:
    host="|".join(SETTINGS.hosts),


rule probe_host:
    input:
        "engine/host_probe.py",
        script="workflow/scripts/probe_host.py",
    output:
        "results/hosts/local.yaml",
    log:
        "results/logs/probe_host.log",
    resources:
        slurm_extra="--exclusive",
        cpus_per_task=SETTINGS.threads,
    params:
        probe=SETTINGS.probe,
        threads=SETTINGS.threads,
    shell:
        "python {input.script} --probe {params.probe} --threads {params.threads} --out {output} 2>&1 | tee {log}"


rule simulate_host:
    input:
        model_input,
        SIMULATOR,
        "evals/simulation.py",
        script="workflow/scripts/simulate_host.py",
        traces="results/traces/{model}",
        predictions=expand("results/predictions/{{model}}/{kind}", kind=PREDICTED),
        demand="results/calibration/{model}.safetensors",
        host=lambda wildcards: SETTINGS.hosts[wildcards.host],
    output:
        record="results/simulation/{model}/{host}.json",
        times="results/simulation/{model}/{host}.safetensors",
    log:
        "results/logs/simulate_host/{model}/{host}.log",
    resources:
        cpus_per_task=SETTINGS.threads,
    params:
        model=timed_flags,
        policies=config["policies_sheet"],
        rows=policy_rows(POLICIES),
        policy=" ".join(POLICIES),
        slots=SLOTS,
        prefetch=PREFETCH,
        prefetch_rows=PREFETCH_ROWS,
        threads=SETTINGS.threads,
    shell:
        "python {input.script} --model {wildcards.model} {params.model} --traces {input.traces}"
        " --demand {input.demand} --policies {params.policies:q} --policy {params.policy} --slots {params.slots}"
        " {params.prefetch} --predictions results/predictions/{wildcards.model}"
        " --host {input.host} --threads {params.threads} --out-times {output.times} --out {output.record} 2>&1 | tee {log}"


rule score_delayed:
    input:
        model_input,
        ENGINE,
        EVALS,
        "evals/simulation.py",
        script="workflow/scripts/score_delayed.py",
        texts=expand("results/texts/{text}.json", text=SETTINGS.test_texts),
        demand="results/calibration/{model}.safetensors",
        simulations=expand(
            "results/simulation/{{model}}/{host}.json", host=SETTINGS.hosts
        ),
        times=expand(
            "results/simulation/{{model}}/{host}.safetensors", host=SETTINGS.hosts
        ),
    output:
        record="results/delayed/{model}.json",
        losses="results/delayed/{model}.safetensors",
    log:
        "results/logs/score_delayed/{model}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
        cpus_per_task=SETTINGS.threads,
    params:
        model=model_flags,
        policies=config["policies_sheet"],
        context=SETTINGS.context_tokens,
        delay=SETTINGS.delay_tokens,
        threads=SETTINGS.threads,
        documents=DOCUMENTS,
        tokens=SETTINGS.prefetch.tokens,
    shell:
        "python {input.script} --model {wildcards.model} {params.model} --policies {params.policies:q}"
        " --texts {input.texts} {params.documents} --tokens {params.tokens} --simulations {input.simulations} --demand {input.demand}"
        " --context {params.context} --delay {params.delay} --threads {params.threads}"
        " --out-losses {output.losses} --out {output.record} 2>&1 | tee {log}"


rule tabulate_speed:
    input:
        "evals/quality.py",
        "evals/records.py",
        "evals/simulation.py",
        "evals/speedup.py",
        "evals/stats.py",
        script="workflow/scripts/tabulate_speed.py",
        records=RECORDS,
        losses=LOSSES,
        simulations=expand(
            "results/simulation/{model}/{host}.json",
            model=MODELS,
            host=SETTINGS.hosts,
        ),
        times=expand(
            "results/simulation/{model}/{host}.safetensors",
            model=MODELS,
            host=SETTINGS.hosts,
        ),
        delayed=expand("results/delayed/{model}.json", model=MODELS),
    output:
        table=reported("results/tables/local/speed.csv"),
        documents="results/tables/local/speed_documents.csv",
    log:
        "results/logs/tabulate_speed.log",
    params:
        statistics=STATISTICS,
    shell:
        "python {input.script} --simulations {input.simulations} --records {input.records}"
        " --delayed {input.delayed} {params.statistics} --out {output.table} --out-documents {output.documents}"
        " 2>&1 | tee {log}"


rule tabulate_simulation:
    input:
        SIMULATOR,
        "evals/simulation.py",
        script="workflow/scripts/tabulate_simulation.py",
        records=RECORDS,
        losses=LOSSES,
        decisions=expand(
            "results/decisions/{model}/{policy}", model=MODELS, policy=POLICIES
        ),
        traces=expand("results/traces/{model}", model=MODELS),
        demands=expand("results/calibration/{model}.safetensors", model=MODELS),
    output:
        curves="results/tables/local/curves.csv",
        errors=reported("results/tables/local/open_loop.csv"),
    log:
        "results/logs/tabulate_simulation.log",
    params:
        policies=config["policies_sheet"],
        delay=SETTINGS.delay_tokens,
    shell:
        "python {input.script} --records {input.records} --policies {params.policies:q} --delay {params.delay}"
        " --out-curves {output.curves} --out-errors {output.errors} 2>&1 | tee {log}"
