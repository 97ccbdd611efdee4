"""Tables of the simulator that know no host: miss rates of every eviction by slots, and the open-loop error.

curves.csv: every eviction under miss rule fetch, from one read of each trace. open_loop.csv: the counts of every lossy
policy replayed over the recorded routing, beside those of the emulator, whose routing the policy itself has changed.
"""

import argparse
from pathlib import Path

import pandas as pd

from engine.demand import load_demand
from engine.errors import main_guard
from engine.files import atomic
from engine.log import load_log
from engine.policies import BASELINE, MOVING, Policy, find_policy, load_policies
from engine.simulator import decide, miss_curves, open_loop_error
from engine.trace_file import open_trace
from evals.jobs import Progress
from evals.records import is_rehearsal, load_scored
from evals.simulation import fetching_policy, load, text_of

BUDGETS_PERCENT = (6.25, 9.375, 12.5, 18.75, 25, 37.5, 50, 62.5, 75, 87.5, 100)
SHOWN = ("miss_rate", "substituted_share", "substituted_mass", "loads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", nargs="+", required=True, help="results/quality/<model>/<policy>/perplexity.json")
    parser.add_argument("--policies", required=True, help="the sheet")
    parser.add_argument("--delay", type=int, required=True, help="tokens, as the emulator took it")
    parser.add_argument("--out-curves", required=True)
    parser.add_argument("--out-errors", required=True)
    a = parser.parse_args()
    results = Path(a.records[0]).parents[3]
    sheet, curves, errors = load_policies(a.policies), [], []
    find_policy(sheet, BASELINE)
    for model, policies in load_scored(a.records).items():
        record = next(iter(policies.values())).record
        traces = [load(open_trace(results / "traces" / model / f"{text}.safetensors")) for text in record["texts"]]
        demand = load_demand(results / "calibration" / f"{model}.safetensors")
        curves += model_curves(model, traces, demand, is_rehearsal(record), find_policy(sheet, BASELINE))
        lossy = [own.record for name, own in policies.items() if not (sheet[name].lossless or sheet[name].in_place)]
        errors += model_errors(model, lossy, traces, demand, sheet, a.delay, results / "decisions" / model)
    for path, rows in ((a.out_curves, curves), (a.out_errors, errors)):
        with atomic(path) as temporary:
            pd.DataFrame(rows).to_csv(temporary, index=False, float_format="%.8g", lineterminator="\n")


def model_curves(model: str, traces, demand, rehearsal: bool, baseline: Policy) -> list[dict]:
    """Over all texts, each from the warm start."""
    experts, top_k = traces[0].experts, traces[0].top_k
    budgets = sorted({slots for p in BUDGETS_PERCENT if (slots := int(experts * p / 100)) >= top_k})
    policies = [fetching_policy(baseline, eviction) for eviction in MOVING]
    progress = Progress(f"miss rates of {model}", sum(t.tokens for t in traces) * len(policies) * len(budgets))
    found: dict[tuple[str, int], list[dict]] = {}
    for trace in traces:
        for row in miss_curves(trace, policies, budgets, demand=demand):
            found.setdefault((row["policy"], row["slots"]), []).append(row)
        progress.advance(trace.tokens * len(policies) * len(budgets))
    return [
        {
            "model": model,
            "eviction": eviction,
            "slots_count": slots,
            "slots_percent": 100 * slots / experts,
            "experts": experts,
            "text": "all",
            "tokens": sum(trace.tokens for trace in traces),
            "miss_rate": sum(row["misses"] for row in rows) / sum(row["demands"] for row in rows),
            "rehearsal": rehearsal,
        }
        for (eviction, slots), rows in found.items()
    ]


def model_errors(model: str, records: list[dict], traces, demand, sheet, delay: int, decisions: Path) -> list[dict]:
    """A row a (policy, slots, text): counts of both instruments side by side."""
    by_text = {text_of(trace): trace for trace in traces}
    cells = [(record["policy"], cell) for record in records for cell in record["cells"] if cell["status"] == "ok"]
    progress = Progress(f"open-loop error of {model}", sum(cell["tokens"] for _, cell in cells))
    rows = []
    for policy, cell in cells:
        trace = by_text[cell["text"]]
        simulated = decide(
            trace, find_policy(sheet, policy), slots=cell["slots_count"], demand=demand, delay=delay
        )  # fmt: skip
        emulated = load_log(decisions / policy / cell["slots"] / f"{cell['text']}.safetensors")
        found = open_loop_error(simulated, emulated)
        row = {"model": model, "policy": policy, "slots": cell["slots"], "text": cell["text"], "tokens": cell["tokens"]}
        for name in SHOWN:
            row |= {f"{name}_{part}": value for part, value in found[name].items()}
        rows.append(row)
        progress.advance(cell["tokens"])
    return rows


if __name__ == "__main__":
    main_guard(main)
