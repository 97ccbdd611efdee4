"""Scores the decision logs of timed runs with the emulator, whole: quality and speed come from the same decisions.

Every log of one model at one size is forced upon the model, all of whose experts are in memory, and decided again from
what the emulator's routers saw (engine/recheck.py). Where two runs decided the same (an exact policy always does), one
is scored for both.

python workflow/scripts/rescore_runs.py --record results/measured/local/reference/own.json \
    --store results/packed/reference/own --texts results/texts/bible_test.json --threads 2 \
    --out results/measured/local/reference/own_rescored.json
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
from engine.measured_run import DEMAND, RESCORED_SCHEMA, Cell, Run, cell_of, load_run, policy_of, read_record
from engine.offload_model import OpenModel
from engine.recheck import Recheck
from engine.residency import Demand
from engine.store import read_manifest
from evals.jobs import Progress, load_texts, load_tokenizer, provenance
from evals.perplexity import finite
from evals.quality import CELL_FAILURES, Text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", required=True, type=Path, help="results/measured/<host>/<model>/<size>.json")
    parser.add_argument("--store", required=True, help="packed store of the model at this size")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", required=True, type=Path, help="<size>_rescored.json; losses beside it")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    record, manifest = read_record(a.record), read_manifest(a.store)
    if record["provenance"]["store"] != manifest.identity:
        found = f"{a.record} is of store {record['provenance']['store'][:16]}"
        raise error(found, manifest.identity[:16], "move the folder of the host away and measure again")
    tokenizer, bos = load_tokenizer(a.store)
    texts = {text.id: text for text in load_texts(a.texts, tokenizer, bos)}
    demand = load_demand(a.record.parent / DEMAND)
    cells, arrays, scored = [], {}, {}
    progress = Progress(f"score the runs of {record['model']} {record['size']}", len(record["cells"]), "runs")
    with torch.inference_mode(), OpenModel(a.store, manifest.layout.dtype) as opened:
        opened.fill()
        for row in record["cells"]:
            cell = cell_of(record, row)
            found = {name: row[name] for name in ("link", "policy", "slots", "text", "repeat")}
            if row["status"] != "ok":
                cells.append(found | {"status": "failed", "reason": row["reason"]})
                progress.advance()
                continue
            try:
                run = checked_run(cell.path(a.record.parents[1]), row["sha256"])
                if (key := decisions(run, cell)) not in scored:
                    scored[key] = score(opened, run, cell, record, texts, bos, demand)
                facts, losses = scored[key]
                gap = float(np.abs(run.losses - losses).max())
                found |= {"status": "ok", "log": key[:16], **facts, "largest_loss_difference": gap}
                arrays[cell.name] = losses
            except CELL_FAILURES as exc:
                found |= {"status": "failed", "reason": f"{type(exc).__name__}: {' '.join(str(exc).split())}"}
            cells.append(found)
            progress.advance()
    losses = a.out.with_suffix(".safetensors")
    with atomic(losses) as temporary:
        save_file(arrays or {"none": np.zeros(0, np.float32)}, temporary)
    totals = {name: sum(facts[name] for facts, _ in scored.values()) for name in ("events", "differences")}
    head = {"schema": RESCORED_SCHEMA, "model": record["model"], "size": record["size"], "logs": len(scored), **totals}
    facts = provenance(record_sha256=sha256(a.record), losses_sha256=sha256(losses))
    write_json(a.out, head | {"cells": cells, "provenance": facts})


def checked_run(path: Path, digest: str) -> Run:
    if not path.is_file() or sha256(path) != digest:
        raise error(f"{path} is not what was measured", f"sha256 {digest}", "measure it again")
    return load_run(path)


def decisions(run: Run, cell: Cell) -> str:
    """sha256 of what was executed and when loads arrived: runs that agree in it have the same losses."""
    digest = hashlib.sha256(f"{cell.policy}/{cell.slots}/{run.facts['passages']}".encode())
    for array in (run.log.executed, run.log.weights, run.log.kind, run.log.moves):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def score(
    opened: OpenModel, run: Run, cell: Cell, record: dict, texts: dict[str, Text], bos: int | None, demand: Demand
) -> tuple[dict, np.ndarray]:
    """Counts of the log, its events that would have been decided otherwise, and its losses [T], a document a pass."""
    policy, slots = policy_of(record, cell.policy), record["slots"][cell.slots]["count"]
    recheck = Recheck(opened.attachment, run.log, policy, slots=slots, demand=demand)
    losses = []
    for document in passages_again(texts, cell.text, record, record["passages"][cell.link][cell.text], bos):
        ids = torch.tensor([document], device=opened.model.device)
        with recheck.phase("decode"):
            logits = opened.model(input_ids=ids[:, :-1], use_cache=False).logits[0].float()  # [T, V]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").cpu().numpy())
    if not recheck.finished:
        raise error(f"a log of {len(run.log.executed)} tokens", "the tokens of its passages", "measure it again")
    return count(run.log) | {"differences": recheck.differences()}, finite(np.concatenate(losses))


def passages_again(texts: dict[str, Text], name: str, record: dict, wanted: list, bos: int | None) -> list[list[int]]:
    """Ids of the passages that were decoded, each with its context token."""
    if name not in texts or texts[name].sha256 != record["texts"][name]["sha256"]:
        raise error(
            f"text {name} is absent or another", f"sha256 {record['texts'][name]['sha256']}", "resolve it again"
        )
    by_id = {document.id: document.ids for document in texts[name].documents}
    whole = [[*([] if bos is None else [bos]), *by_id[document]] for document, _, _ in wanted]
    return [ids[: tokens + 1] for ids, (_, _, tokens) in zip(whole, wanted, strict=True)]


if __name__ == "__main__":
    main_guard(main)
