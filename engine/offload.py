"""The engine on the command line: generate from a model that does not fit, and pack its experts so that they read fast.

    python -m engine.offload generate --model PATH --policy quality_first --slots 25% --prompt "Once upon a time"
    python -m engine.offload pack --model PATH --out STORE [--bits 4 --group 64]
    python -m engine.offload verify STORE

PATH is a Hugging Face checkpoint, read in place, or a packed store; or a hub id with its --revision, whose files are
fetched into the hub's cache first. `generate` streams text to standard output and ends with one line of JSON: what it
took, and the ceiling that the link sets. The last line is all that a script need read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.demand import demand_facts, load_demand
from engine.errors import error, main_guard, nearest
from engine.host_times import Affine
from engine.hub import commit_of, resolve
from engine.log import count
from engine.policies import Policy, find_policy, load_policies
from engine.quantisation import BITS, GROUPS
from engine.safetensors_files import weights_hash

if TYPE_CHECKING:
    from engine.offload_model import OpenModel

DTYPES = ("bfloat16", "float16", "float32")
SHEETS = ("config/policies.tsv", "config/prefetch.tsv")
RAM = "ram"  # a link beside those of engine.link: all experts are read into RAM first and wait there


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.offload", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("generate", help="text, then one line of JSON")
    one.add_argument("--model", required=True, help="a checkpoint folder, a packed store or a hub id")
    one.add_argument("--revision", help="of a hub id: commit, branch or tag; default its main branch")
    one.add_argument("--policy", required=True, help="id of the sheet")
    one.add_argument("--policies", nargs="+", default=SHEETS, help="the sheets")
    one.add_argument("--slots", required=True, help="a layer: 64, or 25%% of its experts")
    one.add_argument("--prompt", required=True)
    one.add_argument("--max-new-tokens", type=int, default=64)
    one.add_argument(
        "--demand",
        help="calibration for the warm start; default: cold, lossy at any --slots",
    )
    one.add_argument("--link", default="disk", help="disk, sdcard (throttled to one) or ram; default disk")
    one.add_argument("--predictor", help="of a policy that prefetches: the trained predictor, where it is one")
    one.add_argument("--host", help="of the same: the profile of this machine, which says how much passes in time")
    one.add_argument("--dtype", choices=DTYPES, help="default: the store's own, or what config.json says")
    one.add_argument("--completion", default="real", choices=("next_step", "real"), help="of background loads")
    one.add_argument("--threads", type=int, help="default: all cores")
    two = commands.add_parser("pack", help="write a packed store")
    two.add_argument("--model", required=True, help="a checkpoint folder or a hub id")
    two.add_argument("--revision", help="of a hub id: commit, branch or tag; default its main branch")
    two.add_argument("--out", required=True, help="a folder that does not exist yet")
    two.add_argument("--dtype", choices=DTYPES, help="default: what config.json says")
    two.add_argument("--bits", type=int, choices=BITS, help="of a weight of an expert; default: the dtype's")
    two.add_argument("--group", type=int, choices=GROUPS, help="weights that share a scale; default 64")
    three = commands.add_parser("verify", help="a packed store against its checksums, a checkpoint for NaN in experts")
    three.add_argument("store")
    a = parser.parse_args()
    {"generate": generate_text, "pack": pack_model, "verify": verify_store}[a.command](a)


# ---- pack, verify ----------------------------------------------------------------------------------------------------
def pack_model(a: argparse.Namespace) -> None:
    from engine.checkpoint import CheckpointStore
    from engine.pack import pack
    from engine.quantised_store import QuantisedStore
    from engine.store import is_packed

    if a.group and not a.bits:
        raise error(f"--group {a.group} without --bits", f"--bits {' or '.join(map(str, BITS))}", "say how many")
    a.model = resolve(a.model, a.revision)
    if is_packed(a.model):
        raise error(f"{a.model} is a packed store", "a checkpoint folder", "pack what it was packed from")
    with CheckpointStore(a.model, model_dtype(a.model, a.dtype)) as store:
        facts, out = {"model": weights_hash(a.model), "revision": commit_of(a.model)}, Path(a.out)
        few = QuantisedStore(store, a.bits, a.group or GROUPS[0]) if a.bits else None
        how = {"source": a.model, "leave_out": store.tensor_names, "facts": facts, "progress": _progress("pack")}
        manifest = pack(few or store, out, findings=few and few.report, **how)
    if few:
        print(f"{out}: {_quantised(manifest.facts['quantisation'])}")


def _quantised(report: dict) -> str:
    """What was lost, in a line."""
    by_parameter = ", ".join(f"{name} {share:.2%}" for name, share in report["relative_error_by_parameter"].items())
    worst = report["worst_expert"]
    return (
        f"{report['effective_bits']:g} bits a weight with scales ({report['bits']} in groups of {report['group']}); "
        f"relative root mean square error {report['relative_error']:.2%} ({by_parameter}), worst "
        f"{worst['relative_error']:.2%} in layer {worst['layer']}, expert {worst['expert']}"
    )


def verify_store(a: argparse.Namespace) -> None:
    from engine.store import is_packed, verify

    if is_packed(a.store):
        verify(Path(a.store), progress=_progress("verify"))
        print(f"{a.store}: every record is what was packed")
    else:
        _verify_checkpoint(Path(a.store))
        print(f"{a.store}: every expert is there and finite")


def _verify_checkpoint(folder: Path) -> None:
    """Read every expert in place; UserError names the first that is not finite."""
    from engine.checkpoint import CheckpointStore
    from engine.record import check_finite, page_aligned

    with CheckpointStore(folder, model_dtype(folder, None)) as store:
        record, tell = page_aligned(1, store.layout.record_bytes)[0], _progress("verify")
        for layer in range(store.layers):
            for expert in range(store.experts):
                store.read(layer, expert, memoryview(record.numpy()))
                check_finite(store.layout, record, store.name(layer, expert))
                tell(layer * store.experts + expert + 1, store.layers * store.experts)


def _progress(title: str):
    told = [time.perf_counter()]

    def tell(done: int, total: int) -> None:
        if time.perf_counter() - told[0] > 4 or done == total:
            told[0] = time.perf_counter()
            print(f"{title}: {done:,} of {total:,} records", file=sys.stderr, flush=True)

    return tell


def find_link(name: str) -> Affine | None:
    """What a link is throttled to, of its name on the command line."""
    from engine.link import LINKS

    links = {**LINKS, RAM: None}
    if name not in links:
        raise error(f"link '{name}'", "a link that every host has", nearest(name, links))
    return links[name]


def check_demand(path: str | Path, folder: str | Path) -> None:
    """UserError where a calibration is of other weights than a packed store or an inflated model says it computes."""
    ours, theirs = own_hash(folder), demand_facts(path).get("model")
    if ours and theirs and ours != theirs:
        raise error(f"{path} is of model {theirs}", f"{ours}, as in {folder}", "calibrate on this model")


def own_hash(folder: str | Path) -> str | None:
    """Whose function a packed store or an inflated model says it computes; of others None, to hash them takes long."""
    says = any((Path(folder) / name).is_file() for name in ("store.json", "inflation.json"))
    return weights_hash(folder) if says else None


def model_dtype(folder: str | Path, name: str | None):
    """The torch dtype of that name; of None the packed store's, or the one in config.json."""
    import torch
    from transformers import AutoConfig

    from engine.store import is_packed, read_manifest

    if name is None and is_packed(folder):
        return read_manifest(folder).layout.dtype
    if name is None:
        if not (Path(folder) / "config.json").is_file():
            raise error(f"no config.json in {folder}", "a checkpoint folder or a packed store", "check --model")
        found = AutoConfig.from_pretrained(folder).dtype
        name = str(found or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise error(f"dtype '{name}'", "a dtype that experts can have", nearest(name, DTYPES))
    return getattr(torch, name)


# ---- generate ---------------------------------------------------------------------------------------------------
def generate_text(a: argparse.Namespace) -> None:
    policy = find_policy({n: row for sheet in a.policies for n, row in load_policies(sheet).items()}, a.policy)
    if policy.prefetch and not a.host:
        raise error(f"policy '{policy.id}' without --host", *_PROFILE)
    demand = load_demand(a.demand) if a.demand else None
    for name, value in (("--max-new-tokens", a.max_new_tokens), ("--threads", a.threads)):
        if value is not None and value < 1:
            raise error(f"{name} {value}", "1 or more", "choose another number")
    limits = find_link(a.link)
    a.model = resolve(a.model, a.revision)
    if a.demand:
        check_demand(a.demand, a.model)
    import torch  # seconds, only once the arguments are sound
    import transformers

    from engine.generate import generate
    from engine.offload_model import OpenModel
    from engine.residency import parse_slots

    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(a.threads or len(os.sched_getaffinity(0)))
    with OpenModel(a.model, model_dtype(a.model, a.dtype), ram=a.link == RAM) as opened:
        tokenizer = transformers.AutoTokenizer.from_pretrained(a.model)
        slots = parse_slots(a.slots, opened.attachment.experts)
        engine = opened.engine(slots=slots, demand=demand, limits=limits, name=a.link)
        engine.use(policy, completion=a.completion, **(_ahead(a, policy, opened, slots) if policy.prefetch else {}))
        _compile(opened.model, engine)
        engine.link.clear()
        ids = tokenizer(a.prompt, add_special_tokens=False)["input_ids"]
        if tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id, *ids]
        tokens, dates = [], [time.perf_counter()]
        stalled = [engine.stalled_s]
        stop = tokenizer.eos_token_id
        for token in generate(opened.model, engine, ids, max_new_tokens=a.max_new_tokens, stop=stop):
            dates.append(time.perf_counter())
            stalled.append(engine.stalled_s)
            before = tokenizer.decode(tokens)
            tokens.append(token)
            print(tokenizer.decode(tokens)[len(before) :], end="", flush=True)
        print(flush=True)
        summary = {"revision": commit_of(a.model)} | _summary(engine, opened.store, np.diff(dates), np.diff(stalled))
        print(json.dumps(summary, allow_nan=False), flush=True)


