"""Files and folders are written whole or not at all: to a temporary name beside the target, then renamed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import error


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


@contextmanager
def atomic_folder(folder: str | Path, needed: int) -> Iterator[Path]:
    """Yield a folder to build in, beside `folder`; rename it if the block succeeds, remove it if not.

    needed: bytes that will be written. UserError where `folder` exists, another process builds it, or the disk is full
    or fails. What a killed process left behind is removed by the next one. Files that must survive a power cut are
    synced by who writes them.
    """
    folder = Path(folder)
    building = folder.with_name(f".{folder.name}.building")
    try:
        building.mkdir(parents=True, exist_ok=True)
        lock = os.open(building, os.O_RDONLY)
    except OSError as exc:
        raise error(f"{building}: {exc.strerror}", "a folder that can be written", "choose another") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it ends with its process, however that ends
        except BlockingIOError:
            raise error(f"another process writes {folder}", "one at a time", "wait for it") from None
        try:
            if folder.exists():
                raise error(f"{folder} exists", "a new folder", "remove it, or choose another")
            for path in building.iterdir():  # what a killed process left
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if (free := shutil.disk_usage(building).free) < needed:
                raise error(f"{free:,} bytes free for {folder}", f"{needed:,}", "free some, or choose another disk")
            yield building
            os.fsync(lock)
            building.rename(folder)
            sync(folder.parent)
        except OSError as exc:
            found = f"writing {folder}: {exc.strerror or exc}"
            raise error(found, f"a disk with room for {needed:,} bytes", "free some, or choose another disk") from exc
        finally:
            shutil.rmtree(building, ignore_errors=True)
    finally:
        os.close(lock)


def sync(path: str | Path) -> None:
    """Have a file, or the entries of a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def copy(source: str | Path, target: str | Path) -> None:
    """Copy a file, whole or not at all; a copy that is there already is left alone."""
    if not Path(target).is_file() or sha256(source) != sha256(target):
        with atomic(target) as temporary:
            shutil.copyfile(source, temporary)


def write_text(path: str | Path, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: object) -> None:
    """Strict JSON (NaN and infinity are errors), keys in the order given."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def sha256(path: str | Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
