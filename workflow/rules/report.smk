# What `snakemake --report` shows: results by category, each with a caption, and where they come from.
#
# A file of workflow/report/results.tsv is shown as a page and kept as it is beside it: a new one is a row of that sheet,
# its caption workflow/report/<caption>.rst, and `reported(...)` around the output of its rule. A figure has its category
# in figures.smk; its caption is the docstring of its script.

import ast
import csv
import json

with open("workflow/report/results.tsv", encoding="utf-8", newline="") as sheet:
    REPORTED = {row.pop("file"): row for row in csv.DictReader(sheet, delimiter="\t")}
# Snakemake makes a switch of a label that has two values; the first in the alphabet is shown first
HERE, RAW = "here", "raw data"


def reported(path):
    """An output of a rule, marked for the report as the sheet says."""
    return marked(path, RAW, **REPORTED[path])


def marked(path, show, category, name, caption):
    caption = f"../report/{caption}.rst"
    labels = {"result": name, "show": show}
    return report(path, caption=caption, category=category, labels=labels)


def marked_pages():
    """Every file of the sheet as a page, marked like the file."""
    return [
        marked(page, HERE, **row | {"name": row["name"].format(model=model)})
        for path, row in REPORTED.items()
        for model, page in zip(MODELS, pages_of(path))
    ]


def pages_of(path):
    """The pages of a file of the sheet: one, or one a model."""
    page = f"results/pages/{path.removeprefix('results/')}.html"
    return expand(page, model=MODELS)


def drawn(path, show):
    """An output of plot_figure, marked for the report in the category of its figure."""
    return report(
        path,
        caption="../report/figure.rst",
        category=lambda wildcards: FIGURES[wildcards.figure][1],
        labels=lambda wildcards: {
            "result": f"Figure: {wildcards.figure.replace('_', ' ')}",
            "show": show,
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
        files=expand(list(REPORTED), model=MODELS),
    output:
        marked_pages(),
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
            *SWEEP_RECORDS,
            *AGREEMENTS,
            *expand("results/predictions/{model}/recall.json", model=MODELS),
        ],
        texts=expand("results/texts/{text}.json", text=TEXTS),
        hosts=list(SETTINGS.hosts.values()),
        measured=lambda wildcards: [
            path for path in MEASURED_FILES if path.endswith(".json")
        ],
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
