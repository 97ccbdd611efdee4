# Training of the embedded reference models, hours on two cores and not part of results/all. A killed run goes on where
# it was: ask for the same target again. The weights land in results/training/<id>/packed, ready for models/<id>.


rule train_reference_model:
    input:
        recipe="config/reference_models.yaml",
        script="workflow/scripts/train_reference_model.py",
    output:
        "results/reference_model/{reference}",
    log:
        "results/logs/train_reference_model/{reference}.log",
    wildcard_constraints:
        reference="[a-z][a-z0-9_]*",
    threads: SETTINGS.threads  # no more than --cores where it is given
    shell:
        "python {input.script} --recipe {input.recipe} --id {wildcards.reference} --threads {threads}"
        " --workdir results/training/{wildcards.reference} --output {output} 2>&1 | tee {log}"
