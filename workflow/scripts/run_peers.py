"""Every program of the sheet over the same documents on this machine, one after another, each alone under its memory.

The record is rewritten after every program. A row that is there already, of the same weights, documents, memory and
settings, is kept, so a killed run goes on by the same command. A program that cannot run is a row with its reason.

python workflow/scripts/run_peers.py --workload results/peers_workload/reference.json --sheet config/peers.tsv \
    --memory 2600000000 --timeout 1800 --llama results/peers_build --store results/packed/reference/1024x1024 \
    --gguf results/gguf/reference/1024x1024 --checkpoint results/fused/reference/1024x1024 \
    --demand results/calibration/reference.safetensors --predictors results/predictors/reference \
    --host results/hosts/local.yaml --policies config/policies.tsv config/prefetch.tsv \
    --out results/measured/local/peers_reference.json
"""

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
from pathlib import Path

from engine.errors import UserError, error, main_guard
from engine.files import copy, sha256, write_json
from evals.peers import llama_cpp
from evals.peers.memory import read_ahead_kb
from evals.peers.runs import Outcome, read_rate, run
from evals.peers.sheet import Peer, load_sheet
from evals.peers.workload import Document, write_ids

SCHEMA = "peers-1"
BENCH_TOKENS, BENCH_REPEATS = 64, 3


def main() -> None:
    a = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was set on the machine is set back
    workload = json.loads(Path(a.workload).read_text(encoding="utf-8"))
    documents = [Document(**{**one, "ids": tuple(one["ids"])}) for one in workload.pop("documents")]
    peers = load_sheet(a.sheet)
    facts = {"schema": SCHEMA, **workload, "memory_bytes": a.memory}
    facts["documents"] = [[one.text, one.topic, one.document, one.tokens] for one in documents]
    facts["provenance"]["llama_cpp"] = llama_cpp.REQUIREMENT
    facts["read_ahead_kb"] = read_ahead_kb(a.store)
    rows = kept(Path(a.out), facts, peers)
    freeze(Path(a.out).with_name("host.yaml"), a.host)
    for number, peer in enumerate(peers.values(), start=1):
        if peer.id not in rows:
            rows[peer.id] = take(a, peer, documents, workload["threads"])
            write_json(a.out, facts | {"peers": [rows[id] for id in peers if id in rows]})
        print(f"{number} of {len(peers)}: {peer.id}: {said(rows[peer.id])}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", required=True, help="of make_workload.py")
    parser.add_argument("--sheet", required=True)
    parser.add_argument("--memory", type=int, required=True, help="the limit in bytes")
    parser.add_argument("--timeout", type=float, required=True, help="seconds that a program may take")
    parser.add_argument("--store", required=True, help="packed store, of the engine")
    parser.add_argument("--checkpoint", required=True, help="of transformers and accelerate")
    parser.add_argument("--llama", required=True, help="what `python -m evals.peers.llama_cpp build` wrote")
    parser.add_argument("--gguf", required=True, help="what `... convert` wrote")
    parser.add_argument("--demand", required=True)
    parser.add_argument("--predictors", required=True)
    parser.add_argument("--host", required=True, help="profile of this machine")
    parser.add_argument("--policies", nargs="+", required=True, help="the sheets")
    parser.add_argument("--out", required=True, help="results/measured/<host>/peers_<model>.json")
    return parser.parse_args()


def kept(path: Path, facts: dict, peers: dict[str, Peer]) -> dict[str, dict]:
    """Rows of an earlier run that would be taken again as they are; one that failed is taken anew.

    UserError where the record is of something else: nothing of it is replaced.
    """
    if not path.is_file():
        return {}
    old = json.loads(path.read_text(encoding="utf-8"))
    of_inputs = ("store", "documents", "host_sha256", "demand_sha256", "llama_cpp")
    other = [name for name in of_inputs if old["provenance"].get(name) != facts["provenance"][name]]
    other += [name for name in ("schema", "memory_bytes", "read_ahead_kb") if old.get(name) != facts[name]]
    if other:
        found = f"{path}: {', '.join(other)} differ from this run's"
        raise error(found, "one of each in a record", "move the record away to measure anew")
    rows = {row["id"]: row for row in old["peers"]}
    return {
        id: row
        for id, row in rows.items()
        if id in peers and row["settings"] == settings(peers[id]) and row["status"] == "ok"
    }


