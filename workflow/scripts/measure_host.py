"""Times every policy with the engine on this machine: one model at one size, over its links, repeated, interleaved.

Policies take turns in every round, in an order drawn anew, so that a disturbance of the machine meets all of them. The
record is rewritten after every run. A run that is there already, of the same weights, text, policy and settings, is
kept, so a killed measurement goes on by the same command; nothing is ever removed but a run that failed.

python workflow/scripts/measure_host.py --model reference --model-dir results/models/reference \
    --store results/packed/reference/own --host results/hosts/local.yaml --link disk 4 32 2 --slots s25=25 \
    --policies config/policies.tsv --policy fetch_lfu_decay rule_015 --texts results/texts/bible_test.json \
    --demand results/calibration/reference.safetensors --threads 2 --out results/measured/local
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import yaml

from engine.demand import load_demand
from engine.errors import UserError, error, main_guard
from engine.files import copy, sha256, write_json
from engine.harness import decode, null
from engine.hook import Attachment
from engine.host_facts import fingerprint
from engine.host_sample import other_cores, rounded
from engine.host_times import Host, Link
from engine.link import limits_of
from engine.measured_run import (
    DEMAND,
    PROFILE,
    SCHEMA,
    Cell,
    check_rates,
    load_run,
    predictor_key,
    records,
    save_run,
    size_of,
)
from engine.offload_model import OpenModel
from engine.policies import BASELINE, Policy, as_row, find_policy, load_policies
from engine.residency import check_slots, slots_from_percent
from engine.store import Manifest, read_manifest
from engine.timing import offload_links
from evals.jobs import Progress, load_texts, load_tokenizer, model_hash, provenance
from evals.measured import Passage, passages
from evals.measured_prefetch import Ahead, geometry_of, is_timed, trained_predictors
from evals.quality import CELL_FAILURES, Text
from evals.simulation import read_host

ORDER_SEED = 7
WARM_UP_TOKENS = 16
NULL_TOKENS = 1000
TIMED = ("disk", "pcie")  # kinds of links


def main() -> None:
    a = arguments()
    host, folder = this_host(a.host, a.threads), Path(a.out)
    links, skipped = host_links(host, [name for name, *_ in a.link])
    sheet = {name: policy for path in a.policies for name, policy in load_policies(path).items()}
    policies = [p for p in (find_policy(sheet, name) for name in a.policy) if is_timed(p)]
    trained = trained_predictors(a.predictors, policies)
    torch.set_num_threads(a.threads)
    tokenizer, bos = load_tokenizer(a.store)
    texts = {text.id: text for text in load_texts(a.texts, tokenizer, bos, a.first)}
    wanted = {name: [int(n) for n in numbers] for name, *numbers in a.link if name in links}
    parts = {
        name: {i: passages(text, bos, documents=documents, tokens=tokens) for i, text in texts.items()}
        for name, (documents, tokens, _) in wanted.items()
    }
    manifest = read_manifest(a.store)
    with torch.inference_mode(), ExitStack() as stack:
        kinds = {link.kind for link in links.values()}
        opened = {kind: open_store(a.store, manifest, kind, host, stack) for kind in kinds}
        freeze(folder, a.model, size_of(a.width, a.expert_width), manifest.identity, a.host, a.demand)
        attachment = next(iter(opened.values())).attachment
        facts = of_model(a, manifest, attachment.top_k) | {
            "host": {"id": host.id, "fingerprint": host.fingerprint, "quick": host.quick},
            "links": {name: of_link(links[name], numbers) for name, numbers in wanted.items()},
            "skipped": skipped,
            "slots": slot_counts(a.slots, attachment),
            "passages": {name: {i: rows(part) for i, part in own.items()} for name, own in parts.items()},
            "texts": {text.id: {"topic": text.topic, "sha256": text.sha256} for text in texts.values()},
            "policies": {policy.id: as_row(policy) for policy in policies},
            "provenance": provenance(
                threads=a.threads,
                model=model_hash(a.model_dir),
                store=manifest.identity,
                host_sha256=sha256(a.host),
                demand_sha256=sha256(a.demand),
                **{
                    predictor_key(policy): sha256(trained[policy.prefetch])
                    for policy in policies
                    if policy.prefetch in trained
                },
            ),
        }
        ahead = Ahead(
            a.predictors, model_hash(a.model_dir), host, geometry_of(a.store, facts["dtype"], facts["expert_bytes"])
        )
        session = Session(facts, folder, texts, parts, policies, load_demand(a.demand), ahead)
        for link in links.values():
            for slots_id in facts["slots"]:
                session.measure(opened[link.kind], link, slots_id)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the record")
    parser.add_argument("--model-dir", required=True, help="the model that is not inflated, whose routing is recorded")
    parser.add_argument("--store", required=True, help="packed store of the model at this size")
    parser.add_argument("--width", type=int, help="D of the inflated model; default: its own size")
    parser.add_argument("--expert-width", type=int, help="F of the inflated model")
    parser.add_argument("--host", required=True, help="profile of this machine")
    parser.add_argument(
        "--link",
        nargs=4,
        action="append",
        required=True,
        metavar=("NAME", "DOCUMENTS", "TOKENS", "REPEATS"),
        help="of the profile: the first tokens of so many documents of each text, so often; may be repeated",
    )
    parser.add_argument("--policies", nargs="+", required=True, help="the sheets")
    what = "ids; clairvoyant and frozen ones are left out, and those that prefetch at random"
    parser.add_argument("--policy", nargs="+", required=True, help=what)
    parser.add_argument("--predictors", help="folder of the trained predictors, for policies that prefetch")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts")
    parser.add_argument("--first", type=int, help="the first documents of each text alone, as its trace has them")
    parser.add_argument("--demand", required=True)
    parser.add_argument("--slots", nargs="+", required=True, help="id=percent ...")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", required=True, help="folder of the host")
    return parser.parse_args()


# ---- what is measured ------------------------------------------------------------------------------------------------
def this_host(path: str, threads: int) -> Host:
    """The profile; UserError unless it is this machine's, probed with as many threads as will run."""
    host = read_host(path)
    if host.fingerprint != fingerprint():
        raise error(f"{path} is of machine {host.fingerprint}", f"this one, {fingerprint()}", "probe this machine")
    probed = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["compute"][host.device.device]["threads"]
    if probed != threads:
        raise error(f"{path}: probed with {probed} threads", f"the {threads} of this run", "set `threads`, or probe")
    return host


