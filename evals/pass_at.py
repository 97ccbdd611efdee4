"""What share of the problems do the completions solve? pass@k from the sandbox's verdicts.

    pass@k = mean over problems of 1 - C(n - c, k) / C(n, k)

for c of n samples that passed: the unbiased estimate of "at least one of k passes" (Chen et al. 2021, section 2.1).
Verdicts are counted apart, so that loops and memory are not read as wrong answers. Where generated code was not
allowed there is a status and no number.

    pass_at_1(completions, rows, allowed=require_opt_in(True))
"""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.errors import error
from evals.trial import VERDICTS, Limits, Outcome, judge

NOT_RUN = "not run (opt-in)"
COLUMNS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")


def humaneval_rows(data_dir: str | Path | None = None, cache_dir: str | Path | None = None) -> list[dict[str, str]]:
    """HumanEval's 164 rows, whole. Raises AbsentText where no source of the file is here."""
    from evals.corpora import row_of  # they need numpy, the rest of this file nothing
    from evals.corpus_files import default_cache, default_data_dir, locate

    row = row_of("humaneval")
    data = Path(data_dir) if data_dir else default_data_dir()
    path, _ = locate(row["sources"], row["sha256"], data, Path(cache_dir) if cache_dir else default_cache())
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


def estimate(samples: int, passed: int, k: int) -> float:
    """pass@k of one problem; UserError unless 1 <= k <= samples."""
    if not 1 <= k <= samples:
        raise error(f"pass@{k} from {samples} samples a problem", f"k from 1 to {samples}", "draw more, or lower k")
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def judge_all(
    samples: Sequence[Sequence[str]], rows: Sequence[Mapping[str, str]], limits: Limits | None = None
) -> list[list[Outcome]]:
    """The outcome of every sample of every problem, in their order. Their caller has asked whether they may run."""
    if len(samples) != len(rows):
        raise error(f"completions of {len(samples)} problems", f"of {len(rows)}, the rows", "give each row its own")
    return [[judge(row, sample, limits) for sample in of_row] for row, of_row in zip(rows, samples, strict=True)]


def pass_at_k(
    samples: Sequence[Sequence[str]],
    rows: Sequence[Mapping[str, str]],
    allowed: bool,
    ks: Sequence[int] = (1,),
    limits: Limits | None = None,
) -> dict:
    """{status, problems, pass_at: {k: share or None}, counts: {verdict: samples}, outcomes: a list a problem}.

    status is `run`, `not run (opt-in)`, or `not run (reason)` where a sandbox was refused; then no share is given.
    """
    for row, of_row in zip(rows, samples, strict=False):
        for k in ks:
            estimate(len(of_row), 0, k)
        if missing := [name for name in COLUMNS if name not in row]:
            raise error(f"a row without {', '.join(missing)}", f"columns {', '.join(COLUMNS)}", "pass HumanEval's rows")
    record = {"status": NOT_RUN, "problems": len(rows), "pass_at": dict.fromkeys(ks), "counts": {}, "outcomes": []}
    if not allowed:
        return record
    outcomes = judge_all(samples, rows, limits)
    verdicts = [[outcome.verdict for outcome in of_row] for of_row in outcomes]
    counts = Counter(verdict for of_row in verdicts for verdict in of_row)
    record["counts"] = {name: counts[name] for name in VERDICTS}
    record["outcomes"] = [
        [{"task_id": row["task_id"], "verdict": outcome.verdict, "reason": outcome.reason} for outcome in of_row]
        for row, of_row in zip(rows, outcomes, strict=True)
    ]
    if counts["refused"]:
        reason = next(o.reason for of_row in outcomes for o in of_row if o.verdict == "refused")
        record["status"] = f"not run ({reason})"
    elif not rows:
        record["status"] = "not run (no problems)"
    else:
        record["status"] = "run"
        record["pass_at"] = {
            k: math.fsum(estimate(len(of_row), of_row.count("passed"), k) for of_row in verdicts) / len(rows)
            for k in ks
        }
    return record


def pass_at_1(completions: Sequence[str], rows: Sequence[Mapping[str, str]], allowed: bool) -> dict:
    """One completion a problem: {status, problems, pass_at_1, counts, outcomes: [{task_id, verdict, reason}]}."""
    record = pass_at_k([[completion] for completion in completions], rows, allowed)
    return {
        "status": record["status"],
        "problems": record["problems"],
        "pass_at_1": record["pass_at"][1],
        "counts": record["counts"],
        "outcomes": [outcome for (outcome,) in record["outcomes"]],
    }
