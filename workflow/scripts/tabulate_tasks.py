"""From answers to tables: what every policy wrote, and how far it says what the baseline says.

Shares of problems have Wilson's interval; the share of positions, which problems have in unequal numbers, the bootstrap
over problems of evals/stats.py. A task that was not to be had, a policy that failed and code that was not run keep a
row with the reason.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from scipy.stats import binomtest

from engine.errors import error, main_guard
from engine.files import atomic
from engine.policies import BASELINE, Policy, load_policies
from evals.records import is_rehearsal
from evals.stats import paired_difference
from evals.task_sheet import load_tasks
from evals.task_tables import AGREEMENT_COLUMNS, NO_EFFECT, NOT_RUN, TASK_COLUMNS

NEAR_ZERO = 0.05  # a share of problems solved that leaves nothing to lose
WILSON, BOOTSTRAP = "Wilson over problems", "studentised bootstrap over problems"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", nargs="+", required=True, help="results/tasks/<model>/<policy>/<task>.json")
    parser.add_argument("--agreements", nargs="+", required=True, help="results/tasks/<model>/agreement.json")
    parser.add_argument("--tasks", required=True, help="the sheet")
    parser.add_argument("--policies", nargs="+", required=True, help="sheets; ids of the first are bundles")
    parser.add_argument("--level", type=float, default=0.95)
    parser.add_argument("--replicates", type=int, default=9999)
    parser.add_argument("--seed", type=int, default=20512)
    parser.add_argument("--out-tasks", required=True)
    parser.add_argument("--out-agreement", required=True)
    a = parser.parse_args()
    options = {"level": a.level, "replicates": a.replicates, "seed": a.seed}
    sheet = load_tasks(a.tasks)
    bundles, *others = [load_policies(path) for path in a.policies]
    policies = {name: policy for more in reversed(others) for name, policy in more.items()} | bundles
    facts = {name: policy_facts(policy, name in bundles) for name, policy in policies.items()}
    records = [read(path, "task-1", "policy", "task", "status") for path in a.records]
    agreements = [read(path, "agreement-1", "cells") for path in a.agreements]
    baselines = {(r["model"], r["task"]): r for r in records if r["policy"] == BASELINE}

    rows, forced = [], []
    for record in records:
        metrics, baseline = sheet[record["task"]].metrics, baselines[record["model"], record["task"]]
        own = place(record) | {name: record[name] for name in ("policy", "task", "text")} | facts[record["policy"]]
        rows += [own | row for row in written(record, metrics, baseline, a.level)]
    for found in agreements:
        cells = pd.DataFrame([place(found) | cell | facts[cell["policy"]] for cell in found["cells"]])
        for (policy, _), part in cells.groupby(["policy", "task"], sort=False):
            own = {**part.iloc[0][["policy", "task", "text"]], **place(found), **facts[policy]}
            rows += [own | row for row in agreed(part, options)]
        forced.append(cells[cells["policy"] != BASELINE])
    save(a.out_tasks, pd.DataFrame(rows), TASK_COLUMNS)
    save(a.out_agreement, pd.concat(forced, ignore_index=True), AGREEMENT_COLUMNS)


def read(path: str, schema: str, *keys: str) -> dict:
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        for key in ("model", "slots", "slots_percent", "slots_count", "experts", "expert_bytes", *keys):
            record[key]
        if record["schema"] != schema:
            raise ValueError(f"schema {record['schema']}")
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise error(f"{path}: {type(exc).__name__} {exc}", "a record of run_tasks.py", "`make retry`") from None
    return record


def place(record: dict) -> dict:
    """What all rows of a record share."""
    names = ("model", "slots", "slots_percent", "slots_count", "experts")
    return {name: record[name] for name in names} | {"rehearsal": is_rehearsal(record)}


def policy_facts(policy: Policy, bundle: bool) -> dict:
    names = ("miss_rule", "eviction", "standin", "beta")
    return {name: getattr(policy, name) for name in names} | {"bundle": bundle}


# ---- what was written ------------------------------------------------------------------------------------------------
def written(record: dict, metrics: tuple[str, ...], baseline: dict, level: float) -> Iterator[dict]:
    """Rows of one record. A share is of the problems, unless its note says of which."""
    if record["status"] != "ok":
        lost = {"status": record["status"], "reason": record["reason"]}
        yield from ({"metric": name, "unit": "share", **lost} for name in metrics)
        return
    problems = record["problems"]
    for name in metrics:
        if name == "pass_at_1":
            yield passed(record["pass_at_1"], level)
            continue
        row = share(name, [problem["scores"][name] for problem in problems], level)
        yield row | {"note": near_zero(name, baseline)}
    if "numeric" in metrics:
        yield share("answers_stated", [problem["answer"] is not None for problem in problems], level)
        if record["policy"] != BASELINE:
            yield same_answers(problems, baseline, level)
    yield share("truncated", [problem["truncated"] for problem in problems], level)
    yield number("prompts_cut", record["requests_truncated"], len(problems), "problems")
    yield number("tokens", record["tokens"], len(problems), "tokens")
    emulator = "wall time of the emulator on this machine, no speed of an offloaded model"
    yield number("tokens_per_s", record["tokens_per_s"], len(problems), "tokens a second") | {"note": emulator}
    if record["decisions"] is not None:
        mass = number("substituted_mass", record["decisions"]["substituted_mass"], len(problems), "share")
        yield mass | {"note": NO_EFFECT if record["lossy_without_effect"] else ""}


def share(name: str, hits: list[float], level: float) -> dict:
    """How many of the problems, each 0 or 1, with Wilson's interval."""
    count, of = round(sum(hits)), len(hits)
    found = binomtest(count, of).proportion_ci(level, method="wilson")
    row = {"metric": name, "unit": "share", "value": count / of, "n": of, "low": found.low, "high": found.high}
    return row | {"interval": WILSON, "level": level, "status": "ok"}