def freeze(folder: Path, model: str, size: str, store: str, profile: str, demand: str) -> None:
    """Profile and demand beside the runs that depend on them.

    UserError where the folder holds runs of another machine, profile, store or demand: they are not mixed, and nothing
    of them is replaced.
    """
    wanted = {"host_sha256": sha256(profile), "demand_sha256": sha256(demand), "store": store}
    for record in records(folder):
        held = record["provenance"]
        of_size = {"store"} if (record["model"], record["size"]) == (model, size) else set()
        compared = {"host_sha256"} | ({"demand_sha256"} if record["model"] == model else set()) | of_size
        if record["host"]["fingerprint"] != fingerprint() or any(held[name] != wanted[name] for name in compared):
            differs = [name for name in sorted(compared) if held[name] != wanted[name]] or ["fingerprint"]
            raise error(
                f"{folder}: runs of {record['model']} {record['size']} with another {', '.join(differs)}",
                "one machine, profile, store and demand in a folder",
                "move the folder away to measure anew",
            )
    copy(profile, folder / PROFILE)
    copy(demand, folder / model / DEMAND)


def host_links(host: Host, names: list[str]) -> tuple[dict[str, Link], dict[str, str]]:
    """The links that are measured, and why each of the others is not."""
    offered, skipped = offload_links(host)
    links, reasons = {}, {}
    for name in names:
        if name not in offered:
            reasons[name] = skipped.get(name, f"no such link in the profile of {host.id}")
        elif offered[name].kind not in TIMED:
            reasons[name] = f"of kind {offered[name].kind}, {' and '.join(TIMED)} alone are timed"
        else:
            links[name] = offered[name]
    for name, reason in reasons.items():
        print(f"link {name} is not measured: {reason}", flush=True)
    if not links:
        raise error(
            f"links {', '.join(names)} of host {host.id}", f"some of {', '.join(offered)}", "; ".join(reasons.values())
        )
    return links, reasons