_PROFILE = (
    "the profile of this machine, whose times say how much passes before a layer has routed",
    "python -m engine.host probe, then --host config/hosts/ID.yaml",
)


def _ahead(a: argparse.Namespace, policy: Policy, opened: OpenModel, slots: int) -> dict:
    """Predictor and window of a policy that prefetches."""
    from engine.geometry import Geometry
    from engine.host import load_host
    from engine.predictors import TRAINED, load_predictor, make_predictor
    from engine.timing import Timing

    if policy.prefetch in TRAINED and not a.predictor:
        todo = f"train it (results/predictors/MODEL/{policy.prefetch}.safetensors), then give it"
        raise error(f"policy '{policy.id}' without --predictor", f"a trained {policy.prefetch}", todo)
    if policy.prefetch in TRAINED:
        predictor = load_predictor(a.predictor, opened.attachment, own_hash(a.model))
    else:
        predictor = make_predictor(policy.prefetch, opened.attachment)
    config = json.loads((Path(a.model) / "config.json").read_text(encoding="utf-8"))
    dtype = str(opened.store.layout.dtype).removeprefix("torch.")
    own = dataclasses.replace(Geometry.of_config(config, dtype=dtype), expert_bytes=opened.store.layout.weight_bytes)
    timing = Timing.of(load_host(a.host), a.link, own, slots)
    return {"predictor": predictor, "window": timing.window(policy.schedule)}


