"""Times every policy with the engine on this machine: one model at one size, over every link, repeated, interleaved.

Policies take turns in every round, in an order drawn anew, so that a disturbance of the machine meets all of them. A
run that is there already, of the same weights, text, policy and settings, is kept: a killed measurement goes on. The
record is rewritten after every run.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from engine.store import read_manifest
from safetensors import SafetensorError

from engine.demand import load_demand
from engine.errors import UserError, error, main_guard
from engine.files import sha256, write_json, write_text
from engine.harness import decode, null
from engine.host import load_host
from engine.host_facts import fingerprint
from engine.link import limits_of
from engine.log import load_log
from engine.offload_model import OpenModel
from engine.policies import BASELINE, find_policy, load_policies
from engine.residency import check_slots, slots_from_percent
from engine.timing import offload_links
from evals.jobs import Progress, load_texts, load_tokenizer, provenance
from evals.measured import SCHEMA, Cell, passages, save_run, size_of
from evals.quality import CELL_FAILURES

ORDER_SEED = 7
WARM_UP_TOKENS = 16
NULL_TOKENS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the record")
    parser.add_argument("--store", required=True, help="packed store of the model at this size")
    parser.add_argument("--width", type=int, help="D of the inflated model; default: its own size")
    parser.add_argument("--expert-width", type=int, help="F of the inflated model")
    parser.add_argument("--host", required=True, help="profile of this machine")
    parser.add_argument("--links", nargs="*", help="of the profile; default: its disks")
    parser.add_argument("--policies", required=True, help="the sheet")
    parser.add_argument("--policy", nargs="+", required=True, help="ids; clairvoyant ones are left out")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts")
    parser.add_argument("--demand", required=True)
    parser.add_argument("--slots", nargs="+", required=True, help="id=percent ...")
    parser.add_argument("--documents", type=int, required=True, help="of each text")
    parser.add_argument("--tokens", type=int, required=True, help="of each document")
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", required=True, help="folder of the host")
    a = parser.parse_args()
    host, folder = load_host(a.host), Path(a.out)
    if host.fingerprint != fingerprint():
        raise error(f"{a.host} is of machine {host.fingerprint}", f"this one, {fingerprint()}", "probe this machine")
    links = host_links(host, a.links)
    sheet = load_policies(a.policies)
    policies = [p for p in (find_policy(sheet, name) for name in a.policy) if not p.clairvoyant]
    torch.set_num_threads(a.threads)
    size, manifest = size_of(a.width, a.expert_width), read_manifest(a.store)
    tokenizer, bos = load_tokenizer(a.store)
    texts = load_texts(a.texts, tokenizer, bos)
    parts = {text.id: passages(text, bos, documents=a.documents, tokens=a.tokens) for text in texts}
    record = {
        "schema": SCHEMA,
        "instrument": "engine",
        "host": {"id": host.id, "fingerprint": host.fingerprint, "quick": host.quick},
        "model": a.model,
        "size": size,
        "width": a.width,
        "expert_width": a.expert_width,
        "dtype": str(manifest.layout.dtype).removeprefix("torch."),
        "expert_bytes": manifest.layout.weight_bytes,
        "record_bytes": manifest.layout.record_bytes,
        "experts": manifest.experts,
        "layers": manifest.layers,
        "passages": {name: [[p.document, len(p.rows)] for p in found] for name, found in parts.items()},
        "texts": {text.id: {"topic": text.topic, "sha256": text.sha256} for text in texts},
        "policies": {p.id: dataclasses.asdict(p) for p in policies},
        "null_s": float(np.median(null(NULL_TOKENS))),
        "provenance": provenance(threads=a.threads, store=manifest.identity, host_sha256=sha256(a.host)),
        "cells": [],
    }
    write_text(folder / "host.yaml", Path(a.host).read_text(encoding="utf-8"))
    out = folder / a.model / f"{size}.json"
    slots = {name: float(percent) for name, _, percent in (pair.partition("=") for pair in a.slots)}
    with torch.inference_mode(), OpenModel(a.store, manifest.layout.dtype) as opened:
        if opened.store.cached:
            raise error(f"{a.store}: the file system has no O_DIRECT", "reads past the page cache", "move it to a disk")
        run = Runs(a, record, opened, texts, parts, load_demand(a.demand), folder, out)
        total = len(links) * len(slots) * len(policies) * len(texts) * a.repeats
        run.progress = Progress(f"measure {a.model} {size}", total, "runs")
        for link in links:
            for slots_id, percent in slots.items():
                run.all(link, slots_id, percent, policies)


def host_links(host, names):
    """The links that are measured: those named, else every disk of the profile."""
    offered, skipped = offload_links(host)
    links = [offered[n] for n in names if n in offered] if names else [x for x in offered.values() if x.kind == "disk"]
    if not links or (names and len(links) < len(names)):
        raise error(f"links {names} of host {host.id}", f"some of {', '.join(offered)}", "; ".join(skipped.values()))
    return links


class Runs:
    """The runs of one model at one size."""

    def __init__(self, a, record, opened, texts, parts, demand, folder, out) -> None:
        self.a, self.record, self.opened, self.demand = a, record, opened, demand
        self.texts, self.parts, self.folder, self.out = texts, parts, folder, out

    def all(self, link, slots_id: str, percent: float, policies) -> None:
        """Every policy over every text, `repeats` times, in rounds."""
        slots = slots_from_percent(self.opened.attachment.experts, percent)
        check_slots(slots, self.opened.attachment.experts, self.opened.attachment.top_k)
        engine = self.opened.engine(slots=slots, demand=self.demand, limits=limits_of(link), name=link.name)
        try:
            warm = find(policies, BASELINE) or policies[0]
            engine.use(warm, completion="real")
            decode(self.opened.model, engine, [self.parts[self.texts[0].id][0].ids[: WARM_UP_TOKENS + 1]])
            rng = np.random.default_rng(ORDER_SEED)
            for repeat in range(1, self.a.repeats + 1):
                for i in rng.permutation(len(policies)):
                    for text in self.texts:
                        ids = (link.name, policies[i].id, slots_id, text.id, repeat)
                        self.one(engine, link, policies[i], text, Cell(self.a.model, self.record["size"], *ids), slots)
        finally:
            engine.link.close()

    def one(self, engine, link, policy, text, cell: Cell, slots: int) -> None:
        path = cell.path(self.folder)
        facts = self.facts(policy, text, cell, slots)
        row = {"link": cell.link, "policy": cell.policy, "slots": cell.slots, "slots_count": slots}
        row |= {"text": cell.text, "repeat": cell.repeat, "status": "ok"}
        try:
            if not kept(path, facts):
                engine.use(policy, completion="real")
                engine.link.clear()
                failed = len(engine.failures)
                timed = decode(self.opened.model, engine, [part.ids for part in self.parts[text.id]])
                journal = engine.link.journal()
                check_rates(link, journal, str(path))
                if not np.isfinite(timed.losses).all():
                    raise error(f"{path}: losses that are not finite", "finite losses", "check the store (verify)")
                save_run(path, timed, engine.log(**facts, **provenance()), journal)
                row["failed_loads"] = engine.failures[failed:]
            row["sha256"] = sha256(path)
        except CELL_FAILURES as exc:
            path.unlink(missing_ok=True)
            row |= {"status": "failed", "reason": f"{type(exc).__name__}: {' '.join(str(exc).split())}"}
        self.record["cells"].append(row)
        write_json(self.out, self.record)
        self.progress.advance()

    def facts(self, policy, text, cell: Cell, slots: int) -> dict[str, str]:
        """What a run is of; one that agrees in all of it need not be taken again."""
        found = {
            **dataclasses.asdict(cell),
            "host": self.record["host"]["fingerprint"],
            "host_sha256": self.record["provenance"]["host_sha256"],
            "store": self.record["provenance"]["store"],
            "policy_row": json.dumps(dataclasses.asdict(policy)),
            "slots_count": slots,
            "text_sha256": text.sha256,
            "passages": json.dumps(self.record["passages"][text.id]),
            "completion": "real",
            "threads": self.a.threads,
        }
        return {name: str(value) for name, value in found.items()}


def find(policies, name):
    return next((policy for policy in policies if policy.id == name), None)


def kept(path: Path, facts: dict[str, str]) -> bool:
    """Whether this very run lies there, whole."""
    if not path.is_file():
        return False
    try:
        found = load_log(path).provenance
    except (UserError, SafetensorError):
        return False
    return all(found.get(name) == value for name, value in facts.items())


def check_rates(link, journal: np.ndarray, where: str) -> None:
    """Raise UserError where records came in faster than the link can bring them."""
    for begin_s in np.unique(journal["begin_s"]):
        batch = journal[journal["begin_s"] == begin_s]
        link.check_observed(float(batch["bytes"].sum()), float(batch["end_s"].max() - begin_s), where)


if __name__ == "__main__":
    main_guard(main)