def open_store(store: str, manifest: Manifest, kind: str, host: Host, stack: ExitStack) -> OpenModel:
    """The model, its experts on the disk, or in pinned memory before a GPU; kind: of the link."""
    ram = kind == "pcie"
    opened = stack.enter_context(OpenModel(store, manifest.layout.dtype, ram=ram, device=host.device.device))
    if not ram and opened.store.cached:
        raise error(f"{store}: the file system has no O_DIRECT", "reads past the page cache", "move it to a disk")
    return opened


def of_model(a: argparse.Namespace, manifest: Manifest, top_k: int) -> dict:
    """What the record says of the model at this size."""
    dtype = str(manifest.layout.dtype).removeprefix("torch.")
    geometry, own = geometry_of(a.store, dtype, manifest.layout.weight_bytes), geometry_of(a.model_dir, dtype)
    records = manifest.layers * manifest.experts
    return {
        "model": a.model,
        "size": size_of(a.width, a.expert_width),
        "width": a.width,
        "expert_width": a.expert_width,
        "dtype": dtype,
        "expert_bytes": manifest.layout.weight_bytes,
        "record_bytes": manifest.layout.record_bytes,
        "experts": manifest.experts,
        "layers": manifest.layers,
        "top_k": top_k,
        "model_expert_bytes": records * (own.expert_bytes if own else manifest.layout.weight_bytes),
        "geometry": dataclasses.asdict(geometry) if geometry else None,
    }


def of_link(link: Link, numbers: list[int]) -> dict:
    return {"kind": link.kind, "status": link.status} | dict(
        zip(("documents", "tokens", "repeats"), numbers, strict=True)
    )


def slot_counts(pairs: list[str], attachment: Attachment) -> dict[str, dict]:
    found = {}
    for name, _, percent in (pair.partition("=") for pair in pairs):
        count = slots_from_percent(attachment.experts, float(percent))
        check_slots(count, attachment.experts, attachment.top_k)
        found[name] = {"percent": float(percent), "count": count}
    return found


def rows(parts: list[Passage]) -> list[list]:
    return [[part.document, part.rows.start, len(part.rows)] for part in parts]


