"""One Python program over the documents of a file of ids, a line a token, as llama_decode.c prints them.

    engine        this project's, experts in a packed store, some in slots
    transformers  stock: a checkpoint that is memory-mapped, so that the system decides what stays in memory
    accelerate    stock: what is no expert's in memory, the experts offloaded to disk

python -m evals.peers.worker transformers --model FOLDER --documents documents.txt --threads 2

Lines of standard output: `document seconds loss` of every token; `bytes N`, what the process has had the disk read,
before the second document and at the end; of the engine also `counts {...}`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from engine.errors import error, main_guard
from evals.peers.workload import read_ids

SPARE_BYTES = 500_000_000  # of accelerate: what may stay in memory; more than everything but the experts takes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evals.peers.worker", description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=sorted(PROGRAMS))
    parser.add_argument("--model", required=True, help="packed store of the engine, checkpoint of the others")
    parser.add_argument("--documents", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--offload", help="accelerate: an empty folder on the disk")
    parser.add_argument("--policy", help="engine: id")
    parser.add_argument("--policies", nargs="+", help="engine: the sheets")
    parser.add_argument("--slots", help="engine: as in 25%%")
    parser.add_argument("--demand", help="engine: calibration for the warm start")
    parser.add_argument("--predictors", help="engine: folder of trained predictors")
    parser.add_argument("--host", help="engine: profile of this machine")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    PROGRAMS[a.program](a, read_ids(a.documents))


# ---- programs --------------------------------------------------------------------------------------------------------
def run_engine(a: argparse.Namespace, documents: list[list[int]]) -> None:
    from engine.demand import load_demand
    from engine.harness import decode
    from engine.host import load_host
    from engine.log import count
    from engine.offload import own_hash
    from engine.offload_model import OpenModel
    from engine.policies import find_policy, load_policies
    from engine.residency import parse_slots
    from engine.store import read_manifest
    from evals.measured_prefetch import Ahead, geometry_of

    policy = find_policy({name: row for sheet in a.policies for name, row in load_policies(sheet).items()}, a.policy)
    dtype = read_manifest(a.model).layout.dtype
    with torch.inference_mode(), OpenModel(a.model, dtype, device="cpu") as opened:
        if opened.store.cached:
            raise error(f"{a.model}: the file system has no O_DIRECT", "reads past the page cache", "move it to a disk")
        slots = parse_slots(a.slots, opened.attachment.experts)
        layout = opened.store.layout
        geometry = geometry_of(a.model, str(dtype).removeprefix("torch."), layout.weight_bytes)
        ahead = Ahead(a.predictors, own_hash(a.model), load_host(a.host), geometry) if policy.prefetch else None
        engine = opened.engine(slots=slots, demand=load_demand(a.demand))
        engine.use(policy, completion="real", **(ahead.of(policy, opened, "disk", slots) if ahead else {}))
        for number, ids in enumerate(documents):
            timed = decode(opened.model, engine, [ids])
            tell(number, zip(timed.token_s.tolist(), timed.losses.tolist(), strict=True))
            if number == 0:
                engine.clear_log()
        tell_bytes()
        print("counts", json.dumps(count(engine.log()), allow_nan=False), flush=True)


def run_transformers(a: argparse.Namespace, documents: list[list[int]]) -> None:
    run_stock(load(a.model), documents)


def run_accelerate(a: argparse.Namespace, documents: list[list[int]]) -> None:
    memory = {"cpu": SPARE_BYTES}
    run_stock(load(a.model, device_map="auto", max_memory=memory, offload_folder=a.offload), documents)


PROGRAMS: dict[str, Callable[[argparse.Namespace, list[list[int]]], None]] = {
    "accelerate": run_accelerate,
    "engine": run_engine,
    "transformers": run_transformers,
}


def load(folder: str, **options):
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


@torch.inference_mode()
def run_stock(model, documents: list[list[int]]) -> None:
    """As engine.harness.decode does it, on a model that nobody attached to."""
    for number, ids in enumerate(documents):
        cache, took = None, []
        for token, target in itertools.pairwise(ids):
            wanted = torch.tensor([[token]])
            began = time.perf_counter()
            output = model(input_ids=wanted, cache=cache, use_cache=True)
            seconds = time.perf_counter() - began
            cache = output.past_key_values
            took.append((seconds, float(-output.logits[0, -1].float().log_softmax(-1)[target])))
            if number == 0 and len(took) == 1:
                print(f"first token {seconds:.3f} s", file=sys.stderr, flush=True)
        tell(number, took)
    tell_bytes()


# ---- lines -----------------------------------------------------------------------------------------------------------
def tell(document: int, tokens: Iterable[tuple[float, float]]) -> None:
    """The lines of a document, (seconds, loss) a token."""
    if document == 1:
        tell_bytes()
    for seconds, loss in tokens:
        print(f"{document} {seconds:.9f} {loss:.9f}")
    sys.stdout.flush()


def tell_bytes() -> None:
    found = re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
    print("bytes", found[1] if found else -1, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main_guard(main)
