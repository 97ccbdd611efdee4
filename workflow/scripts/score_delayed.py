"""Losses of background policies at the delays that the simulations found, where the run did not take them already.

A background load completes after so many tokens on a host; the emulator takes that as `delay(n)`, so a modelled point
has the quality of a run whose loads are as late as its own.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.errors import main_guard
from engine.files import atomic, write_json
from engine.policies import find_policy, load_policies
from evals.jobs import Progress, load_calibration, load_model, load_texts, load_tokenizer, model_hash, provenance
from evals.parallel import ahead
from evals.perplexity import context_of, finite
from evals.quality import CELL_FAILURES, emulate
from evals.records import load_arrays
from evals.simulation import delay_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the record")
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--revision")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policies", required=True, help="the sheet")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts")
    parser.add_argument("--documents", type=int, help="the first documents of each text alone")
    parser.add_argument("--simulations", nargs="+", required=True, help="results/simulation/<model>/<host>.json")
    parser.add_argument("--demand", required=True)
    parser.add_argument("--delay", type=int, required=True, help="tokens that the run itself takes: not scored again")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out-losses", required=True)
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    sheet = load_policies(a.policies)
    wanted = sorted({cell for path in a.simulations for cell in delays(path) if cell[0] != a.delay})
    arrays, cells = {}, []
    if wanted:
        tokenizer, bos = load_tokenizer(a.model_dir, a.revision)
        texts = load_texts(a.texts, tokenizer, bos, a.documents)
        demand, _ = load_calibration(a.demand, a.model_dir)
        model = load_model(a.model_dir, a.dtype, 1, a.revision)  # evals/parallel.py has the others
        from engine.hook import attach

        progress = Progress(f"score {a.model} at the delays found", len(wanted) * sum(sum(t.scored) for t in texts))
        with attach(model) as attachment:
            options = {"context": context_of(model, a.context), "bos": bos, "progress": progress.advance}
            tried = [
                (find_policy(sheet, name), slots_id, text, {"delay": delay, "slots": slots, "demand": demand})
                for delay, name, slots_id, slots in wanted
                for text in texts
            ]
            work = [
                partial(losses_of, model, attachment, policy, text, **start, **options)
                for policy, _, text, start in tried
            ]
            with ahead(work, a.threads) as results:
                for (policy, slots_id, text, start), result in zip(tried, results, strict=True):
                    delay, name = start["delay"], policy.id
                    cell = {"delay_tokens": delay, "policy": name, "slots": slots_id, "text": text.id, "status": "ok"}
                    try:
                        arrays[f"{delay}/{name}/{slots_id}/{text.id}"] = finite(result())
                    except CELL_FAILURES as exc:
                        cell |= {"status": "failed", "reason": f"{type(exc).__name__}: {' '.join(str(exc).split())}"}
                    cells.append(cell)
    with atomic(a.out_losses) as temporary:
        save_file(arrays or {"none": np.zeros(0, np.float32)}, temporary)
    facts = provenance(model=model_hash(a.model_dir), context=a.context, threads=a.threads, dtype=a.dtype)
    write_json(a.out, {"schema": "delayed-1", "model": a.model, "cells": cells, "provenance": facts})


def losses_of(*run, **options) -> np.ndarray:
    """Of one cell, without its decisions."""
    return emulate(*run, **options)[0]


def delays(path: str) -> set[tuple[int, str, str, int]]:
    """(delay, policy, slots, slots a layer) of every background policy of a simulation, over all its texts."""
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    times = load_arrays(Path(path).with_suffix(".safetensors"))
    found: dict[tuple, list[np.ndarray]] = {}
    for cell in record["cells"]:
        if cell["status"] == "ok" and record["rows"][cell["policy"]]["beta"] is not None:
            key = (cell["link"], cell["policy"], cell["slots"], cell["slots_count"])
            parts = found.setdefault(key, [])
            parts.append(times[f"{cell['link']}/{cell['policy']}/{cell['slots']}/{cell['text']}/delays"])
    return {
        (delay_of(np.concatenate(parts)), policy, slots, count) for (_, policy, slots, count), parts in found.items()
    }


if __name__ == "__main__":
    main_guard(main)