# ---- the runs --------------------------------------------------------------------------------------------------------
class Session:
    """The runs of one model at one size. The record lists the cells in the order of `plan`, whenever they were run."""

    def __init__(
        self,
        facts: dict,
        folder: Path,
        texts: dict[str, Text],
        parts: dict[str, dict[str, list[Passage]]],
        policies: list[Policy],
        demand,
        ahead: Ahead,
    ) -> None:
        self.facts, self.folder, self.demand, self.ahead = facts, folder, demand, ahead
        self.texts, self.parts, self.policies = texts, parts, {policy.id: policy for policy in policies}
        self.plan = [cell for link in facts["links"] for slots in facts["slots"] for cell in self.cells(link, slots)]
        self.null_s = float(np.median(null(NULL_TOKENS)))
        self.found = {cell: row for cell in self.plan if (row := self.kept(cell))}  # by cell, its row in the record
        self.progress = Progress(f"measure {facts['model']} {facts['size']}", len(self.plan), "runs")
        self.progress.advance(len(self.found))
        self.write()

    def cells(self, link: str, slots: str) -> Iterator[Cell]:
        """In the order in which they are run."""
        rng, names = np.random.default_rng(ORDER_SEED), list(self.policies)
        for repeat in range(1, self.facts["links"][link]["repeats"] + 1):
            for i in rng.permutation(len(names)):
                for text in self.texts:
                    yield Cell(self.facts["model"], self.facts["size"], link, names[i], slots, text, repeat)

    def measure(self, opened: OpenModel, link: Link, slots: str) -> None:
        """Every run over this link that is not there yet."""
        left = [cell for cell in self.cells(link.name, slots) if cell not in self.found]
        if not left:
            return
        count = self.facts["slots"][slots]["count"]
        engine = opened.engine(slots=count, demand=self.demand, limits=limits_of(link), name=link.name)
        try:
            warm_up = self.parts[link.name][left[0].text][0].ids
            for policy in self.to_warm_up():
                engine.use(policy, completion="real", **self.ahead.of(policy, opened, link.name, count))
                decode(opened.model, engine, [warm_up[: WARM_UP_TOKENS + 1]])
            for cell in left:
                self.found[cell] = self.run(opened, engine, link, cell)
                self.write()
                self.progress.advance()
        finally:
            engine.link.close()

    def to_warm_up(self) -> list[Policy]:
        """The baseline, or the first, and one that prefetches: between them all that is compiled on first use."""
        ahead = [policy for policy in self.policies.values() if policy.prefetch and self.ahead.geometry]
        return [self.policies.get(BASELINE) or next(iter(self.policies.values())), *ahead[:1]]

    def run(self, opened: OpenModel, engine, link: Link, cell: Cell) -> dict:
        """One run: its row in the record. Its file is there, whole, or not at all."""
        path, policy = cell.path(self.folder), self.policies[cell.policy]
        count = self.facts["slots"][cell.slots]["count"]
        try:
            engine.use(policy, completion="real", **self.ahead.of(policy, opened, link.name, count))
            engine.link.clear()
            failed = len(engine.failures)
            others = other_cores()
            timed = decode(opened.model, engine, [part.ids for part in self.parts[cell.link][cell.text]])
            journal = engine.link.journal()
            check_rates(link, journal, str(path))
            if not np.isfinite(timed.losses).all():
                raise error(f"{path}: losses that are not finite", "finite losses", "check the store (verify)")
            busy = others()  # by other processes
            loads = json.dumps(engine.failures[failed:])
            facts = self.identity(cell) | provenance(failed_loads=loads, other_cores=rounded(busy))
            save_run(path, timed, engine.log(**facts), journal)
        except CELL_FAILURES as exc:
            path.unlink(missing_ok=True)
            return self.row(cell, status="failed", reason=f"{type(exc).__name__}: {' '.join(str(exc).split())}")
        return self.kept(cell)

    def kept(self, cell: Cell) -> dict | None:
        """The row of this very run, where it lies there whole."""
        path = cell.path(self.folder)
        try:
            found = load_run(path).facts
        except UserError:
            return None
        if any(found.get(name) != value for name, value in self.identity(cell).items()):
            return None
        facts = {"failed_loads": json.loads(found["failed_loads"])}
        if "other_cores" in found:
            facts["other_cores"] = float(found["other_cores"])
        return self.row(cell, status="ok", sha256=sha256(path), **facts)

    def identity(self, cell: Cell) -> dict[str, str]:
        """What a run is of; one that agrees in all of it need not be taken again."""
        facts = {
            **dataclasses.asdict(cell),
            "host": self.facts["host"]["fingerprint"],
            **{name: self.facts["provenance"][name] for name in ("store", "host_sha256", "demand_sha256", "threads")},
            "policy_row": json.dumps(self.facts["policies"][cell.policy]),
            "slots_count": self.facts["slots"][cell.slots]["count"],
            "text_sha256": self.facts["texts"][cell.text]["sha256"],
            "passages": json.dumps(self.facts["passages"][cell.link][cell.text]),
            "completion": "real",
        }
        trained = predictor_key(self.policies[cell.policy])
        if trained in self.facts["provenance"]:
            facts["predictor_sha256"] = self.facts["provenance"][trained]
        return {name: str(value) for name, value in facts.items()}

    def row(self, cell: Cell, **result) -> dict:
        return {name: getattr(cell, name) for name in ("link", "policy", "slots", "text", "repeat")} | result

    def write(self) -> None:
        cells = [self.found[cell] for cell in self.plan if cell in self.found]
        head = {
            "schema": SCHEMA,
            "instrument": "engine",
            **self.facts,
            "null_s": self.null_s,
            "planned": len(self.plan),
        }
        path = self.folder / self.facts["model"] / f"{self.facts['size']}.json"
        write_json(path, head | {"cells": cells})


if __name__ == "__main__":
    main_guard(main)
