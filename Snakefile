# Which expert misses are worth waiting for? The pipeline, as a table of contents.
#
#   snakemake --cores 1 results/all        everything: models scored under every policy, tables, figures, index
#   snakemake --cores 1 results/figures    figures from records, no model is run (in a fresh clone: the published ones)
#   snakemake --cores 1 --report results/report.html    of a finished run: results, captions, provenance in one page
#   snakemake --cores 1 results/measured/local    every policy timed on this machine, with the engine
#   snakemake --profile workflow/profiles/slurm results/all    the same on a cluster (docs/cluster.md)
#   snakemake --cores 1 results/peers     llama.cpp and others beside the engine on this machine, under the same memory
#
# What is run stands in config/config.yaml; how a miss is handled, in engine/; what is asked, in evals/.

from snakemake.utils import min_version

min_version("9.27")


configfile: "config/config.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/cluster.smk"  #          what a cluster needs to know of the run
include: "workflow/rules/report.smk"  #           what snakemake --report shows, and where results come from
include: "workflow/rules/texts.smk"  #            texts of the package index, resolved and hashed
include: "workflow/rules/reference_model.smk"  #  training of the embedded models (not part of results/all)
include: "workflow/rules/models.smk"  #           packed models unpacked, calibrated, their routing recorded
include: "workflow/rules/quality.smk"  #          every policy scored by perplexity
include: "workflow/rules/tables.smk"  #           paired differences with intervals
include: "workflow/rules/predictors.smk"  #       what foretells the next layers' experts, trained and scored
include: "workflow/rules/sweep.smk"  #            more policies, over a stream of changing topics
include: "workflow/rules/experiment_b.smk"  #     few heavy against many light substitutions of the same mass
include: "workflow/rules/tasks.smk"  #            GSM8K and HumanEval: written answers, and the baseline's forced
include: "workflow/rules/speed.smk"  #            every policy on every host, by the simulator
include: "workflow/rules/measure.smk"  #          the engine timed on this machine or a node, and every measured host collected
include: "workflow/rules/peers.smk"  #            what a user would run instead, under the same memory
include: "workflow/rules/ledger.smk"  #           claims and their verdicts, and which policy to use
include: "workflow/rules/figures.smk"  #          one script a figure, and the two indexes


# what asks a network runs where the run was started: a cluster's nodes often have none. So do pictures and pages, of
# which a job would wait longer than it works
localrules:
    all,
    fetch_model,
    index_figures,
    index_results,
    plot_figure,
    resolve_task,
    resolve_text,
    write_pages,
    write_provenance,


rule all:
    default_target: True
    input:
        "results/all",
