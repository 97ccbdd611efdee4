"""Checkpoints of a run: everything the next step depends on, written whole, the last two kept.

One safetensors file a checkpoint: parameters, momenta, and in its header the step, what was dealt of each topic (in all
and before the decay), and the recipe's seed. Batches follow from what was dealt, so a resumed run takes the same steps
as one never stopped.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.errors import error
from engine.files import atomic
from evals.reference_model.optimiser import Optimiser

KEEP = 2


def latest(folder: Path) -> Path | None:
    found = sorted(folder.glob("step*.safetensors"))
    return found[-1] if found else None


def step_of(path: Path) -> int:
    if not (path.stem.startswith("step") and path.stem[4:].isdigit()):
        raise error(f"checkpoint name {path.name}", "step<number>.safetensors", "name a checkpoint of a run")
    return int(path.stem[4:])


def save(folder: Path, optimiser: Optimiser, state: dict) -> Path:
    """Write step<count>.safetensors, then drop all but the last KEEP."""
    tensors = {f"parameter/{name}": value for name, value in optimiser.parameters.items()}
    tensors |= {f"first/{name}": value for name, value in optimiser.first.items()}
    tensors |= {f"second/{name}": value for name, value in optimiser.second.items()}
    path = folder / f"step{optimiser.count:07d}.safetensors"
    with atomic(path) as temporary:
        save_file(tensors, temporary, metadata={"state": json.dumps(state | {"step": optimiser.count})})
    for old in sorted(folder.glob("step*.safetensors"))[:-KEEP]:
        old.unlink()
    return path


def load(path: Path, optimiser: Optimiser) -> dict:
    """Put the checkpoint's tensors into `optimiser` (and its parameters) in place; return its state."""
    if not path.is_file():
        raise error(f"no checkpoint {path}", "one of a run", "check the path")
    try:
        with safe_open(path, framework="pt") as handle:
            state = json.loads(handle.metadata()["state"])
            groups = {"parameter": optimiser.parameters, "first": optimiser.first, "second": optimiser.second}
            for kind, group in groups.items():
                for name, value in group.items():
                    value.copy_(handle.get_tensor(f"{kind}/{name}"))
    except (SafetensorError, KeyError, RuntimeError) as exc:
        raise error(f"checkpoint {path}: {exc}", "one of this recipe, whole", "delete it") from None
    optimiser.count = state["step"]
    return state
