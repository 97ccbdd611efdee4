"""A made-up profile of the machine that the tests run on: its fingerprint is true, its times are not.

The link `disk` may be as fast as it likes; `sdcard` is throttled to what a memory card gives.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml

from engine.files import write_text
from engine.host_facts import fingerprint, machine_facts

SDCARD = {"kind": "disk", "of": "disk", "latency_s": 0.0005, "bandwidth_bytes_per_s": 200_000_000}


def table(*rows: tuple) -> dict:
    """(bytes, seconds for 1, for 4) as a profile has them."""
    cells = [{"bytes": size, "seconds": list(seconds), "spread": [0.01] * len(seconds)} for size, *seconds in rows]
    return {"counts": [1, 4][: len(rows[0]) - 1], "rows": cells}


def profile(name: str, **fields) -> dict:
    number = {"value": 1e-5, "spread": 0.1}
    parts = {
        "slot_s": number,
        "token": table((1_000, 1e-4), (1_000_000, 2e-4)),
        "layers": table((1_000, 1e-4), (1_000_000, 2e-4)),
        "experts": table((1_000, 1e-4, 2e-4), (1_000_000, 2e-4, 5e-4)),
    }
    cpu = {"threads": 1, "wait_policy": "PASSIVE", "experts_implementation": "engine", "slots": 8, "event_s": number}
    cpu |= {"dtypes": {"float32": parts, "bfloat16": parts}}
    disk = {"kind": "disk", "limit_bytes_per_s": 6e10} | table((4_096, 1e-4, 2e-4), (1_048_576, 4e-4, 1e-3))
    return {
        "id": name,
        "status": "measured",
        "fingerprint": fingerprint(),
        "facts": machine_facts(),
        "probe": {"quick": True, "seconds": 1.0, "file_bytes": 1, "other_cores": 0.0},
        "compute": {"cpu": cpu},
        "links": {"disk": disk, "sdcard": SDCARD},
    } | fields


def write_profile(folder: Path, name: str = "box", **fields) -> Path:
    path = folder / f"{name}.yaml"
    write_text(path, yaml.safe_dump(profile(name, **fields), sort_keys=False))
    return path


def written(folder: Path) -> dict[str, int]:
    """When every file of a measured host's folder was written, in nanoseconds."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.stat().st_mtime_ns for name, path in found.items()}


def runs(names: Iterable[str]) -> set[str]:
    """Those that are runs of the engine."""
    return {name for name in names if name.count("/") == 6}
