"""Files are written whole or not at all: to a temporary name beside the target, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it onto `path` if the block succeeds, remove it if not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # the suffix stays last: some writers (numpy, matplotlib) choose the format by it
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: object) -> None:
    """Strict JSON (NaN and infinity are errors), keys in the order given."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def sha256(path: str | Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
