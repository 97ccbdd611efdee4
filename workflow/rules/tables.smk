# Every policy's record and losses, and how intervals are made of them.

RECORDS = expand(
    "results/quality/{model}/{policy}/perplexity.json", model=MODELS, policy=POLICIES
)
LOSSES = expand(
    "results/losses/{model}/{policy}.safetensors", model=MODELS, policy=POLICIES
)
STATISTICS = " ".join(
    f"--{name} {value}" for name, value in SETTINGS.statistics.items()
)


rule tabulate_quality:
    input:
        "evals/quality.py",
        "evals/records.py",
        "evals/stats.py",
        script="workflow/scripts/tabulate_quality.py",
        texts=expand("results/texts/{text}.json", text=SETTINGS.test_texts),
        records=RECORDS,
        losses=LOSSES,
        decisions=expand(
            "results/decisions/{model}/{policy}", model=MODELS, policy=POLICIES
        ),
    output:
        quality=reported("results/tables/local/quality.csv"),
        differences=reported("results/tables/local/differences.csv"),
        bundles=reported("results/tables/local/bundles.md"),
    log:
        "results/logs/tabulate_quality.log",
    params:
        statistics=STATISTICS,
    shell:
        "python {input.script} --records {input.records} {params.statistics} --out-quality {output.quality}"
        " --out-differences {output.differences} --out-bundles {output.bundles} 2>&1 | tee {log}"