def _compile(model, engine) -> None:
    """One token decoded and forgotten: what is compiled on first use takes ten seconds, and is no speed of a token."""
    import torch

    with torch.inference_mode(), engine.phase("decode"):
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    engine.restart()
    engine.clear_log()
    engine.stalled_s = 0.0
    if engine.ahead:
        engine.ahead.clear()


def _summary(engine, store, token_s: np.ndarray, stall_s: np.ndarray) -> dict:
    """token_s, stall_s [n]: of every new token, the first with the prompt. Means are over the others, if there are."""
    rest = slice(1, None) if len(token_s) > 1 else slice(None)
    journal = engine.link.journal()
    counts = count(engine.log()) if len(token_s) > 1 else None
    decoded = max(len(token_s) - 1, 1)
    best = _best_bytes_per_s(journal)
    mean_s, waited_s = float(token_s[rest].mean()), float(stall_s[rest].mean())
    record_bytes = engine.slots.layout.record_bytes
    there = engine.ahead.taken_bytes if engine.ahead else 0
    foreground = (counts["fetches"] * record_bytes - there) / decoded if counts else 0.0  # bytes a token, at most
    ceiling_s = mean_s - waited_s + (foreground / best if best else 0.0)
    summary = {
        "policy": engine.policy.id,
        "slots": engine.slots.slots,
        "link": engine.link.name,
        "cached": bool(getattr(store, "cached", False)),
        "new_tokens": len(token_s),
        "tokens_per_s": 1 / mean_s,
        "first_token_s": float(token_s[0]),
        "compute_s": mean_s - waited_s,
        "stall_s": waited_s,
        "ceiling_tokens_per_s": 1 / ceiling_s,
        "link_bytes_per_s": best,
        "bytes": int(journal["bytes"].sum()),
        "background_bytes": int(journal["bytes"][~journal["foreground"] & ~journal["prefetch"]].sum()),
        "prefetch_bytes": int(journal["bytes"][journal["prefetch"]].sum()),
        "dropped_pieces": engine.ahead.dropped_pieces if engine.ahead else 0,
        "peak_memory_bytes": peak_memory_bytes(),
        "failed_loads": engine.failures,
    }
    names = ("events", "hits", "fetches", "substitutions", "drops", "substituted_mass", "dropped_mass")
    return summary | {name: counts[name] if counts else 0 for name in (*names, "background_issued", "prefetched")}


def peak_memory_bytes() -> int:
    """The most that was resident since this program began; where the system says no more, since its parent did."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8")).group(1))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _best_bytes_per_s(journal: np.ndarray) -> float | None:
    """Of all records asked for together, the best rate that this run has seen; None without a read."""
    best = 0.0
    for begin_s in np.unique(journal["begin_s"]):
        batch = journal[journal["begin_s"] == begin_s]
        best = max(best, batch["bytes"].sum() / (batch["end_s"].max() - begin_s))
    return float(best) if best and math.isfinite(best) else None


if __name__ == "__main__":
    main_guard(main)
