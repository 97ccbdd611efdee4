"""Losses of background policies at the delays that the simulations found, where the run did not take them already.

A background load completes after so many tokens on a host; the emulator takes that as `delay(n)`, so a modelled point
has the quality of a run whose loads are as late as its own. What a lossy policy that prefetches decides depends on what
arrives in time; the simulation's own decisions are forced upon the model, on the first tokens of every document.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from engine.emulator import Replayer
from engine.errors import main_guard
from engine.files import atomic, write_json
from engine.log import Executed
from engine.policies import find_policy, load_policies
from evals.jobs import Progress, load_calibration, load_model, load_texts, load_tokenizer, model_hash, provenance
from evals.parallel import ahead
from evals.perplexity import context_of, finite, losses
from evals.quality import CELL_FAILURES, Text, emulate
from evals.records import load_arrays
from evals.simulation import LOGGED, delay_of, scored_under
from evals.stream import beginnings, cut


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the record")
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policies", required=True, help="the sheet")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts")
    parser.add_argument("--documents", type=int, help="the first documents of each text alone")
    parser.add_argument("--tokens", type=int, default=320, help="of every document, where decisions are scored")
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
    decided = [cell for path in a.simulations for cell in decisions(path)]
    arrays, cells = {}, []
    if wanted or decided:
        tokenizer, bos = load_tokenizer(a.model_dir)
        texts = load_texts(a.texts, tokenizer, bos, a.documents)
        short = {text.id: cut(text, a.tokens, tokenizer, bos) for text in texts}
        demand, _ = load_calibration(a.demand, a.model_dir)
        model = load_model(a.model_dir, a.dtype, 1)  # evals/parallel.py has the others
        from engine.hook import attach

        tokens = {text.id: sum(text.scored) for text in texts}
        to_score = len(wanted) * sum(tokens.values()) + sum(sum(short[cell["text"]].scored) for cell, _ in decided)
        progress = Progress(f"score {a.model} as late as simulated", to_score)
        with attach(model) as attachment:
            options = {"context": context_of(model, a.context), "bos": bos, "progress": progress.advance}
            tried, work = [], []
            for delay, name, slots_id, slots in wanted:
                start = {"delay": delay, "slots": slots, "demand": demand, **options}
                for text in texts:
                    tried.append({"delay_tokens": delay, "policy": name, "slots": slots_id, "text": text.id})
                    work.append(partial(losses_of, model, attachment, find_policy(sheet, name), text, **start))
            whole = {text.id: text for text in texts}
            for cell, log in decided:
                rows = beginnings(whole[cell["text"]].scored, a.tokens)
                tried.append(cell)
                work.append(partial(losses_under, model, attachment, log, rows, short[cell["text"]], **options))
            with ahead(work, a.threads) as results:
                for cell, result in zip(tried, results, strict=True):
                    try:
                        arrays[scored_under(**cell)] = finite(result())
                        cells.append(cell | {"status": "ok"})
                    except CELL_FAILURES as exc:
                        reason = f"{type(exc).__name__}: {' '.join(str(exc).split())}"
                        cells.append(cell | {"status": "failed", "reason": reason})
    with atomic(a.out_losses) as temporary:
        save_file(arrays or {"none": np.zeros(0, np.float32)}, temporary)
    facts = provenance(model=model_hash(a.model_dir), context=a.context, threads=a.threads, dtype=a.dtype)
    record = {"schema": "delayed-1", "model": a.model, "tokens": a.tokens, "cells": cells, "provenance": facts}
    write_json(a.out, record)


def losses_of(*run, **options) -> np.ndarray:
    """Of one cell, without its decisions."""
    return emulate(*run, **options)[0]


def losses_under(model, attachment, log: Callable[[], Executed], rows: np.ndarray, text: Text, **options) -> np.ndarray:
    """Of a text whose tokens' decisions are these rows of a log, read only now."""
    whole = log()
    replayer = Replayer(attachment, Executed(whole.executed[rows], whole.weights[rows]))
    with replayer.phase("decode"):
        return losses(model, text.documents, **options)


def decisions(path: str) -> list[tuple[dict, Callable[[], Executed]]]:
    """Every cell of a simulation whose decisions are to be scored, and how to read them."""
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    host, found = record["host"]["id"], []
    for cell in record["cells"]:
        row = record["rows"][cell["policy"]]
        if cell["status"] == "ok" and row["prefetch"] and not row["lossless"]:
            named = {name: cell[name] for name in ("link", "policy", "slots", "text")}
            found.append(({"host": host, **named}, partial(read_decisions, path, "/".join(named.values()))))
    return found


def read_decisions(path: str, name: str) -> Executed:
    with safe_open(Path(path).with_suffix(".safetensors"), framework="numpy") as file:
        return Executed(*(file.get_tensor(f"{name}/{part}") for part in LOGGED))


def delays(path: str) -> set[tuple[int, str, str, int]]:
    """(delay, policy, slots, slots a layer) of every background policy of a simulation, over all its texts."""
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    times = load_arrays(Path(path).with_suffix(".safetensors"))
    found: dict[tuple, list[np.ndarray]] = {}
    for cell in record["cells"]:
        row = record["rows"][cell["policy"]]
        if cell["status"] == "ok" and row["beta"] is not None and not row["prefetch"]:
            key = (cell["link"], cell["policy"], cell["slots"], cell["slots_count"])
            parts = found.setdefault(key, [])
            parts.append(times[f"{cell['link']}/{cell['policy']}/{cell['slots']}/{cell['text']}/delays"])
    return {
        (delay_of(np.concatenate(parts)), policy, slots, count) for (_, policy, slots, count), parts in found.items()
    }


if __name__ == "__main__":
    main_guard(main)
