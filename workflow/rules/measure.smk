# Timed runs of the engine on this machine, for as long as half an hour and not part of results/all, which collects what
# lies in results/measured, whoever measured it:
#
#   snakemake --cores 1 results/measured/local      (`local`, or the id of this machine's profile in config/hosts)
#
# Neither that folder nor anything in it is the output of a rule, because Snakemake removes outputs before a job and
# after one that failed. The jobs write stamps, and the target is a rule of that name. A killed measurement goes on by
# the same command; to measure anew, move the folder away.

from engine.measured_run import OWN, size_of

TIMED_DTYPE = "bfloat16"  # of an inflated model
STAMP = "results/stamps/measured/{host}/{model}/{size}"


def sizes(model):
    model = SETTINGS.models[model]
    return dict.fromkeys((OWN, size_of(model.timed_width, model.timed_expert_width)))


def width_flags(wildcards):
    """The widths that a size says; none of the model's own."""
    if wildcards.size == OWN:
        return ""
    widths = zip(("width", "expert-width"), wildcards.size.split("x"))
    return " ".join(
        f"--{name} {width}" for name, width in widths if not width.startswith(OWN)
    )


def to_pack(wildcards):
    """The folder that is packed, and the dtype of the store."""
    if wildcards.size == OWN:
        return source_dir(wildcards), SETTINGS.models[wildcards.model].dtype
    return f"results/inflated/{wildcards.model}/{wildcards.size}", TIMED_DTYPE


def stamps_of(host, wildcards):
    measure = SETTINGS.measure
    if not measure.models or not measure.slots:
        found = "measure: none of its models, or of its slots, is part of this configuration"
        refuse(error(found, "one of each at least", "add them to models and slots"))
    stamp = STAMP.format(host=host, model="{model}", size="{size}")
    return [
        f"{stamp}/scored".format(model=model, size=size)
        for model in measure.models
        for size in sizes(model)
    ]


def stamps_of_nodes(wildcards):
    if not NODES:
        found = (
            f"results/measured/cluster: no profile in {config['hosts']} names its node"
        )
        refuse(error(found, "`slurm:` in one at least", "docs/cluster.md says how"))
    return [stamp for host in NODES for stamp in stamps_of(host, wildcards)]


wildcard_constraints:
    size=r"own|\d+x\d+|own\d*x\d+|\d+xown",


rule inflate_model:
    input:
        source_input,
        "engine/inflate.py",
        "engine/widening.py",
    output:
        temp(directory("results/inflated/{model}/{size}")),
    log:
        "results/logs/inflate_model/{model}/{size}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
    params:
        model=source_dir,
        widths=width_flags,
        dtype=TIMED_DTYPE,
    shell:
        "python -m engine.inflate --model {params.model:q} {params.widths} --dtype {params.dtype} --out {output}"
        " 2>&1 | tee {log}"


rule pack_store:
    input:
        lambda wildcards: (
            source_input(wildcards) if wildcards.size == OWN else to_pack(wildcards)[0]
        ),
        "engine/pack.py",
    output:
        directory("results/packed/{model}/{size}"),
    log:
        "results/logs/pack_store/{model}/{size}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
    params:
        model=lambda wildcards: to_pack(wildcards)[0],
        dtype=lambda wildcards: to_pack(wildcards)[1],
        store=lambda wildcards: bits_flags(SETTINGS.models[wildcards.model]),
    shell:
        "python -m engine.offload pack --model {params.model:q} --dtype {params.dtype}{params.store} --out {output}"
        " 2>&1 | tee {log}"


