# Pictures of a table, and the two indexes. A figure depends on its own script, the shared style and its table alone.

FIGURES = {  # stem of the script: stem of its table
    "agreement_by_mass": "tasks",
    "claims_by_documents": "claims_by_documents",
    "experiment_b": "experiment_b",
    "loss_and_misses_by_slots": "quality",
    "loss_by_bundle": "quality",
    "loss_by_document": "documents",
    "loss_by_mass": "quality",
    "measured_speedup": "measured",
    "misses_by_slots": "curves",
    "speedup_by_loss": "speed",
    "sweep_loss_by_mass": "sweep",
    "token_time": "speed",
    "topic_changes": "topic_changes",
}
STYLE = ["evals/checked_tables.py", "evals/figures.py"]
OF_TABLE = {  # what else reads that table
    "curves": ["evals/speed_figures.py", "evals/speed_tables.py"],
    "experiment_b": ["evals/experiment_tables.py"],
    "measured": ["evals/speed_figures.py", "evals/measured_tables.py"],
    "speed": ["evals/speed_figures.py", "evals/speed_tables.py"],
    "tasks": ["evals/task_tables.py"],
}
FOLDERS = {"local": "results/tables/local", "published": "results/published/tables"}
# what results/figures shows: this checkout's own run where there is a whole one, else the published one
SHOWN = "published"
if all(os.path.exists(f"{FOLDERS['local']}/{table}.csv") for table in FIGURES.values()):
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
        lambda wildcards: OF_TABLE.get(FIGURES[wildcards.figure], []),
        script="workflow/scripts/plot_{figure}.py",
        table=lambda wildcards: f"{FOLDERS[wildcards.run]}/{FIGURES[wildcards.figure]}.csv",
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
        answers=["results/answer.md", "results/claims.md", "results/claims.csv"],
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
                "speed.csv",
                "standins.csv",
                "topic_changes.csv",
            ],
        ),
        pictures=pictures("local"),
        gates=expand("results/gate/{model}.json", model=MODELS),
        pages=expand("results/gate/{model}.md", model=MODELS),
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
        " {input.pages} {input.pictures}"
        " --gates {input.gates} --texts {input.texts} --measured {input.measured} --errors {input.errors}"
        " --sweep {input.sweep} --experiment-b {input.experiment_b} --folders {input.experiments}"
        " --tasks {input.tasks} --asked {input.asked}"
        " --out {output} 2>&1 | tee {log}"