def freeze(path: Path, profile: str) -> None:
    """The profile beside the record. UserError where another one lies there."""
    if path.is_file() and sha256(path) != sha256(profile):
        raise error(f"{path} is another profile than {profile}", "one in a folder", "move the folder away")
    copy(profile, path)


def settings(peer: Peer) -> dict:
    return {name: value for name, value in dataclasses.asdict(peer).items() if name != "id"}


def said(row: dict) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    if "tokens_per_s" in row:
        return f"{row['tokens_per_s']:.3g} tokens a second"
    took = [seconds for document in row["seconds"][1:] for seconds in document[1:]]
    return f"{len(took) / sum(took):.3g} tokens a second"


# ---- one program -----------------------------------------------------------------------------------------------------
def take(a: argparse.Namespace, peer: Peer, documents: list[Document], threads: int) -> dict:
    row = {"id": peer.id, "settings": settings(peer)}
    needed = (a.llama, a.gguf) if peer.program.startswith("llama") else ()
    failure = next(filter(None, map(llama_cpp.failure, needed)), None)
    if failure:
        return row | {"status": "not run", "reason": failure}
    with tempfile.TemporaryDirectory(dir=Path(a.out).parent) as folder:  # on the disk that experts are read from
        ids = Path(folder) / "documents.txt"
        write_ids(ids, documents, peer.tokens)
        command, files = programs(a, peer, ids, folder, peer.threads or threads)
        limit = a.memory if peer.limited else None
        count = len(documents) if peer.program != "llama_bench" else 0
        try:
            outcome = run(
                command,
                files,
                limit_bytes=limit,
                documents=count,
                timeout_s=a.timeout,
                ahead_kb=peer.read_ahead_kb,
            )
        except UserError as exc:
            return row | {"status": "not run", "reason": " ".join(str(exc).split())}
    return row | as_row(outcome, peer)


def programs(
    a: argparse.Namespace, peer: Peer, ids: Path, folder: str, threads: int
) -> tuple[list[str], list[str | Path]]:
    """The command, and the files of the model that it reads."""
    gguf = Path(a.gguf) / llama_cpp.MODEL
    if peer.program == "llama_cpp":
        return [f"{a.llama}/{llama_cpp.DRIVER}", str(gguf), str(ids), str(threads), peer.load_mode], [gguf]
    if peer.program == "llama_bench":
        counts = ["-p", "0", "-n", str(BENCH_TOKENS), "-r", str(BENCH_REPEATS)]
        how = ["-m", str(gguf), "-t", str(threads), "-lm", peer.load_mode, *counts, "-o", "json"]
        return [f"{a.llama}/{llama_cpp.BENCH}", *how], [gguf]
    model = a.store if peer.program == "engine" else a.checkpoint
    command = [sys.executable, "-m", "evals.peers.worker", peer.program, "--model", model]
    command += ["--documents", str(ids), "--threads", str(threads), "--offload", folder]
    if peer.program == "engine":
        command += ["--policy", peer.policy, "--policies", *a.policies, "--slots", f"{peer.slots}%"]
        command += ["--demand", a.demand, "--predictors", a.predictors, "--host", a.host]
    return command, sorted(path for path in Path(model).iterdir() if path.suffix in (".bin", ".safetensors"))


def as_row(outcome: Outcome, peer: Peer) -> dict:
    if peer.program == "llama_bench" and not outcome.reason:
        found = {"tokens_per_s": read_rate(outcome.output)}
    else:
        found = {"seconds": outcome.seconds, "losses": outcome.losses, "read_bytes": outcome.read_bytes}
    found |= {"peak_bytes": outcome.peak_bytes, "counts": outcome.counts}
    if outcome.reason:
        return {"status": "failed", "reason": outcome.reason} | found
    return {"status": "ok"} | found


if __name__ == "__main__":
    main_guard(main)
