rule score_policy:
    input:
        model_input,
        ENGINE,
        EVALS,
        script="workflow/scripts/score_policy.py",
        texts=expand("results/texts/{text}.json", text=SETTINGS.test_texts),
        demand="results/calibration/{model}.safetensors",
        traces="results/traces/{model}",
    output:
        record="results/quality/{model}/{policy}/perplexity.json",
        losses="results/losses/{model}/{policy}.safetensors",
        decisions=directory("results/decisions/{model}/{policy}"),
    log:
        "results/logs/score_policy/{model}/{policy}.log",
    resources:
        mem_mb=lambda wildcards, attempt: of_policy(
            SETTINGS.models[wildcards.model], attempt
        ).mem_mb,
        runtime=lambda wildcards, attempt: of_policy(
            SETTINGS.models[wildcards.model], attempt
        ).runtime,
        cpus_per_task=SETTINGS.threads,
        attempt=lambda wildcards, attempt: attempt,
    params:
        model=model_flags,
        row=policy_row,
        policies=config["policies_sheet"],
        slots=SLOTS,
        context=SETTINGS.context_tokens,
        delay=SETTINGS.delay_tokens,
        threads=SETTINGS.threads,
        documents=DOCUMENTS,
    shell:
        "python {input.script} --model {wildcards.model} {params.model} --policy {wildcards.policy}"
        " --policies {params.policies:q} --texts {input.texts} {params.documents} --slots {params.slots}"
        " --demand {input.demand} --traces {input.traces} --context {params.context} --delay {params.delay}"
        " --threads {params.threads} --attempt {resources.attempt} --out-losses {output.losses}"
        " --out-decisions {output.decisions} --out {output.record} 2>&1 | tee {log}"
