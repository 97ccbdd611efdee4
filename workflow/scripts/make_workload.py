"""Which documents every program of `results/peers` decodes, and what the record of it must say: a file run_peers.py
reads, which imports none of the libraries whose pages it takes out of the cache.

python workflow/scripts/make_workload.py --model reference --model-dir results/models/reference --size 1024x1024 \
    --store results/packed/reference/1024x1024 --host results/hosts/local.yaml --threads 2 \
    --texts results/texts/bible_test.json --documents 2 --tokens 24 \
    --demand results/calibration/reference.safetensors --out results/peers_workload/reference.json
"""

import argparse
import dataclasses
from collections.abc import Mapping

from engine.errors import error, main_guard
from engine.files import sha256, write_json
from engine.host_facts import fingerprint
from engine.store import read_manifest
from evals.jobs import load_texts, load_tokenizer, model_hash, provenance
from evals.measured import passages
from evals.measured_prefetch import geometry_of
from evals.peers.workload import Document, digest
from evals.quality import Text
from evals.records import is_rehearsal
from evals.simulation import read_host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the record")
    parser.add_argument("--model-dir", required=True, help="the model that is not inflated")
    parser.add_argument("--size", required=True, help="as measured runs name it")
    parser.add_argument("--store", required=True, help="packed store of the model at this size")
    parser.add_argument("--host", required=True, help="profile of this machine")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts")
    parser.add_argument("--first", type=int, help="the first documents of each text alone")
    parser.add_argument("--documents", type=int, required=True, help="of each text")
    parser.add_argument("--tokens", type=int, required=True, help="of each document")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--demand", required=True)
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    host = read_host(a.host)
    if host.fingerprint != fingerprint():
        raise error(f"{a.host} is of machine {host.fingerprint}", f"this one, {fingerprint()}", "probe this machine")
    tokenizer, bos = load_tokenizer(a.store)
    texts = {text.id: text for text in load_texts(a.texts, tokenizer, bos, a.first)}
    documents = make(texts, bos, documents=a.documents, tokens=a.tokens)
    manifest = read_manifest(a.store)
    dtype = str(manifest.layout.dtype).removeprefix("torch.")
    experts = manifest.layers * manifest.experts
    small = geometry_of(a.model_dir, dtype)
    own_bytes = experts * (small.expert_bytes if small else manifest.layout.weight_bytes)
    found = {
        "host": {"id": host.id, "fingerprint": host.fingerprint},
        "model": a.model,
        "size": a.size,
        "dtype": dtype,
        "rehearsal": is_rehearsal({"expert_bytes": own_bytes}),
        "experts_bytes": experts * manifest.layout.weight_bytes,
        "threads": a.threads,
        "documents": [dataclasses.asdict(document) for document in documents],
        "provenance": provenance(
            model=model_hash(a.store),
            store=manifest.identity,
            documents=digest(documents),
            host_sha256=sha256(a.host),
            demand_sha256=sha256(a.demand),
        ),
    }
    write_json(a.out, found)


def make(texts: Mapping[str, Text], bos: int | None, *, documents: int, tokens: int) -> list[Document]:
    """`documents` of every text, after one more of the first text that is the warm-up. UserError on too short texts."""
    found = []
    for number, text in enumerate(texts.values()):
        wanted = documents + (number == 0)
        own = passages(text, bos, documents=wanted, tokens=tokens)
        if len(own) < wanted:
            raise error(f"{len(own)} documents of {tokens} tokens in {text.id}", f"{wanted}", "lower `peers.documents`")
        found += [Document(text.id, text.topic, part.document, part.ids) for part in own]
    return found


if __name__ == "__main__":
    main_guard(main)
