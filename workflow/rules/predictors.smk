# What foretells the next layers' experts: trained on calibration text, asked about the test texts, and how often right.

PREDICTED = "gate_replay markov mlp oracle spec_prefetch".split()
FORETELLING = [
    *(f"engine/{name}.py" for name in ("predictions", "predictors", "routers")),
    "evals/predictor_recall.py",
    "evals/predictor_training.py",
]


rule train_predictors:
    input:
        model_input,
        ENGINE,
        EVALS,
        FORETELLING,
        script="workflow/scripts/train_predictors.py",
        texts=expand("results/texts/{text}.json", text=SETTINGS.calibration_texts),
    output:
        expand(
            "results/predictors/{{model}}/{kind}.safetensors",
            kind=["markov", "mlp", "spec_prefetch"],
        ),
        "results/predictors/{model}/README.md",
    log:
        "results/logs/train_predictors/{model}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
        cpus_per_task=SETTINGS.threads,
    params:
        model=model_flags,
        rank=SETTINGS.predictors.rank,
        rate=SETTINGS.predictors.learning_rate,
        context=SETTINGS.context_tokens,
        threads=SETTINGS.threads,
        documents=DOCUMENTS,
    shell:
        "python {input.script} --model {wildcards.model} {params.model} --texts {input.texts} {params.documents}"
        " --context {params.context} --threads {params.threads} --rank {params.rank} --learning-rate {params.rate}"
        " --out results/predictors/{wildcards.model} 2>&1 | tee {log}"


rule predict_experts:
    input:
        model_input,
        ENGINE,
        EVALS,
        FORETELLING,
        rules.train_predictors.output,
        script="workflow/scripts/predict_experts.py",
        texts=expand("results/texts/{text}.json", text=SETTINGS.test_texts),
        traces="results/traces/{model}",
        decisions=f"results/decisions/{{model}}/{BASELINE}",
    output:
        record="results/predictions/{model}/recall.json",
        said=directory(expand("results/predictions/{{model}}/{kind}", kind=PREDICTED)),
    log:
        "results/logs/predict_experts/{model}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
        cpus_per_task=SETTINGS.threads,
    params:
        model=model_flags,
        slots=SETTINGS.prefetch.slots,
        names=SETTINGS.predictors.names,
        context=SETTINGS.context_tokens,
        threads=SETTINGS.threads,
        documents=DOCUMENTS,
    shell:
        "python {input.script} --model {wildcards.model} {params.model} --predictors results/predictors/{wildcards.model}"
        " --traces {input.traces} --decisions {input.decisions} --slots {params.slots} --names {params.names}"
        " --texts {input.texts} {params.documents} --context {params.context} --threads {params.threads}"
        " --out results/predictions/{wildcards.model} 2>&1 | tee {log}"


rule tabulate_recall:
    input:
        "evals/predictor_recall.py",
        "evals/stats.py",
        script="workflow/scripts/tabulate_recall.py",
        records=expand("results/predictions/{model}/recall.json", model=MODELS),
    output:
        reported("results/tables/local/recall.csv"),
    log:
        "results/logs/tabulate_recall.log",
    params:
        statistics=STATISTICS,
    shell:
        "python {input.script} --records {input.records} {params.statistics} --out {output} 2>&1 | tee {log}"
