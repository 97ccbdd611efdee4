# Pictures of a table, and the two indexes. A figure depends on its own script, the shared style and its table alone.

FIGURES = ["loss_and_misses_by_slots", "loss_by_bundle", "loss_by_mass"]
PICTURES = expand(
    "results/plots/{{run}}/{figure}.{suffix}",
    figure=FIGURES,
    suffix=["svg", "png", "csv"],
)
TABLES = {
    "local": "results/tables/local/quality.csv",
    "published": "results/published/tables/quality.csv",
}
# what results/figures shows: this checkout's own run where there is one, else the published one
SHOWN = "local" if os.path.exists(TABLES["local"]) else "published"


wildcard_constraints:
    run="local|published",
    figure="|".join(FIGURES),


rule plot_figure:
    input:
        "evals/figures.py",
        script="workflow/scripts/plot_{figure}.py",
        table=lambda wildcards: TABLES[wildcards.run],
    output:
        multiext("results/plots/{run}/{figure}", ".svg", ".png", ".csv"),
    log:
        "results/logs/plot_figure/{run}/{figure}.log",
    shell:
        "python {input.script} --table {input.table}"
        " --out-prefix results/plots/{wildcards.run}/{wildcards.figure} 2>&1 | tee {log}"


rule index_figures:
    input:
        script="workflow/scripts/write_index.py",
        table=TABLES[SHOWN],
        pictures=expand(PICTURES, run=SHOWN),
    output:
        "results/figures",
    log:
        "results/logs/index_figures.log",
    shell:
        "python {input.script} --title Figures --table {input.table} --files {input.pictures} --out {output}"
        " 2>&1 | tee {log}"


rule index_results:
    input:
        script="workflow/scripts/write_index.py",
        table=TABLES["local"],
        tables=[
            "results/tables/local/differences.csv",
            "results/tables/local/bundles.md",
        ],
        pictures=expand(PICTURES, run="local"),
        gates=expand("results/gate/{model}.json", model=MODELS),
        pages=expand("results/gate/{model}.md", model=MODELS),
        texts=expand("results/texts/{text}.json", text=TEXTS),
    output:
        "results/all",
    log:
        "results/logs/index_results.log",
    shell:
        "python {input.script} --title Results --table {input.table}"
        " --files {input.table} {input.tables} {input.pages} {input.pictures}"
        " --gates {input.gates} --texts {input.texts} --out {output} 2>&1 | tee {log}"
