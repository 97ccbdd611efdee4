"""Where experts wait: a packed folder that is read past the page cache, or RAM.

A packed store is a model folder whose experts lie in `experts.bin`, the record of (layer, expert) at
(layer * E + expert) * record_bytes, in the dtype of the run or in 4 or 8 bits. `store.json` says what they are, with a
checksum a record, and is what makes a folder a store; everything else, the other weights in `model.safetensors` too,
lies beside it as transformers has it. engine/pack.py writes it.

    store = PackedStore("my-model")
    store.read(layer, expert, target)       # one read straight into the target
    verify("my-model")                      # every byte against its checksum
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from engine.direct import open_direct
from engine.errors import error
from engine.readers import Readers
from engine.record import Layout, Store, page_aligned, read_record

SCHEMA = "expert-store-1"
MANIFEST, RECORDS = "store.json", "experts.bin"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CHUNK_BYTES = 8 << 20  # of a file that is copied or checked
_AGAIN = "pack it again (python -m engine.offload pack)"

Progress = Callable[[int, int], None]  # (records done, records in all)


def is_packed(folder: str | Path) -> bool:
    return (Path(folder) / MANIFEST).is_file()


# ---- the manifest ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Manifest:
    """What store.json says. checksums: crc32 of each record, [L * E]; files: (bytes, crc32) of what lies beside."""

    layers: int
    experts: int
    layout: Layout
    checksums: tuple[int, ...]
    files: dict[str, tuple[int, int]]
    facts: dict  # of the model, as the packer was told

    @property
    def identity(self) -> str:
        """sha256 of everything but the facts: the same bytes are the same store."""
        parts = [self.layers, self.experts, _of_layout(self.layout), self.checksums, sorted(self.files.items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def as_json(self) -> dict:
        return {
            "schema": SCHEMA,
            "identity": self.identity,
            "layers": self.layers,
            "experts": self.experts,
            "layout": _of_layout(self.layout),
            "record_bytes": self.layout.record_bytes,
            "facts": self.facts,
            "files": self.files,
            "checksums": self.checksums,
        }


def _of_layout(layout: Layout) -> dict:
    dtype = str(layout.dtype).removeprefix("torch.")
    found = {"names": layout.names, "shapes": layout.shapes, "dtype": dtype}
    if layout.bits is not None:
        found |= {"bits": layout.bits, "group": layout.group}
    return found | ({"transposed": True} if layout.transposed else {})


def read_manifest(folder: str | Path) -> Manifest:
    """UserError where there is none, of another schema, or it does not agree with itself."""
    path = Path(folder) / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"no {MANIFEST} in {folder}", "a packed store", "check the path, or pack one") from None
    except ValueError as exc:
        raise error(f"{path}: {exc}", "the JSON that pack wrote", _AGAIN) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise error(f"{path}: schema {schema!r}", f"'{SCHEMA}'", _AGAIN)
    try:
        layout = Layout(
            tuple(data["layout"]["names"]),
            tuple(tuple(shape) for shape in data["layout"]["shapes"]),
            DTYPES[data["layout"]["dtype"]],
            data["layout"].get("bits"),
            data["layout"].get("group"),
            data["layout"].get("transposed", False),
        )
        files = {name: (size, checksum) for name, (size, checksum) in data["files"].items()}
        facts, record_bytes = data["facts"], data["record_bytes"]
        manifest = Manifest(data["layers"], data["experts"], layout, tuple(data["checksums"]), files, facts)
        whole = (data["identity"], record_bytes, len(manifest.checksums)) == (
            manifest.identity,
            layout.record_bytes,
            manifest.layers * manifest.experts,
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as exc:
        raise error(f"{path}: {type(exc).__name__} {exc}", "the fields that pack wrote", _AGAIN) from None
    if not whole:
        raise error(f"{path} does not agree with its own identity", "what pack wrote", _AGAIN)
    return manifest


# ---- on disk --------------------------------------------------------------------------------------------------------
class PackedStore:
    """A packed folder. cached: its file system has no O_DIRECT, so the page cache may answer."""

    def __init__(self, folder: str | Path) -> None:
        """UserError where a file is missing or has another size than it had when it was packed."""
        self.folder = Path(folder)
        self.manifest = read_manifest(folder)
        self.layers, self.experts, self.layout = (
            self.manifest.layers,
            self.manifest.experts,
            self.manifest.layout,
        )
        self._record_bytes = self.layout.record_bytes
        _check_size(self.folder / RECORDS, self.layers * self.experts * self._record_bytes)
        for name, (size, _checksum) in self.manifest.files.items():
            _check_size(self.folder / name, size)
        self._fd, self.cached = open_direct(self.folder / RECORDS, os.O_RDONLY)

    def read(self, layer: int, expert: int, target: memoryview) -> int:
        return self._read(layer, expert, target, 0, self._record_bytes)

    def read_part(self, layer: int, expert: int, target: memoryview, first: int) -> int:
        return self._read(layer, expert, target, first, min(len(target), self._record_bytes - first))

    def _read(self, layer: int, expert: int, target: memoryview, first: int, wanted: int) -> int:
        offset = (layer * self.experts + expert) * self._record_bytes + first
        size = os.preadv(self._fd, [target], offset)
        if size != wanted:
            raise error(
                f"{self.folder / RECORDS}: {size} bytes of layer {layer}, expert {expert}",
                f"a record of {self._record_bytes}, into a target as large",
                _AGAIN,
            )
        return size

    def close(self) -> None:
        os.close(self._fd)


def _check_size(path: Path, expected: int) -> None:
    if not path.is_file():
        raise error(f"no {path.name} in {path.parent}", "the files that pack wrote", _AGAIN)
    if (size := path.stat().st_size) != expected:
        raise error(f"{path} of {size:,} bytes", f"{expected:,}, as it was packed", _AGAIN)


def verify(folder: str | Path, progress: Progress | None = None) -> None:
    """Read every record and file and compare; UserError names the first that is not what was packed."""
    store = PackedStore(folder)
    target = memoryview(page_aligned(1, store.layout.record_bytes)[0].numpy())
    try:
        for n, checksum in enumerate(store.manifest.checksums):
            layer, expert = divmod(n, store.experts)
            read_record(store, layer, expert, target)
            if zlib.crc32(target) != checksum:
                found = f"{store.folder / RECORDS}: layer {layer}, expert {expert} has another checksum"
                raise error(found, "the bytes that were packed", _AGAIN)
            if progress:
                progress(n + 1, len(store.manifest.checksums))
    finally:
        store.close()
    for name, (_size, checksum) in store.manifest.files.items():
        found = 0
        with open(store.folder / name, "rb") as handle:
            while part := handle.read(CHUNK_BYTES):
                found = zlib.crc32(part, found)
        if found != checksum:
            raise error(f"{store.folder / name} has another checksum", "the bytes that were packed", _AGAIN)


# ---- in RAM ---------------------------------------------------------------------------------------------------------
class RamStore:
    """All records of another store, read once; that one may be closed then. pin: page-locked, for copies to CUDA.

    A read is torch's copy, which uses torch's own threads: on a link of one reader it is what the probe measures.
    """

    def __init__(self, store: Store, *, pin: bool = False, readers: int = 4) -> None:
        self.layers, self.experts, self.layout = store.layers, store.experts, store.layout
        count, size = self.layers * self.experts, self.layout.record_bytes
        if (free := psutil.virtual_memory().available) < count * size:
            raise error(f"{free:,} bytes of memory free", f"{count * size:,} for all experts", "leave them on the disk")
        self._records = page_aligned(count, size)
        self._pinned = False
        flat = memoryview(self._records.view(-1).numpy())

        def read(n: int) -> None:
            read_record(store, n // self.experts, n % self.experts, flat[n * size : (n + 1) * size])

        with Readers(readers) as pool:
            pool.read_all(read, range(count))
        if pin:
            self._pin()

    def _pin(self) -> None:
        """In place: torch's own pinned memory rounds up to a power of two."""
        code = torch.cuda.cudart().cudaHostRegister(self._records.data_ptr(), self._records.nbytes, 0)
        if int(code):
            found = f"{self._records.nbytes:,} bytes that could not be pinned ({code})"
            raise error(found, "memory that may be locked", "raise `ulimit -l`, or leave the experts on the disk")
        self._pinned = True

    @property
    def pinned(self) -> bool:
        return self._pinned

    def record(self, layer: int, expert: int) -> torch.Tensor:
        """[record_bytes] uint8, in place: what a copy to a device starts from."""
        return self._records[layer * self.experts + expert]

    def read(self, layer: int, expert: int, target: memoryview) -> int:
        return self.read_part(layer, expert, target, 0)

    def read_part(self, layer: int, expert: int, target: memoryview, first: int) -> int:
        record = self.record(layer, expert)[first : first + len(target)]
        here = torch.frombuffer(target, dtype=torch.uint8)
        if here.data_ptr() != record.data_ptr():  # a GPU copies from where it is
            here.copy_(record)
        return len(target)

    def close(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._records.data_ptr())
            self._pinned = False
        self._records = self._records[:0]
