"""Scores the decision logs of timed runs with the emulator, whole: quality and speed come from the same decisions.

Every log of one model at one size is forced upon the model, all of whose experts are in memory, and decided again from
what the emulator's routers saw (engine/recheck.py). Where two runs decided the same (an exact policy always does), one
is scored for both.
"""

import argparse
import hashlib
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from engine.demand import load_demand
from engine.errors import error, main_guard
from engine.files import atomic, sha256, write_json
from engine.log import count
from engine.offload_model import OpenModel
from engine.policies import Policy
from engine.recheck import Recheck
from engine.store import read_manifest
from evals.jobs import Progress, load_texts, load_tokenizer, provenance
from evals.measured import Run, cell_of, load_run, passages, read_record
from evals.quality import CELL_FAILURES

SCHEMA = "rescored-1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", required=True, help="results/measured/<host>/<model>/<size>.json")
    parser.add_argument("--store", required=True, help="packed store of the model at this size")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts")
    parser.add_argument("--demand", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", required=True, help="<size>_rescored.json; losses beside it as .safetensors")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    record, folder = read_record(Path(a.record)), Path(a.record).parents[1]
    manifest = read_manifest(a.store)
    if record["provenance"]["store"] != manifest.identity:
        raise error(f"{a.record} is of store {record['provenance']['store']}", f"{manifest.identity}", "measure again")
    tokenizer, bos = load_tokenizer(a.store)
    texts = {text.id: text for text in load_texts(a.texts, tokenizer, bos)}
    demand = load_demand(a.demand)
    policies = {name: Policy(**row) for name, row in record["policies"].items()}
    done: dict[str, tuple[dict, np.ndarray]] = {}
    cells, arrays = [], {}
    progress = Progress(f"rescore {record['model']} {record['size']}", len(record["cells"]), "runs")
    with torch.inference_mode(), OpenModel(a.store, manifest.layout.dtype) as opened:
        opened.fill()
        for row in record["cells"]:
            cell = cell_of(record, row)
            found = {name: row[name] for name in ("link", "policy", "slots", "text", "repeat")}
            if row["status"] == "ok":
                path = cell.path(folder)
                try:
                    if sha256(path) != row["sha256"]:
                        raise error(f"{path} is not what was measured", f"sha256 {row['sha256']}", "measure it again")
                    run, parts = load_run(path), cut(texts[cell.text], bos, record)
                    key = decisions(run, cell)
                    if key not in done:
                        slots = row["slots_count"]
                        done[key] = rescore(opened, run, parts, policies[cell.policy], slots, demand)
                    facts, losses = done[key]
                    gap = float(np.abs(run.losses - losses).max())
                    found |= {"status": "ok", "log": key[:16], **facts, "largest_loss_difference": gap}
                    arrays[cell.name] = losses
                except CELL_FAILURES as exc:
                    found |= {"status": "failed", "reason": f"{type(exc).__name__}: {' '.join(str(exc).split())}"}
            else:
                found |= {"status": "failed", "reason": row["reason"]}
            cells.append(found)
            progress.advance()
    with atomic(Path(a.out).with_suffix(".safetensors")) as temporary:
        save_file(arrays or {"none": np.zeros(0, np.float32)}, temporary)
    events = {
        "events": sum(facts["events"] for facts, _ in done.values()),
        "differences": sum(facts["differences"] for facts, _ in done.values()),
    }
    facts = {"schema": SCHEMA, "model": record["model"], "size": record["size"], "logs": len(done), **events}
    write_json(a.out, facts | {"cells": cells, "provenance": provenance(record_sha256=sha256(a.record))})


def cut(text, bos, record: dict):
    """The passages that the record says were decoded."""
    wanted = record["passages"][text.id]
    return passages(text, bos, documents=len(wanted), tokens=wanted[0][1])


def decisions(run: Run, cell) -> str:
    """sha256 of what was executed and when loads arrived: runs that agree in it have the same losses."""
    digest = hashlib.sha256(f"{cell.policy}/{cell.slots}/{cell.text}".encode())
    for array in (run.log.executed, run.log.weights, run.log.kind, run.log.moves):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def rescore(opened: OpenModel, run: Run, parts, policy: Policy, slots: int, demand) -> tuple[dict, np.ndarray]:
    """Counts of the log and its losses [T] under the emulator, a document a pass."""
    recheck = Recheck(opened.attachment, run.log, policy, slots=slots, demand=demand)
    losses = []
    for part in parts:
        ids = torch.tensor([part.ids])
        with recheck.phase("decode"):
            logits = opened.model(input_ids=ids[:, :-1], use_cache=False).logits[0].float()  # [T, V]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").numpy())
    if not recheck.finished:
        raise error(f"a log of {len(run.log.executed)} tokens", "the tokens of its passages", "measure it again")
    counts = {name: value for name, value in count(run.log).items() if isinstance(value, int | float)}
    return counts | {"differences": recheck.differences()}, np.concatenate(losses)


if __name__ == "__main__":
    main_guard(main)
