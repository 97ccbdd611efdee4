"""Replay one router trace, recorded here or imported, without a model: miss rates over slot budgets, times on a host.

    python workflow/scripts/replay_trace.py --trace my.safetensors --out-curves curves.csv
    python workflow/scripts/replay_trace.py --trace my.safetensors --host config/hosts/rtx3090_pcie4.yaml \\
        --expert-bytes 6291456 --dense-bytes 30000000 --head-bytes 622000000 --out-times times.csv

The first needs nothing but the trace and reads it once. The second prices every policy that the trace can decide (of
the others the table says why not) on every link of the host; sizes of a model come as flags, or from a transformers
config.json where its layers are stock ones. Both start cold unless --demand names a calibration, and carry the state
through the trace.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd

from engine.demand import load_demand
from engine.errors import error, main_guard
from engine.files import atomic
from engine.geometry import Geometry
from engine.host import load_host
from engine.policies import BASELINE, MOVING, Policy, find_policy, load_policies
from engine.residency import Demand
from engine.simulator import miss_curves
from engine.timing import offload_links
from engine.trace_file import TraceFile, open_trace
from evals.jobs import Progress
from evals.simulation import fetching_policy, simulate_cells

BUDGETS = 16  # slot budgets of a curve unless --slots says otherwise
SIZES = ("expert_bytes", "dense_bytes", "kv_bytes", "head_bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", required=True, help="router trace (docs/router_traces.md)")
    parser.add_argument("--demand", help="results/calibration/<model>.safetensors, for a warm start")
    parser.add_argument("--slots", nargs="+", help="slots a layer; default: 16 budgets from K to E, `all`: every one")
    parser.add_argument("--out-curves", help="miss rates of every eviction, always fetching")
    parser.add_argument("--host", help="host profile")
    parser.add_argument("--policies", default="config/policies.tsv", help="the sheet")
    parser.add_argument("--config", help="config.json of the model that is timed")
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="of the model that is timed")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out-times", help="times of every policy on every link of the host")
    a = parser.parse_args()
    if not (a.out_curves or a.out_times):
        raise error("neither --out-curves nor --out-times", "one of them", "say what to write")
    trace = open_trace(a.trace)
    demand = load_demand(a.demand) if a.demand else None
    slots = budgets(a.slots, trace)
    if a.out_curves:
        write(a.out_curves, curves(trace, slots, demand, find_policy(load_policies(a.policies), BASELINE)))
    if a.out_times:
        if not a.host:
            raise error("--out-times without --host", "a host profile", "add --host config/hosts/<id>.yaml")
        write(a.out_times, times(a, trace, slots if a.slots else [max(trace.experts // 4, trace.top_k)], demand))


def budgets(given: list[str] | None, trace: TraceFile) -> list[int]:
    """Slots a layer, from K to E."""
    if given == ["all"]:
        return list(range(trace.top_k, trace.experts + 1))
    if given is None:
        return sorted({int(s) for s in np.geomspace(trace.top_k, trace.experts, BUDGETS).round()})
    for word in given:
        if not word.isdigit() or not trace.top_k <= int(word) <= trace.experts:
            expected = f"`all`, or whole numbers from K = {trace.top_k} to E = {trace.experts}"
            raise error(f"--slots {word}", expected, "choose other slots")
    return sorted({int(word) for word in given})


def curves(trace: TraceFile, slots: list[int], demand: Demand | None, baseline: Policy) -> list[dict]:
    policies = [fetching_policy(baseline, eviction) for eviction in MOVING]
    rows = miss_curves(trace, policies, slots, demand=demand)
    return [{"eviction" if key == "policy" else key: value for key, value in row.items()} for row in rows]


def times(a: argparse.Namespace, trace: TraceFile, slots: list[int], demand: Demand | None) -> list[dict]:
    host, policies = load_host(a.host), load_policies(a.policies).values()
    links, _ = offload_links(host)
    progress = Progress(f"replay on {host.id}", len(links) * len(policies) * len(slots) * trace.tokens)
    percents = {str(count): 100 * (count + 0.5) / trace.experts for count in slots}  # rounded down to the count again
    rows = simulate_cells(
        host, geometry(a, trace), [trace], policies, percents, demand, keep=lambda *_: None, progress=progress.advance
    )
    left_out = ("hits_by_layer", "wall_s", "slots_percent")
    return [{key: value for key, value in row.items() if key not in left_out} for row in rows]


def geometry(a: argparse.Namespace, trace: TraceFile) -> Geometry:
    given = {name: getattr(a, name) for name in SIZES if getattr(a, name) is not None}
    if a.config:
        try:
            config = json.loads(Path(a.config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise error(f"{a.config}: {exc}", "the model's config.json", "check the path") from None
        found = Geometry.of_config(config, dtype=a.dtype)
        trace.check_model(experts=found.experts, top_k=found.top_k, layers=found.layers)
        return found
    missing = [name for name in ("expert_bytes", "dense_bytes", "head_bytes") if name not in given]
    if missing or min(given.values(), default=0) < 0:
        found = f"no --{missing[0].replace('_', '-')}" if missing else f"a size of {min(given.values())}"
        raise error(found, "--config, or the sizes in bytes", "say what the model weighs")
    return Geometry(trace.layers, trace.experts, trace.top_k, **({"kv_bytes": 0} | given), dtype=a.dtype)


def write(path: str, rows: list[dict]) -> None:
    with atomic(path) as temporary:
        pd.DataFrame(rows).to_csv(temporary, index=False, float_format="%.8g", lineterminator="\n")
    print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main_guard(main)
