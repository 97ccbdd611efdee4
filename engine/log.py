"""The decision log of a run: what was really executed, and every movement of an expert.

One record array entry an (event, layer, position): `executed` and `weights` are all the emulator needs to score the run
again, `kind` and `g` all the counts are made of. The file is safetensors with its provenance in the header, so a cut
or foreign file is refused on reading.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from engine.decision import ARRIVED, DROP, FETCH, FETCHED, HIT, IN_PLACE, ISSUED, MOVE, PROMOTED, SUBSTITUTE, TAKEN, Log
from engine.errors import error
from engine.files import atomic

SCHEMA = "decision-log-1"
_ARRAYS = {
    "executed": np.int16,
    "weights": np.float32,
    "kind": np.int8,
    "first": np.int8,
    "g": np.float32,
    "moves": np.int32,
}
_MOVE_COLUMNS = ("layer", *MOVE.names)
STEP = _MOVE_COLUMNS.index("step")  # of `moves`: the number of the event in its layer


@dataclass(frozen=True)
class DecisionLog:
    """What happened at each position [T, L, K], in the model's own order of the chosen experts."""

    executed: np.ndarray  # [T, L, K] int16, -1 dropped
    weights: np.ndarray  # [T, L, K] float32, combine weights of what was executed
    kind: np.ndarray  # [T, L, K] int8, HIT | FETCH | SUBSTITUTE | DROP | IN_PLACE
    first: np.ndarray  # [T, L] int8, position of the first choice
    g: np.ndarray  # [T, L, K] float32, normalised gate weights of the chosen experts
    moves: np.ndarray  # [N, 6] int32: layer, step, expert, slot, victim, cause
    provenance: dict[str, str] = field(default_factory=dict)

    @property
    def events(self) -> int:
        return self.kind.shape[0] * self.kind.shape[1]

    def save(self, path: str | Path, beside: dict[str, np.ndarray] | None = None) -> None:
        """beside: other arrays of the run, under names of their own (`load_beside`)."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        arrays |= {name: np.ascontiguousarray(array) for name, array in (beside or {}).items()}
        with atomic(path) as temporary:
            facts = json.dumps({"schema": SCHEMA, **self.provenance}, sort_keys=True)
            save_file(arrays, temporary, metadata={"expertmiss": facts})  # one key: safetensors does not order them


def load_log(path: str | Path) -> DecisionLog:
    """Read and check a log. UserError: absent, cut, not a log, or arrays that do not fit each other."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = _facts((file.metadata() or {}).get("expertmiss", ""))
            if metadata.pop("schema", None) != SCHEMA:
                raise error(f"{path} is not a decision log", "a file written by this project", "check the path")
            arrays = {name: file.get_tensor(name) for name in _ARRAYS}
    except (SafetensorError, FileNotFoundError) as exc:
        raise error(f"{path}: {exc}", "a whole decision log", "write it again") from None
    shape = arrays["executed"].shape
    shapes = dict.fromkeys(_ARRAYS, shape) | {"first": shape[:2], "moves": (len(arrays["moves"]), len(_MOVE_COLUMNS))}
    wrong = [n for n, dtype in _ARRAYS.items() if arrays[n].dtype != dtype or arrays[n].shape != shapes[n]]
    if wrong or len(shape) != 3:
        raise error(f"{path}: {', '.join(wrong) or 'executed'} of another type or shape", "[T, L, K]", "write it again")
    return DecisionLog(**arrays, provenance=metadata)


