# What `snakemake --report results/report.html` shows: results by category, each with a caption, and where they come from.
#
# A file of the table below is reported twice, as a page and as it is; a figure has its category in figures.smk and its
# words in the docstring of its script. A new result is a line in one of the two, and `reported(...)` around the output
# of its rule.

import ast
import json

REPORTED = {  # file: its category, its name there, its caption workflow/report/<caption>.rst
    "results/answer.md": ("Answer", "Which policy to use", "answer"),
    "results/claims.csv": ("Claims", "Every part of every claim", "claims"),
    "results/claims.md": ("Claims", "The ledger", "claims"),
    "results/gate/{model}.md": ("Fitness", "{model}", "gate"),
    "results/provenance.md": ("Provenance", "Where this comes from", "provenance"),
    "results/tables/local/bundles.md": ("Quality", "Bundles, all texts together", "bundles"),
    "results/tables/local/differences.csv": ("Quality", "Where two bundles differ", "differences"),
    "results/tables/local/engine_simulator.csv": ("Measured hosts", "Engine and simulator", "engine_simulator"),
    "results/tables/local/measured.csv": ("Measured hosts", "Every timed policy", "measured"),
    "results/tables/local/open_loop.csv": ("Speed", "Open-loop error", "open_loop"),
    "results/tables/local/quality.csv": ("Quality", "Every policy and text", "quality"),
    "results/tables/local/speed.csv": ("Speed", "Every policy and host", "speed"),
}
# Snakemake makes a switch of a label that has two values; the first in the alphabet is shown first
HERE, RAW = "here", "raw data"


def reported(path):
    """An output of a rule, marked for the report as REPORTED says."""
    return marked(path, *REPORTED[path], RAW)


def marked(path, category, name, caption, how):
    labels = {"result": name, "show": how}
    return report(
        path, caption=f"../report/{caption}.rst", category=category, labels=labels
    )


PAGES = {  # page: of a file of REPORTED, marked like it
    f"results/pages/{path.removeprefix('results/')}.html".format(model=model): (
        category,
        name.format(model=model),
        caption,
    )
    for path, (category, name, caption) in REPORTED.items()
    for model in (MODELS if "{model}" in path else [""])
}


def drawn(path, how):
    """An output of plot_figure, marked for the report in the category of its figure."""
    return report(
        path,
        caption="../report/figure.rst",
        category=lambda wildcards: FIGURES[wildcards.figure][1],
        labels=lambda wildcards: {
            "result": f"Figure: {wildcards.figure.replace('_', ' ')}",
            "show": how,
        },
    )


def about_figure(wildcards):
    """What a figure shows: the paragraphs of its script's docstring but the last, which is the command line."""
    script = Path(f"workflow/scripts/plot_{wildcards.figure}.py")
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    return [" ".join(part.split()) for part in docstring.split("\n\n")[:-1]]


rule write_pages:
    input:
        script="workflow/scripts/write_pages.py",
        files=[path for name in REPORTED for path in expand(name, model=MODELS)],
    output:
        [marked(page, *entry, HERE) for page, entry in PAGES.items()],
    log:
        "results/logs/write_pages.log",
    shell:
        "python {input.script} {input.files} --root results --out results/pages 2>&1 | tee {log}"


rule write_provenance:
    input:
        script="workflow/scripts/write_provenance.py",
        records=lambda wildcards: [
            *expand("results/calibration/{model}.json", model=MODELS),
            *expand("results/gate/{model}.json", model=MODELS),
            *RECORDS,
        ],
        texts=expand("results/texts/{text}.json", text=TEXTS),
        hosts=list(SETTINGS.hosts.values()),
        measured=lambda wildcards: [path for path in MEASURED_FILES if path.endswith(".json")],
        preregistration="config/preregistration.yaml",
    output:
        reported("results/provenance.md"),
    log:
        "results/logs/write_provenance.log",
    params:
        config=json.dumps(config),
    shell:
        "python {input.script} --records {input.records} --texts {input.texts} --hosts {input.hosts}"
        " --measured {input.measured} --preregistration {input.preregistration} --config {params.config:q}"
        " --out {output} 2>&1 | tee {log}"
