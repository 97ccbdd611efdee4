rule resolve_text:
    input:
        "evals/corpora.toml",
    output:
        "results/texts/{text}.json",
    log:
        "results/logs/resolve_text/{text}.log",
    params:
        script="workflow/scripts/resolve_text.py",
    shell:
        "python {params.script} --id {wildcards.text} --out {output} 2>&1 | tee {log}"