def load_beside(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays that a log was saved with beside its own."""
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name not in _ARRAYS}  # noqa: SIM118


def _facts(text: str) -> dict[str, str]:
    """What a header says; nothing where it is not ours."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


class Executed(NamedTuple):
    """What the emulator takes of a log to score it."""

    executed: np.ndarray  # [T, L, K] int16, -1 dropped
    weights: np.ndarray  # [T, L, K] float32


class LogWriter:
    """What was decided so far: events of every layer, in the order of the calls, and their moves."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.clear()

    def clear(self) -> None:
        self._events: list[list[tuple]] = [[] for _ in range(self._layers)]
        self._moves: list[list[np.ndarray]] = [[] for _ in range(self._layers)]

    def append(self, layer: int, decided: Log, moves: np.ndarray) -> None:
        """decided: of consecutive events of one layer, [T, K]; moves [N] MOVE."""
        self._events[layer].append(decided._replace(executed=decided.executed.astype(np.int16)))
        self._moves[layer].append(moves)

    def log(self, **provenance: str) -> DecisionLog:
        if not self._events[0]:
            raise RuntimeError("nothing was decided yet")
        arrays = [
            np.stack([np.concatenate([part[i] for part in layer]) for layer in self._events], axis=1) for i in range(5)
        ]
        return DecisionLog(*arrays, moves=join_moves(self._moves), provenance=provenance)


def join_moves(by_layer: list[list[np.ndarray]]) -> np.ndarray:
    """Moves of each layer's calls as one [N, 6] int32."""
    parts = [np.empty((0, len(_MOVE_COLUMNS)), np.int32)]
    for layer, calls in enumerate(by_layer):
        for moves in calls:
            table = np.empty((len(moves), len(_MOVE_COLUMNS)), np.int32)
            table[:, 0] = layer
            for column, name in enumerate(MOVE.names, start=1):
                table[:, column] = moves[name]
            parts.append(table)
    return np.concatenate(parts)


def count(log: DecisionLog) -> dict[str, float | int]:
    """The counts every quality number carries; shares are of the K x events demands.

    substituted_mass and dropped_mass are averaged over events, apart. `loads` is what was read: a promoted load was
    issued before and counts once. `prefetched`: fetches whose whole record was there.
    """
    kind, g, events = log.kind, log.g, log.events
    demands = max(kind.size, 1)
    kind_of_first = np.take_along_axis(kind, log.first[..., None].astype(np.int64), axis=-1)
    cause = log.moves[:, _MOVE_COLUMNS.index("cause")]
    hits = int((kind == HIT).sum())
    substitutions = int((kind == SUBSTITUTE).sum())
    return {
        "events": events,
        "demands": kind.size,
        "hits": hits,
        "fetches": int((kind == FETCH).sum()),
        "substitutions": substitutions,
        "drops": int((kind == DROP).sum()),
        "in_place": int((kind == IN_PLACE).sum()),
        "first_choices_changed": int(np.isin(kind_of_first, (SUBSTITUTE, DROP)).sum()),
        "miss_rate": 1 - hits / demands,
        "substituted_share": substitutions / demands,
        "substituted_mass": float(np.where(kind == SUBSTITUTE, g, 0).sum(dtype=np.float64) / max(events, 1)),
        "dropped_mass": float(np.where(kind == DROP, g, 0).sum(dtype=np.float64) / max(events, 1)),
        "background_issued": int((cause == ISSUED).sum()),
        "background_arrived": int((cause == ARRIVED).sum()),
        "promoted": int((cause == PROMOTED).sum()),
        "prefetched": int((cause == TAKEN).sum()),
        "loads": int(np.isin(cause, (FETCHED, ISSUED, TAKEN)).sum()),
    }


def add_counts(one: dict[str, float | int], other: dict[str, float | int]) -> dict[str, float | int]:
    """Counts of two logs as `count` would give them of both together: every event weighs the same.

    A count that one of them does not have yet (of an older record) is zero.
    """
    total = {name: one.get(name, 0) + other.get(name, 0) for name in one | other}
    for mass in ("substituted_mass", "dropped_mass"):
        summed = one[mass] * one["events"] + other[mass] * other["events"]
        total[mass] = summed / max(total["events"], 1)
    demands = max(total["demands"], 1)
    return total | {
        "miss_rate": 1 - total["hits"] / demands,
        "substituted_share": total["substitutions"] / demands,
    }
