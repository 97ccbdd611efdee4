"""Ask one model every task: some policies by generation, every lossy one by forcing the baseline's continuation.

One job a model, because importing torch, transformers and lm-eval costs as much as several policies. Every problem is
a restart from the warm start, its prompt exact. Generated code is run only where that was asked for and allowed.
"""

import argparse
import dataclasses
from functools import partial
from pathlib import Path

from engine.emulator import Emulator
from engine.errors import error, main_guard
from engine.files import write_json
from engine.hook import attach
from engine.policies import BASELINE, Policy, find_policy, load_policies
from engine.residency import slots_from_percent
from evals.agreement import agreements, failure
from evals.generation import KeepingLM, answer_task
from evals.jobs import Progress, expert_bytes, load_calibration, load_model, load_tokenizer, provenance
from evals.lm_tasks import load_task
from evals.parallel import ahead
from evals.pass_at import pass_at_1
from evals.quality import CELL_FAILURES
from evals.sandbox import require_opt_in
from evals.task_rows import read_resolved
from evals.task_sheet import Task, load_tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the records")
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policies", nargs="+", required=True, help="sheets, the first to name an id has it")
    parser.add_argument("--generate", nargs="+", required=True, help="ids; the baseline among them")
    parser.add_argument("--force", nargs="*", default=[], help="ids")
    parser.add_argument("--tasks", required=True, help="the sheet")
    parser.add_argument("--resolved", nargs="+", required=True, help="files of resolve_task.py")
    parser.add_argument("--slots", required=True, help="id=percent")
    parser.add_argument("--demand", required=True)
    parser.add_argument("--delay", type=int, default=1, help="tokens until a background load completes")
    parser.add_argument("--new-tokens", type=int, required=True, help="where a task has no limit of its own")
    parser.add_argument("--run-code", action="store_true", help="run what is generated for HumanEval, in the sandbox")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", required=True, type=Path, help="folder: <policy>/<task>.json and agreement.json")
    a = parser.parse_args()
    allowed = require_opt_in(a.run_code)  # before anything is generated
    if BASELINE not in a.generate:
        raise error(f"--generate without {BASELINE}", "the baseline: its continuation is forced", "add it")
    sheets = [load_policies(path) for path in reversed(a.policies)]
    policies = {name: policy for sheet in sheets for name, policy in sheet.items()}
    generate = [find_policy(policies, name) for name in sorted(a.generate, key=lambda name: name != BASELINE)]
    force = [generate[0], *(find_policy(policies, name) for name in a.force)]  # the baseline: how exact it is itself
    resolved = [read_resolved(path) for path in a.resolved]
    sheet = load_tasks(a.tasks)
    run = Run(a, {value["id"]: sheet[value["id"]] for value in resolved}, resolved)
    with ahead([partial(run.ask, value, generate, force, allowed) for value in resolved], a.threads) as results:
        cells = [cell for result in results for cell in result()]
    write_json(a.out / "agreement.json", run.facts | {"schema": "agreement-1", "cells": cells})


class Run:
    """A loaded, attached model and what its records have in common."""

    def __init__(self, a: argparse.Namespace, tasks: dict[str, Task], resolved: list[dict]) -> None:
        self.a, self.tasks = a, tasks
        self.files = dict(zip((value["id"] for value in resolved), a.resolved, strict=True))
        self.demand, weights = load_calibration(a.demand, a.model_dir)
        self.tokenizer, _ = load_tokenizer(a.model_dir)
        self.model = load_model(a.model_dir, a.dtype, 1)  # evals/parallel.py has the others
        self.attachment = attach(self.model)
        name, _, percent = a.slots.partition("=")
        self.slots = slots_from_percent(self.attachment.experts, float(percent))
        self.facts = {
            "schema": "task-1",
            "model": a.model,
            "instrument": "emulator",
            "continuity": "restart",
            "start": "warm",
            "completion": f"delay({a.delay})" if a.delay > 1 else "next_step",
            "slots": name,
            "slots_percent": float(percent),
            "slots_count": self.slots,
            "experts": self.attachment.experts,
            "expert_bytes": expert_bytes(self.attachment),
            "provenance": provenance(model=weights, threads=a.threads, dtype=a.dtype),
        }
        problems = sum(len(value.get("rows", ())) for value in resolved)
        self.progress = Progress(f"tasks {a.model}", problems * (len(a.generate) + 1 + len(a.force)), "answers")

    def ask(self, value: dict, generate: list[Policy], force: list[Policy], allowed: bool) -> list[dict]:
        """All of one task; its records are written, the rows of its forced agreement come back."""
        task = self.tasks[value["id"]]
        told = {"task": task.id, "text": task.text}
        if value["status"] != "ok":
            lost = {"status": "absent", "reason": value["reason"]}
            for policy in generate:
                self.write(policy, task, told | lost)
            return [told | {"policy": policy.id, "problem": "", **lost} for policy in force]
        told |= {name: value[name] for name in ("sha256", "rows_sha256", "found", "left_out")}
        for policy in generate:
            record, said = self.generated(policy, task, value, allowed)
            self.write(policy, task, told | record)
            if policy.id == BASELINE:
                baseline, prompts = record, [one.prompt for one in said]
        told = {"task": task.id, "text": task.text}
        if baseline["status"] != "ok":
            lost = {"problem": "", "status": "failed", "reason": f"{BASELINE}: {baseline['reason']}"}
            return [told | {"policy": policy.id, **lost} for policy in force]
        rows = agreements(
            self.model,
            self.attachment,
            force,
            dict(zip((row["id"] for row in value["rows"]), prompts, strict=True)),
            new_tokens=task.new_tokens or self.a.new_tokens,
            slots=self.slots,
            demand=self.demand,
            delay=self.a.delay,
            progress=self.progress.advance,
        )
        return [told | row for row in rows]

    def generated(self, policy: Policy, task: Task, value: dict, allowed: bool) -> tuple[dict, list]:
        """(record, what was said); of a policy that failed its reason, and nothing."""
        try:
            emulator = Emulator(self.attachment, policy, slots=self.slots, demand=self.demand, delay=self.a.delay)
            lm = KeepingLM(self.model, emulator, self.tokenizer, progress=self.progress.advance)
            asked = load_task(task.task, self.files[task.id], task.new_tokens or self.a.new_tokens)
            record, said = answer_task(lm, asked)
            if "pass_at_1" in task.metrics:
                texts = [problem["text"] for problem in record["problems"]]
                record["pass_at_1"] = pass_at_1(texts, value["rows"], allowed)
        except CELL_FAILURES as exc:
            return failure(exc), []
        return {"status": "ok", **record}, said

    def write(self, policy: Policy, task: Task, record: dict) -> None:
        row = {name: "inf" if cell == float("inf") else cell for name, cell in dataclasses.asdict(policy).items()}
        path = self.a.out / policy.id / f"{task.id}.json"
        write_json(path, self.facts | {"policy": policy.id, "policy_row": row} | record)


if __name__ == "__main__":
    main_guard(main)