def number(name: str, value: float, of: int, unit: str) -> dict:
    return {"metric": name, "unit": unit, "value": value, "n": of, "status": "ok"}


def near_zero(name: str, baseline: dict) -> str:
    """What is to be said where the baseline solves next to nothing: then no policy can lose anything."""
    if baseline["status"] != "ok":
        return ""
    scores = [problem["scores"][name] for problem in baseline["problems"]]
    if sum(scores) > NEAR_ZERO * len(scores):
        return ""
    return f"the baseline scores {sum(scores):g} of {len(scores)}, near zero: this cannot tell policies apart"


def same_answers(problems: list[dict], baseline: dict, level: float) -> dict:
    """Of the problems to which the baseline states an answer, those that get the same one."""
    answers = {problem["problem"]: problem["answer"] for problem in baseline.get("problems", ())}
    same = [p["answer"] == answers[p["problem"]] for p in problems if answers.get(p["problem"]) is not None]
    if not same:
        return {
            "metric": "same_answer",
            "unit": "share",
            "n": 0,
            "status": f"{NOT_RUN} (the baseline states no answer)",
        }
    return share("same_answer", same, level) | {"note": "of the problems to which the baseline states an answer"}


def passed(found: dict, level: float) -> dict:
    """pass@1 as evals/pass_at.py found it, or why it was not asked."""
    row = {"metric": "pass_at_1", "unit": "share", "n": found["problems"]}
    if found["pass_at_1"] is None:
        return row | {"status": found["status"]}
    return share("pass_at_1", [outcome["verdict"] == "passed" for outcome in found["outcomes"]], level)


# ---- what was forced -------------------------------------------------------------------------------------------------
def agreed(part: pd.DataFrame, options: dict) -> Iterator[dict]:
    """Rows of one policy and task. No number where a problem failed: its positions would be missing."""
    names = {"forced_agreement": "share", "forced_prefix": "positions", "forced_mass": "share"}
    if (part["status"] != "ok").any():
        worst = part[part["status"] != "ok"].iloc[0]
        lost = {"status": worst["status"], "reason": worst["reason"]}
        yield from ({"metric": name, "unit": unit, **lost} for name, unit in names.items())
        return
    asked = part[part["positions"] > 0]
    if asked.empty:
        lost = {"n": len(part), "status": f"{NOT_RUN} (the baseline says one token to every problem)"}
        yield from ({"metric": name, "unit": unit, **lost} for name, unit in names.items())
        return
    changed = asked["substitutions"].sum() + asked["drops"].sum()
    note = NO_EFFECT if part["policy"].iloc[0] != BASELINE and not changed else ""
    for name, column, weight in (
        ("forced_agreement", "agreed", asked["positions"]),
        ("forced_prefix", "common_prefix", asked["positions"] ** 0),
        ("forced_mass", "substituted_mass", asked["events"]),
    ):
        sums = asked[column] * weight if name == "forced_mass" else asked[column]
        found = paired_difference(sums, weight, **options)
        row = {
            "metric": name,
            "unit": names[name],
            "value": found.estimate,
            "n": len(asked),
            "status": "ok",
            "note": note,
        }
        if found.low is not None:
            top = 1.0 if names[name] == "share" else float("inf")
            row |= {"low": max(found.low, 0.0), "high": min(found.high, top), "interval": BOOTSTRAP}
            row |= {"level": options["level"]}
        yield row


def save(path: str, table: pd.DataFrame, columns: tuple[str, ...]) -> None:
    with atomic(path) as temporary:
        table.reindex(columns=columns).to_csv(temporary, index=False, float_format="%.8g", lineterminator="\n")


if __name__ == "__main__":
    main_guard(main)
