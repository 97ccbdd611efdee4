"""Timed runs of the engine on a host, as files: what each holds, and how they are read again.

    results/measured/<host>/host.yaml             the profile they were taken with
                    /<model>/demand.safetensors   the demand they started warm from
                    /<model>/<size>.json          the record: every cell, or why it failed
                    /<model>/<size>/<link>/<policy>/<slots>/<text>/<n>.safetensors      a run: decision log and seconds
                    /<model>/<size>_rescored.json, .safetensors                         the logs, scored by the emulator

A size is `own` or `<D>x<F>`, the inflated model. A run decodes the first tokens of the first documents of one text,
from the warm start, documents after one another (`stream`). Its file is a decision log (engine/log.py) with the arrays
of BESIDE. workflow/scripts/measure_host.py and rescore_runs.py write all this, engine/measured_import.py checks it.

    for record in records(folder):
        run = load_run(cell_of(record, record["cells"][0]).path(folder))
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import error
from engine.log import DecisionLog, load_beside, load_log
from engine.policies import Policy, parse_row
from engine.schema import check_schema

if TYPE_CHECKING:
    from engine.harness import Timed
    from engine.host_times import Link

ROOT = Path("results/measured")
SCHEMA = "measured-1"
SCHEMA_FILE = Path(__file__).parent.parent / "workflow" / "schemas" / "measured.schema.json"
RESCORED, RESCORED_SCHEMA = "_rescored", "rescored-1"
PEERS_SCHEMA, PEERS_FILES = SCHEMA_FILE.with_name("peers.schema.json"), "peers_*.json"
OWN = "own"  # size of a model that is not inflated
PROFILE, DEMAND = "host.yaml", "demand.safetensors"
JOURNAL = ("begin_s", "end_s", "bytes", "foreground")  # of every record; seconds since the first began
PREFETCH = "prefetch"  # of the journal too, where pieces of records came before they were needed
OF_TOKENS = ("token_s", "stall_s", "losses")
BESIDE = (*OF_TOKENS, "starts", *(f"journal_{name}" for name in JOURNAL))
AGAIN = "measure it again"
SHORTEST_S = 1e-12  # no transfer takes no time


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

    @property
    def name(self) -> str:
        """Within its model and size."""
        return f"{self.link}/{self.policy}/{self.slots}/{self.text}/{self.repeat}"

    def path(self, host: Path) -> Path:
        """Its file in the folder of a host."""
        return host / self.model / self.size / f"{self.name}.safetensors"


def predictor_key(policy: Policy) -> str:
    """Of a record's provenance: the sha256 of the predictor, of a policy whose predictor is trained."""
    return f"{policy.prefetch}_sha256"


def size_of(width: int | None, expert_width: int | None) -> str:
    """Id of a size; None: the model's own."""
    return f"{width or OWN}x{expert_width or OWN}" if width or expert_width else OWN


# ---- one run ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """A run as it was saved: T tokens, of several documents."""

    log: DecisionLog
    token_s: np.ndarray  # [T]
    stall_s: np.ndarray  # [T], of it waiting for records
    losses: np.ndarray  # [T] float32, as the engine computed them
    starts: np.ndarray  # [documents] int64
    journal: dict[str, np.ndarray]  # by name of JOURNAL and PREFETCH, each [records and pieces]

    @property
    def facts(self) -> dict[str, str]:
        return self.log.provenance

    @property
    def later(self) -> np.ndarray:
        """[T] bool: all but the first token of each document, which has its own number."""
        mask = np.ones(len(self.token_s), bool)
        mask[self.starts] = False
        return mask

    def bytes(self, foreground: bool) -> int:
        """Of what the model waited for, or of the background records that came beside its compute."""
        journal = self.journal
        chosen = (journal["foreground"].astype(bool) == foreground) & ~journal[PREFETCH].astype(bool)
        return int(journal["bytes"][chosen].sum())

    @property
    def prefetch_bytes(self) -> int:
        """Of pieces that came before they were needed, or in vain."""
        return int(self.journal["bytes"][self.journal[PREFETCH].astype(bool)].sum())


def save_run(path: Path, timed: Timed, log: DecisionLog, journal: np.ndarray) -> None:
    """log: with the run's facts as its provenance; journal: rows of engine.link.JOURNAL, or none."""
    began = journal["begin_s"].min() if len(journal) else 0.0
    beside = {name: getattr(timed, name) for name in (*OF_TOKENS, "starts")}
    beside |= {f"journal_{name}": journal[name] - began for name in ("begin_s", "end_s")}
    beside |= {"journal_bytes": journal["bytes"], "journal_foreground": journal["foreground"].astype(np.int8)}
    if len(journal) and journal[PREFETCH].any():
        beside[f"journal_{PREFETCH}"] = journal[PREFETCH].astype(np.int8)
    log.save(path, beside)


