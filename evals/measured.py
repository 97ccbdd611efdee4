"""Timed runs of the engine on a host, as files: what is run, what each file holds, and how they are read again.

    results/measured/<host>/host.yaml                                          the profile they were taken with
                    /<model>/<size>/<link>/<policy>/<slots>/<text>/<n>.safetensors   a run: decision log and seconds
                    /<model>/<size>.json                                       the cells, or why one failed
                    /<model>/<size>_rescored.json                              the same logs, scored by the emulator

A size is `own` or `<D>x<F>`, the inflated model. A run decodes the first tokens of the first documents of one text,
from the warm start, documents after one another (`stream`). Its file is a decision log (engine/log.py) with the arrays
of BESIDE. Nothing here measures; workflow/scripts/measure_host.py does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import error
from engine.harness import Timed
from engine.log import DecisionLog, load_beside, load_log
from evals.corpora import cluster
from evals.quality import Text

ROOT = Path("results/measured")
SCHEMA = "measured-1"
OWN = "own"  # size of a model that is not inflated
JOURNAL = ("begin_s", "end_s", "bytes", "foreground")  # of every record; seconds since the first began
BESIDE = ("token_s", "stall_s", "losses", "starts", *(f"journal_{name}" for name in JOURNAL))


@dataclass(frozen=True)
class Cell:
    """Which run: ids, and its number from 1."""

    model: str
    size: str
    link: str
    policy: str
    slots: str
    text: str
    repeat: int

    def path(self, host: Path) -> Path:
        """Its file in the folder of a host."""
        return host / self.model / self.size / f"{self.name}.safetensors"

    @property
    def name(self) -> str:
        """Within its model and size."""
        return f"{self.link}/{self.policy}/{self.slots}/{self.text}/{self.repeat}"


def size_of(width: int | None, expert_width: int | None) -> str:
    return f"{width}x{expert_width}" if width and expert_width else OWN


# ---- what is decoded -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Passage:
    """The beginning of a document. rows: of its events in the recorded trace of the whole text."""

    document: str
    ids: tuple[int, ...]  # the context token, then those that are scored
    rows: range


def passages(text: Text, bos: int | None, *, documents: int, tokens: int) -> list[Passage]:
    """The first documents of different clusters that are long enough, each cut after `tokens` scored tokens."""
    found, seen, first = [], set(), 0
    for document, scored in zip(text.documents, text.scored, strict=True):
        name = cluster(document.id)
        if scored >= tokens and name not in seen and len(found) < documents:
            seen.add(name)
            whole = document.ids if bos is None else (bos, *document.ids)
            found.append(Passage(document.id, tuple(whole[: tokens + 1]), range(first, first + tokens)))
        first += scored
    if not found:
        raise error(f"no document of {text.id} has {tokens} tokens", "one at least", "lower measure.tokens")
    return found


# ---- one run ---------------------------------------------------------------------------------------------------------
def save_run(path: Path, timed: Timed, log: DecisionLog, journal: np.ndarray) -> None:
    """log: with the run's facts as its provenance; journal: rows of engine.link.JOURNAL, or none."""
    began = journal["begin_s"].min() if len(journal) else 0.0
    beside = {name: getattr(timed, name) for name in ("token_s", "stall_s", "losses", "starts")}
    beside |= {f"journal_{name}": journal[name] - began for name in ("begin_s", "end_s")}
    beside |= {"journal_bytes": journal["bytes"], "journal_foreground": journal["foreground"].astype(np.int8)}
    log.save(path, beside)


@dataclass(frozen=True)
class Run:
    """A run as it was saved."""

    log: DecisionLog
    token_s: np.ndarray  # [T]
    stall_s: np.ndarray  # [T]
    losses: np.ndarray  # [T] float32
    starts: np.ndarray  # [documents]
    journal: dict[str, np.ndarray]  # each [records]

    @property
    def facts(self) -> dict[str, str]:
        return self.log.provenance

    @property
    def later(self) -> np.ndarray:
        """[T] bool: all but the first token of each document, which has its own number."""
        mask = np.ones(len(self.token_s), bool)
        mask[self.starts] = False
        return mask


def load_run(path: Path) -> Run:
    """UserError where it is no whole run, or its arrays do not fit each other."""
    log = load_log(path)
    beside = load_beside(path)
    missing = set(BESIDE) - set(beside)
    tokens = len(log.executed)
    if missing or any(len(beside[name]) != tokens for name in ("token_s", "stall_s", "losses")):
        found = f"{path}: without {', '.join(sorted(missing))}" if missing else f"{path}: arrays of several lengths"
        raise error(found, "a run that measure_host.py saved", "measure it again")
    journal = {name: beside[f"journal_{name}"] for name in JOURNAL}
    return Run(log, *(beside[name] for name in ("token_s", "stall_s", "losses", "starts")), journal)


# ---- a host's folder -------------------------------------------------------------------------------------------------
def read_record(path: Path) -> dict:
    """<size>.json: {schema, host, model, size, cells, ...}."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] != SCHEMA:
            raise KeyError(f"schema {record['schema']}")
        for cell in record["cells"]:
            cell["status"], cell_of(record, cell)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise error(f"{path}: {type(exc).__name__} {exc}", f"a record of schema {SCHEMA}", "measure again") from None
    return record


def cell_of(record: dict, cell: dict) -> Cell:
    return Cell(
        record["model"], record["size"], *(cell[name] for name in ("link", "policy", "slots", "text", "repeat"))
    )


def records(host: Path) -> Iterator[dict]:
    """Of every model and size of a host's folder."""
    for path in sorted(host.glob("*/*.json")):
        if not path.stem.endswith("_rescored"):
            yield read_record(path)


def hosts(root: Path = ROOT) -> list[Path]:
    """Folders of hosts that were measured."""
    return sorted(path for path in root.glob("*") if (path / "host.yaml").is_file()) if root.is_dir() else []
