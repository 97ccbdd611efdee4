CORPORA = "corpora.toml corpora.py corpus_code.py corpus_files.py corpus_makers.py corpus_sets.py corpus_wiki.py"


rule resolve_text:
    input:
        expand("evals/{name}", name=CORPORA.split()),
        script="workflow/scripts/resolve_text.py",
    output:
        "results/texts/{text}.json",
    log:
        "results/logs/resolve_text/{text}.log",
    shell:
        "python {input.script} --id {wildcards.text} --out {output} 2>&1 | tee {log}"