def load_run(path: Path) -> Run:
    """UserError where it is no whole run, or its arrays do not fit each other."""
    log = load_log(path)
    beside = load_beside(path)
    missing = sorted(set(BESIDE) - set(beside))
    if missing:
        raise error(f"{path}: without {', '.join(missing)}", "a run that measure_host.py saved", AGAIN)
    journal = {name: beside[f"journal_{name}"] for name in JOURNAL}
    journal[PREFETCH] = beside.get(f"journal_{PREFETCH}", np.zeros_like(journal["foreground"]))
    tokens, starts = len(log.executed), beside["starts"]
    fits = all(beside[name].shape == (tokens,) for name in OF_TOKENS)
    fits = fits and all(array.shape == journal["bytes"].shape and array.ndim == 1 for array in journal.values())
    if not fits or not len(starts) or starts[0] != 0 or (np.diff(starts) < 1).any() or starts[-1] >= tokens:
        raise error(f"{path}: arrays that do not fit each other", f"{tokens} tokens in every one", AGAIN)
    return Run(log, *(beside[name] for name in (*OF_TOKENS, "starts")), journal)


def check_rates(link: Link, journal: dict[str, np.ndarray] | np.ndarray, where: str) -> None:
    """Raise UserError where the records of a run came in faster than the link can bring them.

    Of all records together: single ones may be as lucky as a disk's own cache makes them.
    """
    if len(journal["bytes"]):
        begins, batch = np.unique(journal["begin_s"], return_inverse=True)
        ends = np.full(len(begins), -np.inf)
        np.maximum.at(ends, batch, journal["end_s"])
        seconds = float((ends - begins).sum())
        link.check_observed(float(journal["bytes"].sum()), max(seconds, SHORTEST_S), where)


# ---- a host's folder -------------------------------------------------------------------------------------------------
def hosts(root: Path = ROOT) -> list[Path]:
    """Folders of hosts that were measured."""
    return sorted(path.parent for path in root.glob(f"[!.]*/{PROFILE}"))


def records(host: Path) -> Iterator[dict]:
    """Of every model and size of a host's folder."""
    for path in sorted(host.glob("[!.]*/[!.]*.json")):
        if not path.stem.endswith(RESCORED):
            yield read_record(path)


def read_record(path: Path) -> dict:
    """<size>.json, as workflow/schemas/measured.schema.json describes it."""
    record = _read_json(path)
    check_schema(record, str(path), SCHEMA_FILE, str(SCHEMA_FILE.relative_to(SCHEMA_FILE.parents[2])))
    own = f"{record['model']}/{record['size']}"
    if own != f"{path.parent.name}/{path.stem}":
        raise error(f"{path}: a record of {own}", "the model and size of its path", "put it where it was")
    return record


def read_peers(path: Path) -> dict:
    """peers_<model>.json, as workflow/schemas/peers.schema.json has it. UserError also where a token is missing."""
    record = _read_json(path)
    check_schema(record, str(path), PEERS_SCHEMA, str(PEERS_SCHEMA.relative_to(PEERS_SCHEMA.parents[2])))
    if path.name != f"peers_{record['model']}.json":
        raise error(f"{path}: a record of {record['model']}", "the model of its name", "put it where it was")
    for row in record["peers"]:
        whole = [min(tokens, row["settings"]["tokens"] or tokens) for *_, tokens in record["documents"]]
        counted = row["status"] == "ok" and "tokens_per_s" not in row
        if counted and any([*map(len, row.get(name, ()))] != whole for name in ("seconds", "losses")):
            raise error(f"{path}: {row['id']} without some of its tokens", f"{sum(whole)} of them", AGAIN)
    return record


def read_rescored(host: Path, record: dict) -> tuple[Path, dict | None]:
    """(path of its losses, <size>_rescored.json) beside a record; None where there is none yet."""
    path = host / record["model"] / f"{record['size']}{RESCORED}.json"
    if not path.is_file():
        return path.with_suffix(".safetensors"), None
    found = _read_json(path)
    wanted = {"schema": RESCORED_SCHEMA, "model": record["model"], "size": record["size"]}
    if not isinstance(found, dict) or {name: found.get(name) for name in wanted} != wanted:
        raise error(f"{path}: another model, size or schema", f"{wanted}", "score the runs again")
    return path.with_suffix(".safetensors"), found


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise error(f"{path}: {type(exc).__name__} {exc}", "a record of measured runs", AGAIN) from None


def policy_of(record: dict, name: str) -> Policy:
    """The policy as it was timed. UserError where its row is none."""
    return parse_row(record["policies"][name], f"policy {name} of {record['model']} {record['size']}")


def cell_of(record: dict, row: dict) -> Cell:
    """The cell of a row of record["cells"]."""
    ids = (row[name] for name in ("link", "policy", "slots", "text", "repeat"))
    return Cell(record["model"], record["size"], *ids)
