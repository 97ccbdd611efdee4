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
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from engine.direct import open_direct
from engine.errors import error
from engine.files import atomic_folder
from engine.record import Store, check_finite, page_aligned, read_record
from engine.safetensors_files import INDEX, SINGLE, Stored, read_headers
from engine.store import CHUNK_BYTES, DTYPES, MANIFEST, RECORDS, Manifest, Progress

COMPANIONS = (".jinja", ".json", ".model", ".tiktoken", ".txt")  # configuration, tokenizer, chat template


def pack(
    store: Store,
    folder: str | Path,
    *,
    source: str | Path,
    leave_out: Iterable[str],
    facts: dict,
    findings: Callable[[], dict] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write the packed store `folder`, which alone can be given as a model.

    source: the model folder that `store` reads; leave_out: names of its tensors that are experts'; facts: what is
    known of the model, kept as it is; findings: facts that are known once every record was read. Raises UserError
    where `folder` exists, the disk is full, a weight of an expert is not finite or the source is not whole; nothing is
    left behind then.
    """
    folder, source = Path(folder), Path(source)
    json.dumps(facts, allow_nan=False)  # before hours of work, not after
    if store.layout.dtype not in DTYPES.values():
        raise error(f"experts in {store.layout.dtype}", " or ".join(DTYPES), "choose another dtype")
    if not (source / "config.json").is_file():
        raise error(f"no config.json in {source}", "a model folder", "check the path")
    tensors = _plain_tensors(source, set(leave_out))
    beside = [p for p in sorted(source.iterdir()) if p.suffix in COMPANIONS and p.name not in (INDEX, MANIFEST)]
    needed = store.layers * store.experts * store.layout.record_bytes
    needed += sum(stored.nbytes for stored in tensors) + sum(path.stat().st_size for path in beside)
    with atomic_folder(folder, needed) as building:
        checksums = _write_records(store, building / RECORDS, progress)
        files = {SINGLE: _write_tensors(building / SINGLE, tensors)}
        files |= {path.name: _write(building / path.name, _parts(path, 0, path.stat().st_size)) for path in beside}
        facts = facts | (findings() if findings else {})
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
            for row, n in enumerate(numbers):
                check_finite(layout, buffer[row], f"layer {n // store.experts}, expert {n % store.experts}")
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


# ---- everything else ------------------------------------------------------------------------------------------------
def _plain_tensors(source: Path, leave_out: set[str]) -> list[Stored]:
    """Every tensor of a checkpoint but those left out, in an order that keeps them aligned."""
    tensors = read_headers(source)
    if missing := leave_out - set(tensors):
        raise error(f"no tensor '{min(missing)}' in {source}", "every tensor of an expert", "check the checkpoint")
    kept = [stored for name, stored in tensors.items() if name not in leave_out]
    return sorted(kept, key=lambda stored: (-stored.nbytes / max(math.prod(stored.shape), 1), stored.name))


def _write_tensors(path: Path, tensors: list[Stored]) -> tuple[int, int]:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for stored in tensors:
        end = at + stored.nbytes
        header[stored.name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    bytes_of_all = (part for one in tensors for part in _parts(one.path, one.start, one.start + one.nbytes))
    return _write(path, chain([len(text).to_bytes(8, "little"), text], bytes_of_all))
