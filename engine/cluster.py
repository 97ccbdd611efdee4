"""What does a job ask a cluster for? Memory and minutes, sized from the model that it holds; and which node is a host.

    Ask.of(model, attempt=1).mem_mb
    nodes({"box": Path("config/hosts/box.yaml")})["box"].constraint

An attempt asks for that many times as much, for a job that ran out of either. Memory is the model's weights in the
dtype it runs in, and the program's. Minutes are round numbers of ours, not a forecast: too few kill a job, too many
let it wait.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from engine.anatomy import Anatomy
from engine.errors import error
from engine.geometry import DTYPE_BYTES, Geometry
from engine.measured_run import OWN
from engine.model_sheet import Model, find_config
from engine.plan_memory import PROGRAM_BYTES

ATTEMPTS = 3  # of a job that holds a model; one more of a policy records that it was lost
MINUTES, MINUTES_A_GB = 60, 20
SMALL_MB, SMALL_MINUTES = 4000, 60  # of a job that holds no model, as the profile says
UNKNOWN_BYTES = 64_000_000_000  # of a model of which nothing lies here yet


@dataclass(frozen=True)
class Ask:
    mem_mb: int
    runtime: int  # minutes

    @classmethod
    def of(cls, model: Model, attempt: int = 1, size: str = OWN) -> Ask:
        """size: as files name it, of an inflated model its widths, in bfloat16."""
        weights = weight_bytes(model) if size == OWN else inflated_bytes(model, size)
        minutes = MINUTES + MINUTES_A_GB * weights / 1e9
        return cls(attempt * math.ceil((PROGRAM_BYTES + weights) / 1e6), attempt * math.ceil(minutes))


@functools.cache
def weight_bytes(model: Model) -> int:
    """Every weight in the dtype it runs in: from the sizes of files, else of config.json; UNKNOWN_BYTES without one."""
    found = find_config(model)
    stored = _safetensors_bytes(model.source) or (0 if model.packed else _safetensors_bytes(model.folder))
    stored = stored or (found.checkpoint_bytes if found else None)
    if stored:
        published = found.config.get("dtype") or found.config.get("torch_dtype") if found else None
        each = 1 if model.packed else DTYPE_BYTES.get(published, DTYPE_BYTES[model.dtype])
        return stored * DTYPE_BYTES[model.dtype] // each
    if found:
        return Anatomy.of_config(found.config, model.dtype).parameters * DTYPE_BYTES[model.dtype]
    return UNKNOWN_BYTES


def of_policy(model: Model, attempt: int) -> Ask:
    """Of a job that scores a policy, or, after ATTEMPTS, only says that it could not be scored."""
    return Ask.of(model, attempt) if attempt <= ATTEMPTS else Ask(SMALL_MB, SMALL_MINUTES)


def inflated_bytes(model: Model, size: str) -> int:
    """Every weight of a model at widths such as 1024x4096, or 1024xown; its own where nothing is known of it."""
    found = find_config(model)
    if found is None:
        return weight_bytes(model)
    width, expert_width = (None if word.startswith(OWN) else int(word) for word in size.split("x"))
    wide = Geometry.of_config(found.config, width=width, expert_width=expert_width)
    return wide.layers * (wide.experts * wide.expert_bytes + wide.dense_bytes) + 2 * wide.head_bytes


def _safetensors_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


@dataclass(frozen=True)
class Node:
    """The node that is a host: features and devices as sbatch takes them, threads that its profile was probed with."""

    constraint: str = ""
    gres: str = ""
    threads: int = 0


def nodes(profiles: Mapping[str, Path]) -> dict[str, Node]:
    """By id, of the checked profiles that name their node."""
    found = {}
    for name, path in profiles.items():
        profile = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}  # one is made by the run
        if slurm := profile.get("slurm"):
            device = "cuda" if "cuda" in profile["compute"] else "cpu"
            threads = profile["compute"][device].get("threads")
            if not threads:
                raise error(f"{path}: slurm in a modelled profile", "a measured one", "only what exists is timed")
            found[name] = Node(slurm["constraint"], slurm.get("gres", ""), threads)
    return found
