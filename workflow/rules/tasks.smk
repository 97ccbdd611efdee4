# lm-eval's tasks: problems resolved, asked of every model in one job, and the tables made of what was said.

SHEETS = [config["policies_sheet"]]
if "sweep" in config:
    SHEETS.append(config["sweep"]["sheet"])
TASKS = list(SETTINGS.tasks.tasks)
FORCED = distinct(SETTINGS.policies, *map(load_policies, SHEETS[1:]))  # lossy ones
TASK_RECORDS = expand(
    "results/tasks/{model}/{policy}/{task}.json",
    model=MODELS,
    policy=SETTINGS.tasks.generate,
    task=TASKS,
)
AGREEMENTS = expand("results/tasks/{model}/agreement.json", model=MODELS)
ASKED = "adapter agreement answer_numbers answers answers_filter generation instruments lm_tasks pass_at sandbox task_rows task_sheet"


wildcard_constraints:
    task="|".join(TASKS),


rule resolve_task:
    input:
        expand("evals/{name}", name=CORPORA.split()),
        "evals/task_rows.py",
        "evals/task_sheet.py",
        script="workflow/scripts/resolve_task.py",
        tasks=config["tasks"]["sheet"],
    output:
        "results/tasks/{task}.json",
    log:
        "results/logs/resolve_task/{task}.log",
    params:
        problems=(
            f"--problems {SETTINGS.tasks.problems}" if SETTINGS.tasks.problems else ""
        ),
    shell:
        "python {input.script} --tasks {input.tasks} --id {wildcards.task} {params.problems} --out {output}"
        " 2>&1 | tee {log}"


rule run_tasks:
    input:
        model_input,
        ENGINE,
        EVALS,
        expand("evals/{name}.py", name=ASKED.split()),
        expand(
            "evals/tasks/{task}.yaml",
            task=(row.task for row in SETTINGS.tasks.tasks.values()),
        ),
        "engine/generate.py",
        script="workflow/scripts/run_tasks.py",
        tasks=config["tasks"]["sheet"],
        resolved=expand("results/tasks/{task}.json", task=TASKS),
        demand="results/calibration/{model}.safetensors",
    output:
        expand(
            "results/tasks/{{model}}/{policy}/{task}.json",
            policy=SETTINGS.tasks.generate,
            task=TASKS,
        ),
        "results/tasks/{model}/agreement.json",
    log:
        "results/logs/run_tasks/{model}.log",
    resources:
        mem_mb=held_mb,
        runtime=held_minutes,
        cpus_per_task=SETTINGS.threads,
    params:
        model=model_flags,
        policies=" ".join(map(shlex.quote, SHEETS)),
        rows=" ".join(
            map(
                str,
                [
                    *map(SETTINGS.policies.get, SETTINGS.tasks.generate),
                    *FORCED.values(),
                ],
            )
        ),
        generate=" ".join(SETTINGS.tasks.generate),
        force=" ".join(FORCED),
        slots=f"{SETTINGS.tasks.slots}={SETTINGS.slots[SETTINGS.tasks.slots]!r}",
        delay=SETTINGS.delay_tokens,
        new_tokens=SETTINGS.tasks.new_tokens,
        code="--run-code" if SETTINGS.tasks.run_code else "",
        threads=SETTINGS.threads,
    shell:
        "TQDM_DISABLE=1 python {input.script} --model {wildcards.model} {params.model} --policies {params.policies}"
        " --generate {params.generate} --force {params.force} --tasks {input.tasks} --resolved {input.resolved}"
        " --slots {params.slots} --demand {input.demand} --delay {params.delay} --new-tokens {params.new_tokens}"
        " {params.code} --threads {params.threads} --out results/tasks/{wildcards.model} 2>&1 | tee {log}"


rule tabulate_tasks:
    input:
        "evals/records.py",
        "evals/stats.py",
        "evals/task_sheet.py",
        script="workflow/scripts/tabulate_tasks.py",
        tasks=config["tasks"]["sheet"],
        records=TASK_RECORDS,
        agreements=AGREEMENTS,
    output:
        tasks=reported("results/tables/local/tasks.csv"),
        agreement=reported("results/tables/local/agreement.csv"),
    log:
        "results/logs/tabulate_tasks.log",
    params:
        statistics=STATISTICS,
        policies=" ".join(map(shlex.quote, SHEETS)),
        rows=" ".join(map(str, FORCED.values())),
    shell:
        "python {input.script} --records {input.records} --agreements {input.agreements} --tasks {input.tasks}"
        " --policies {params.policies} {params.statistics} --out-tasks {output.tasks}"
        " --out-agreement {output.agreement} 2>&1 | tee {log}"
