"""Records of scored policies and their losses, as the tables and the ledger read them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from engine.errors import error

REHEARSAL_BYTES = 1 << 30  # a model whose experts weigh less than this in all is a small embedded one


@dataclass(frozen=True)
class Scored:
    """One policy on one model: its record and its losses in nats by `<slots>/<text>`, each [T].

    What else a sweep keeps of a text, by token, has longer names: `<slots>/<text>/hits` and `.../mass`.
    """

    record: dict
    losses: dict[str, np.ndarray]

    @property
    def weights(self) -> str:
        """What the record says its model's weights are."""
        return str(self.record.get("provenance", {}).get("model", "unknown"))


def read_json(path: str | Path, *keys: str) -> dict:
    """What a JSON file of ours holds. UserError: not there, not JSON, without one of the keys."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        for key in keys:
            value[key]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as exc:
        expected = f"a file with {', '.join(keys)}"
        raise error(f"{path}: {type(exc).__name__} {exc}", expected, "delete it and run again") from None
    return value


def read_record(path: str | Path, *keys: str) -> dict:
    """A record with model, policy, cells and the keys named."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        for key in ("model", "policy", "cells", *keys):
            record[key]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise error(f"{path}: {type(exc).__name__} {exc}", "a record of score_policy.py", "`make retry`") from None
    return record


def load_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """A file of arrays that the pipeline wrote, whole."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as exc:
        raise error(f"{path}: {exc}", "a whole file of arrays", "delete it and run again") from None


def is_rehearsal(record: dict) -> bool:
    return 0 < record["expert_bytes"] < REHEARSAL_BYTES


def load_scored(paths: list[str]) -> dict[str, dict[str, Scored]]:
    """By model and policy. paths: results/quality/<model>/<policy>/perplexity.json, whose losses lie in results/losses,
    or results/sweep/<model>/<policy>.json, which has them beside it.
    """
    found: dict[str, dict[str, Scored]] = {}
    for path in map(Path, paths):
        record = read_record(path, "clusters", "expert_bytes")
        losses = path.with_suffix(".safetensors")
        if path.name == "perplexity.json":
            losses = path.parents[3] / "losses" / record["model"] / f"{record['policy']}.safetensors"
        found.setdefault(record["model"], {})[record["policy"]] = Scored(record, load_arrays(losses))
    return found


def load_folders(folders: Iterable[str | Path]) -> dict[str, dict[str, Scored]]:
    """By model and policy, or arm: every record of the folders, losses under the same name beside it.

    folders: results/sweep/<model>, results/experiment_b/<model>. JSON without cells is something else. UserError: no
    such folder, a record that is none, no losses beside it.
    """
    found: dict[str, dict[str, Scored]] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise error(f"{folder} is no folder", "one of records", "run what writes it, or leave it out")
        own = found.setdefault(folder.name, {})
        for path in sorted(folder.glob("*.json")):
            if '"cells"' in path.read_text(encoding="utf-8"):
                record = read_record(path, "clusters", "expert_bytes", "policy_row")
                own[record["policy"]] = Scored(record, load_arrays(path.with_suffix(".safetensors")))
    return found
