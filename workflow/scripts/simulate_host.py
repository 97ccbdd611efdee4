"""Times of every policy of one model on one host, over all its links: a cell for every slot budget and text.

The decisions are those of every instrument, replayed over the recorded routing; seconds come from the host's profile
and are modelled, also where its constants were measured.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.demand import load_demand
from engine.errors import UserError, main_guard
from engine.files import atomic, sha256, write_json
from engine.geometry import Geometry
from engine.policies import Policy, find_policy, load_policies
from engine.timing import offload_links
from engine.trace_file import open_trace
from evals.jobs import Progress, model_hash, provenance
from evals.simulation import Predicted, load, read_host, simulate_cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the record")
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout")
    parser.add_argument("--traces", required=True, help="folder, a trace a text")
    parser.add_argument("--demand", required=True)
    parser.add_argument("--policies", required=True, help="the sheet")
    parser.add_argument("--policy", nargs="+", required=True, help="ids")
    parser.add_argument("--slots", nargs="+", required=True, help="id=percent ...")
    parser.add_argument("--prefetch", help="a sheet of policies that prefetch, all of which are simulated too")
    parser.add_argument("--prefetch-slots", help="id=percent, their budget")
    parser.add_argument("--predictions", help="folder of predict_experts.py, for them")
    parser.add_argument("--host", required=True, help="profile")
    parser.add_argument("--width", type=int, help="D of the inflated model; default its own")
    parser.add_argument("--expert-width", type=int, help="F of the inflated model; default its own")
    parser.add_argument("--dtype", default="bfloat16", help="of the model that is timed")
    parser.add_argument("--bits", type=int, help="of its experts in slow memory; default those of the dtype")
    parser.add_argument("--group", type=int, help="inputs that share a scale, with --bits")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out-times", required=True)
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    sheet = load_policies(a.policies)
    policies = [find_policy(sheet, name) for name in a.policy]
    prefetching = list(load_policies(a.prefetch).values()) if a.prefetch else []
    demand = load_demand(a.demand)
    arrays: dict[str, np.ndarray] = {}
    record = {"schema": "simulation-1", "model": a.model, "instrument": "simulator", "cells": []}
    record |= {
        "rows": {p.id: row_of(p) for p in (*policies, *prefetching)},
        "host": {"id": Path(a.host).stem, "status": "absent"},
    }
    try:
        host = read_host(a.host)
    except UserError as exc:
        record["reason"] = " ".join(str(exc).split())
        print(f"{a.model} is not timed on {Path(a.host).stem}: {record['reason']}", flush=True)
    else:
        geometry = read_geometry(a)
        traces = [load(open_trace(path)) for path in sorted(Path(a.traces).glob("*.safetensors"))]
        for trace in traces:
            trace.check_model(model_hash=model_hash(a.model_dir))

        def keep(name: str, found: dict[str, np.ndarray]) -> None:
            arrays.update({f"{name}/{part}": array for part, array in found.items()})

        links, _ = offload_links(host)
        runs = [(policies, percents(a.slots))]
        if prefetching:
            runs.append((prefetching, percents([a.prefetch_slots])))
        cells = len(links) * sum(len(those) * len(budgets) for those, budgets in runs)
        progress = Progress(f"simulate {a.model} on {host.id}", cells * sum(trace.tokens for trace in traces))
        options = {"keep": keep, "named": Predicted(a.predictions or "", traces), "threads": a.threads}
        options["progress"] = progress.advance
        for those, budgets in runs:
            record["cells"] += simulate_cells(host, geometry, traces, those, budgets, demand, **options)
        record["host"] = {"id": host.id, "status": host.status, "fingerprint": host.fingerprint, "quick": host.quick}
        sizes = {} if isinstance(geometry, UserError) else dataclasses.asdict(geometry)
        record["geometry"] = sizes | {"width": a.width, "expert_width": a.expert_width, "dtype": a.dtype}
        record["geometry"] |= {"bits": a.bits, "group": a.group}
    with atomic(a.out_times) as temporary:
        save_file(arrays or {"none": np.zeros(0, np.float32)}, temporary)
    record |= {"provenance": provenance(host_sha256=sha256(a.host)), "times_sha256": sha256(a.out_times)}
    write_json(a.out, record)


def percents(pairs: list[str]) -> dict[str, float]:
    return {name: float(percent) for name, _, percent in (pair.partition("=") for pair in pairs)}


def read_geometry(a: argparse.Namespace) -> Geometry | UserError:
    """What the model weighs, inflated; the error where its family or the sizes do not allow it: its cells fail then."""
    config = json.loads((Path(a.model_dir) / "config.json").read_text(encoding="utf-8"))
    try:
        sizes = {"width": a.width, "expert_width": a.expert_width, "bits": a.bits, "group": a.group}
        return Geometry.of_config(config, dtype=a.dtype, **sizes)
    except UserError as exc:
        return exc


def row_of(policy: Policy) -> dict:
    row = {"miss_rule": policy.miss_rule, "eviction": policy.eviction, "beta": policy.beta}
    return row | {"lossless": policy.lossless, "prefetch": policy.prefetch, "schedule": policy.schedule}


if __name__ == "__main__":
    main_guard(main)
