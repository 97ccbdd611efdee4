# Pictures of a table, and the two indexes. A figure depends on its own script, the shared style and its table alone.

FIGURES = {  # stem of the script: stem of its table, category of the report
    "agreement_by_mass": ("tasks", "Tasks"),
    "claims_by_documents": ("claims_by_documents", "Claims"),
    "experiment_b": ("experiment_b", "Experiment B"),
    "loss_and_misses_by_slots": ("quality", "Quality"),
    "loss_by_bundle": ("quality", "Quality"),
    "loss_by_document": ("documents", "Quality"),
    "loss_by_mass": ("quality", "Quality"),
    "measured_speedup": ("measured", "Measured hosts"),
    "misses_by_slots": ("curves", "Quality"),
    "peers": ("peers", "Measured hosts"),
    "prefetch": ("speed", "Speed"),
    "speedup_by_loss": ("speed", "Speed"),
    "sweep_loss_by_mass": ("sweep", "Sweep"),
    "token_time": ("speed", "Speed"),
    "topic_changes": ("topic_changes", "Sweep"),
}
STYLE = ["evals/checked_tables.py", "evals/figures.py"]
OF_TABLE = {  # what else reads that table
    "curves": ["evals/speed_figures.py", "evals/speed_tables.py"],
    "experiment_b": ["evals/experiment_tables.py"],
    "measured": ["evals/speed_figures.py", "evals/measured_tables.py"],
    "peers": ["evals/peers/tables.py"],
    "speed": ["evals/speed_figures.py", "evals/speed_tables.py"],
    "tasks": ["evals/task_tables.py"],
}
FOLDERS = {"local": "results/tables/local", "published": "results/published/tables"}
# what results/figures shows: this checkout's own run where there is a whole one, else the published one
SHOWN = "published"
if all(
    os.path.exists(f"{FOLDERS['local']}/{table}.csv") for table, _ in FIGURES.values()
):
    SHOWN = "local"


def pictures(run):
    return expand(
        "results/plots/{run}/{figure}.{suffix}",
        run=run,
        figure=FIGURES,
        suffix=["svg", "png", "csv"],
    )


wildcard_constraints:
    run="local|published",
    figure="|".join(FIGURES),


rule plot_figure:
    input:
        STYLE,
        lambda wildcards: OF_TABLE.get(FIGURES[wildcards.figure][0], []),
        script="workflow/scripts/plot_{figure}.py",
        table=lambda wildcards: f"{FOLDERS[wildcards.run]}/{FIGURES[wildcards.figure][0]}.csv",
    output:
        "results/plots/{run}/{figure}.svg",
        drawn("results/plots/{run}/{figure}.png", HERE),
        drawn("results/plots/{run}/{figure}.csv", RAW),
    log:
        "results/logs/plot_figure/{run}/{figure}.log",
    params:
        shows=about_figure,
    shell:
        "python {input.script} --table {input.table}"
        " --out-prefix results/plots/{wildcards.run}/{wildcards.figure} 2>&1 | tee {log}"


rule index_figures:
    input:
        script="workflow/scripts/write_index.py",
        table=f"{FOLDERS[SHOWN]}/quality.csv",
        pictures=pictures(SHOWN),
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
        table="results/tables/local/quality.csv",
        answers=[
            "results/answer.md",
            "results/claims.md",
            "results/claims.csv",
            "results/provenance.md",
        ],
        tables=expand(
            "results/tables/local/{table}",
            table=[
                "agreement.csv",
                "bundles.md",
                "claims_by_documents.csv",
                "curves.csv",
                "differences.csv",
                "documents.csv",
                "engine_simulator.csv",
                "measured.csv",
                "open_loop.csv",
                "peers.csv",
                "recall.csv",
                "speed.csv",
                "standins.csv",
                "topic_changes.csv",
            ],
        ),
        pictures=pictures("local"),
        gates=expand("results/gate/{model}.json", model=MODELS),
        gate_pages=expand("results/gate/{model}.md", model=MODELS),
        report_pages=[page for path in REPORTED for page in pages_of(path)],
        texts=expand("results/texts/{text}.json", text=TEXTS),
        measured="results/tables/local/measured.csv",
        errors="results/tables/local/engine_simulator.csv",
        sweep="results/tables/local/sweep.csv",
        experiment_b="results/tables/local/experiment_b.csv",
        experiments=EXPERIMENT_B,
        tasks="results/tables/local/tasks.csv",
        asked=expand("results/tasks/{task}.json", task=TASKS),
    output:
        "results/all",
    log:
        "results/logs/index_results.log",
    shell:
        "python {input.script} --title Results --table {input.table}"
        " --files {input.answers} {input.table} {input.sweep} {input.experiment_b} {input.tasks} {input.tables}"
        " {input.gate_pages} {input.pictures}"
        " --gates {input.gates} --texts {input.texts} --measured {input.measured} --errors {input.errors}"
        " --sweep {input.sweep} --experiment-b {input.experiment_b} --folders {input.experiments}"
        " --tasks {input.tasks} --asked {input.asked}"
        " --out {output} 2>&1 | tee {log}"
