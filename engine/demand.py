"""Calibration demand as a file: how often calibration text chose each expert, from which every policy starts warm.

save_demand("reference.safetensors", demand, {"model": model_hash})
residency.warm(load_demand("reference.safetensors"))
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from engine.errors import error
from engine.files import atomic
from engine.residency import Demand


def save_demand(path: str | Path, demand: Demand, provenance: dict[str, str]) -> None:
    with atomic(path) as temporary:
        save_file({"counts": demand.counts}, temporary, metadata={**provenance, "events": str(demand.events)})


def load_demand(path: str | Path) -> Demand:
    try:
        with safe_open(path, framework="numpy") as file:
            return Demand(file.get_tensor("counts"), int(file.metadata()["events"]))
    except (SafetensorError, OSError, KeyError, TypeError) as exc:
        raise error(f"{path}: {exc}", "a calibration's demand", "delete it and run again") from None


def demand_facts(path: str | Path) -> dict[str, str]:
    """Provenance of a calibration's demand: what `save_demand` was given."""
    try:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as exc:
        raise error(f"{path}: {exc}", "a calibration's demand", "delete it and run again") from None
