"""Pack a model: its experts as records in one file, everything else as transformers has it, whole or not at all.

The folder is built beside its target, under a lock, and renamed at the end, after every byte is on the disk. A process
that is killed leaves a hidden folder that is no store and that the next call removes.

    pack(store, "my-model", source="checkpoint", leave_out=names_of_expert_tensors, facts={"revision": ...})
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from engine.errors import error
from engine.files import atomic_folder
from engine.record import Layout, Store, page_aligned, read_record
from engine.store import CHUNK_BYTES, DTYPES, MANIFEST, RECORDS, Manifest, Progress, open_direct

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
COMPANIONS = (".jinja", ".json", ".model", ".tiktoken", ".txt")  # configuration, tokenizer, chat template


def pack(
    store: Store,
    folder: str | Path,
    *,
    source: str | Path,
    leave_out: Iterable[str],
    facts: dict,
    progress: Progress | None = None,
) -> Manifest:
    """Write the packed store `folder`, which alone can be given as a model.

    source: the model folder that `store` reads; leave_out: names of its tensors that are experts'; facts: what is
    known of the model, kept as it is. Raises UserError where `folder` exists, the disk is full, a weight of an expert
    is not finite or the source is not whole; nothing is left behind then.
    """
    folder, source = Path(folder), Path(source)
    json.dumps(facts, allow_nan=False)  # before hours of work, not after
    if store.layout.dtype not in DTYPES.values():
        raise error(f"experts in {store.layout.dtype}", " or ".join(DTYPES), "choose another dtype")
    if not (source / "config.json").is_file():
        raise error(f"no config.json in {source}", "a model folder", "check the path")
    pieces, metadata = _plain_tensors(source, set(leave_out))
    beside = [p for p in sorted(source.iterdir()) if p.suffix in COMPANIONS and p.name not in (INDEX, MANIFEST)]
    needed = store.layers * store.experts * store.layout.record_bytes
    needed += sum(piece.end - piece.begin for piece in pieces) + sum(path.stat().st_size for path in beside)
    with atomic_folder(folder, needed) as building:
        checksums = _write_records(store, building / RECORDS, progress)
        files = {WEIGHTS: _write_tensors(building / WEIGHTS, pieces, metadata)}
        files |= {path.name: _write(building / path.name, _parts(path, 0, path.stat().st_size)) for path in beside}
        manifest = Manifest(store.layers, store.experts, store.layout, tuple(checksums), files, facts)
        _write(building / MANIFEST, [json.dumps(manifest.as_json(), allow_nan=False).encode()])
    return manifest


# ---- files ----------------------------------------------------------------------------------------------------------
def _write(path: Path, parts: Iterable[bytes]) -> tuple[int, int]:
    """Write a file, down to the disk; (bytes, crc32)."""
    size = checksum = 0
    with open(path, "xb") as handle:
        for part in parts:
            handle.write(part)
            size, checksum = size + len(part), zlib.crc32(part, checksum)
        handle.flush()
        os.fsync(handle.fileno())
    return size, checksum


def _parts(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """The bytes of a file from begin to end, a chunk at a time."""
    with open(path, "rb") as handle:
        handle.seek(begin)
        while begin < end:
            part = handle.read(min(CHUNK_BYTES, end - begin))
            if not part:
                raise error(f"{path} ends at byte {begin:,}", f"{end:,} bytes", "fetch it again")
            begin += len(part)
            yield part


# ---- experts --------------------------------------------------------------------------------------------------------
def _write_records(store: Store, path: Path, progress: Progress | None) -> list[int]:
    """All records in order, several a write; their checksums."""
    layout, total = store.layout, store.layers * store.experts
    width = layout.record_bytes
    rows = max(1, min(total, CHUNK_BYTES // width))
    buffer = page_aligned(rows, width)
    flat = memoryview(buffer.view(-1).numpy())
    ends = [at + size for at, size in zip(layout.offsets, layout.part_bytes, strict=True)]
    gaps = list(zip(ends, [*layout.offsets[1:], width], strict=True))
    checksums: list[int] = []
    handle, _cached = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(handle, 0, total * width)  # a full disk says so now, and the file lies in one piece
        for first in range(0, total, rows):
            numbers = range(first, min(first + rows, total))
            for row, n in enumerate(numbers):
                read_record(store, n // store.experts, n % store.experts, flat[row * width : (row + 1) * width])
            for begin, end in gaps:
                buffer[:, begin:end] = 0  # the same weights give the same bytes
            _check_finite(layout, buffer[: len(numbers)], first, store.experts)
            written = flat[: len(numbers) * width]
            checksums += [zlib.crc32(written[at : at + width]) for at in range(0, len(written), width)]
            at = first * width
            while written:
                size = os.pwritev(handle, [written], at)
                written, at = written[size:], at + size
            if progress:
                progress(numbers.stop, total)
        os.fsync(handle)
    finally:
        os.close(handle)
    return checksums


def _check_finite(layout: Layout, records: torch.Tensor, first: int, experts: int) -> None:
    """records [rows, record_bytes], of experts `first` and on. NaN and infinity both show in the extremes."""
    for name, weights in layout.views(records).items():
        if not all(extreme.isfinite() for extreme in weights.aminmax()):
            row = next(row for row, weight in enumerate(weights) if not weight.isfinite().all())
            layer, expert = divmod(first + row, experts)
            found = f"layer {layer}, expert {expert}: a weight of {name} that is not finite"
            raise error(found, "finite weights", "fetch or make the checkpoint again")


# ---- everything else ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Piece:
    """One tensor of a safetensors file, as the file describes it."""

    name: str
    dtype: str
    shape: list[int]
    path: Path
    begin: int
    end: int

    @property
    def item_bytes(self) -> float:
        return (self.end - self.begin) / max(math.prod(self.shape), 1)


def _plain_tensors(source: Path, leave_out: set[str]) -> tuple[list[_Piece], dict]:
    """Every tensor of a checkpoint but those left out, in an order that keeps them aligned; and its metadata."""
    names, index = {WEIGHTS}, source / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise error(f"{index}: {exc}", "the index of the shards", "fetch it again") from None
    pieces: dict[str, _Piece] = {}
    metadata: dict = {"format": "pt"}
    for path in sorted(source / name for name in names):
        start, header = _header(path)
        metadata |= header.pop("__metadata__", {})
        for name, tensor in header.items():
            begin, end = (start + at for at in tensor["data_offsets"])
            pieces[name] = _Piece(name, tensor["dtype"], tensor["shape"], path, begin, end)
    if missing := leave_out - set(pieces):
        raise error(f"no tensor '{min(missing)}' in {source}", "every tensor of an expert", "check the checkpoint")
    kept = [piece for name, piece in pieces.items() if name not in leave_out]
    return sorted(kept, key=lambda piece: (-piece.item_bytes, piece.name)), metadata


def _header(path: Path) -> tuple[int, dict]:
    """(byte at which the tensors begin, what the header says) of a whole safetensors file."""
    try:
        with open(path, "rb") as handle:
            start = 8 + int.from_bytes(handle.read(8), "little")
            size = os.fstat(handle.fileno()).st_size
            header = json.loads(handle.read(start - 8)) if start <= size else {}
        end = start + max(tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__")
    except OSError as exc:
        raise error(f"{path}: {exc.strerror}", "a file of the checkpoint", "fetch it") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise error(f"{path} is no safetensors file", "a whole file of the checkpoint", "fetch it again") from None
    if end != size:
        raise error(f"{path} of {size:,} bytes", f"{end:,}, as its header says", "fetch it again")
    return start, header


def _write_tensors(path: Path, pieces: list[_Piece], metadata: dict) -> tuple[int, int]:
    header, at = {"__metadata__": metadata}, 0
    for piece in pieces:
        size = piece.end - piece.begin
        header[piece.name] = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    bytes_of_all = (part for piece in pieces for part in _parts(piece.path, piece.begin, piece.end))
    return _write(path, chain([len(text).to_bytes(8, "little"), text], bytes_of_all))
