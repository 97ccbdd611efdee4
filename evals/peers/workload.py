"""Which documents does every program decode: the first tokens of the first documents of each text, one a line.

The first one is for warming up and is not counted. A document begins with its context token; n + 1 ids are n decoded
tokens. The file of ids is plain text, because a C program reads it too.

    write_ids("documents.txt", documents)
    read_ids("documents.txt")

workflow/scripts/make_workload.py chooses them. Nothing here imports more than the standard library: who runs the
programs must not hold their libraries in memory.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from engine.files import write_text


@dataclass(frozen=True)
class Document:
    """One of a workload: ids [tokens + 1]."""

    text: str
    topic: str
    document: str
    ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.ids) - 1


def as_text(documents: list[Document], tokens: int | None = None) -> str:
    """The file of ids; tokens: of every document the first so many."""
    stop = None if tokens is None else tokens + 1
    return "".join(" ".join(map(str, document.ids[:stop])) + "\n" for document in documents)


def write_ids(path: str | Path, documents: list[Document], tokens: int | None = None) -> None:
    write_text(path, as_text(documents, tokens))


def read_ids(path: str | Path) -> list[list[int]]:
    return [[int(word) for word in line.split()] for line in Path(path).read_text(encoding="utf-8").splitlines()]


def digest(documents: list[Document]) -> str:
    """sha256 of what is decoded."""
    return hashlib.sha256(as_text(documents).encode()).hexdigest()