# what was measured is data: newer code of the engine does not make it stale, and the record names the commit
rule measure_host:
    input:
        model_input,
        script="workflow/scripts/measure_host.py",
        store="results/packed/{model}/{size}",
        host=lambda wildcards: SETTINGS.hosts[wildcards.host],
        texts=expand("results/texts/{text}.json", text=SETTINGS.test_texts),
        demand="results/calibration/{model}.safetensors",
        predictors="results/predictors/{model}/README.md",
    output:
        touch(f"{STAMP}/timed"),
    log:
        "results/logs/measure_host/{host}/{model}/{size}.log",
    resources:
        mem_mb=0,  # all of the node's
        runtime=held_minutes,
        cpus_per_task=timed_threads,
        slurm_extra="--exclusive",  # what runs beside a measurement disturbs it
        constraint=constraint,
        gres=gres,
    params:
        model=model_dir,
        widths=width_flags,
        links=" ".join(
            f"--link {name} {' '.join(map(str, numbers))}"
            for name, numbers in SETTINGS.measure.links.items()
        ),
        sheets=f"{shlex.quote(config['policies_sheet'])} {shlex.quote(config['prefetch']['sheet'])}",
        rows=policy_rows(POLICIES),
        prefetch_rows=PREFETCH_ROWS,
        policy=" ".join([*POLICIES, *SETTINGS.measure.prefetch]),
        slots=" ".join(
            f"{name}={SETTINGS.slots[name]!r}" for name in SETTINGS.measure.slots
        ),
        threads=timed_threads,
        first=f"--first {SETTINGS.documents}" if SETTINGS.documents else "",
        out="results/measured/{host}",
    shell:
        "python {input.script} --model {wildcards.model} --model-dir {params.model:q} --store {input.store}"
        " {params.widths} --host {input.host} {params.links} --slots {params.slots}"
        " --policies {params.sheets} --policy {params.policy} --texts {input.texts} {params.first}"
        " --predictors results/predictors/{wildcards.model} --demand {input.demand} --threads {params.threads} --out {params.out} 2>&1 | tee {log}"


rule rescore_runs:
    input:
        f"{STAMP}/timed",
        script="workflow/scripts/rescore_runs.py",
        store="results/packed/{model}/{size}",
        texts=expand("results/texts/{text}.json", text=SETTINGS.test_texts),
    output:
        touch(f"{STAMP}/scored"),
    log:
        "results/logs/rescore_runs/{host}/{model}/{size}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
        cpus_per_task=SETTINGS.threads,
    params:
        record="results/measured/{host}/{model}/{size}",
        threads=SETTINGS.threads,
    shell:
        "python {input.script} --record {params.record}.json --store {input.store} --texts {input.texts}"
        " --threads {params.threads} --out {params.record}_rescored.json 2>&1 | tee {log}"


for HOST in {SETTINGS.this_host: None} | NODES:

    rule:
        name:
            f"results/measured/{HOST}"
        input:
            functools.partial(stamps_of, HOST),


# of a cluster: every host whose profile names its node
rule:
    name:
        "results/measured/cluster"
    input:
        stamps_of_nodes,


# ---- every host that was measured, here or elsewhere, committed or copied ---------------------------------------------
MEASURED = sorted(map(str, Path("results/measured").glob("[!.]*/host.yaml")))
MEASURED_FILES = sorted(
    str(path)
    for pattern in ("*.json", "*.safetensors")
    for path in Path("results/measured").glob(f"[!.]*/[!.]*/[!.]{pattern}")
)


rule tabulate_measured:
    input:
        SIMULATOR,
        MEASURED,
        MEASURED_FILES,
        "engine/measured_run.py",
        expand(
            "evals/{name}.py",
            name="measured_series measured_tables quality simulation speedup stats".split(),
        ),
        script="workflow/scripts/tabulate_measured.py",
        traces=expand("results/traces/{model}", model=MODELS),
        predictions=expand(
            "results/predictions/{model}/{kind}", model=MODELS, kind=PREDICTED
        ),
    output:
        table=reported("results/tables/local/measured.csv"),
        documents="results/tables/local/measured_documents.csv",
        errors=reported("results/tables/local/engine_simulator.csv"),
    log:
        "results/logs/tabulate_measured.log",
    params:
        hosts=" ".join(os.path.dirname(path) for path in MEASURED),
        predictions=" ".join(f"results/predictions/{model}" for model in MODELS),
        statistics=STATISTICS,
    shell:
        "python {input.script} --hosts {params.hosts} --traces {input.traces} --predictions {params.predictions}"
        " {params.statistics} --out {output.table} --out-documents {output.documents} --out-errors {output.errors} 2>&1 | tee {log}"
