"""Which tensors does a checkpoint folder hold, and where do they lie? Headers alone, and everything checked first.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and place of
every tensor) and the tensors. A folder holds `model.safetensors`, or shards and `model.safetensors.index.json`, which
says which tensor is where. Read here by ourselves: the store must know where the bytes lie, and reading through mmap
would count them as resident memory.

    tensors = read_headers(Path("my-model"))
    read_tensor(tensors["lm_head.weight"], torch.bfloat16)
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import UserError, error, nearest
from engine.files import sha256

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS = (".bin", ".gguf", ".pth", ".safetensors")  # named where neither of the two is there
_POINTER = b"version https://git-lfs.github.com/spec/"
_LONGEST_HEADER = 100_000_000  # bytes, what the safetensors library accepts
_CAST_BYTES = 1 << 22  # read at once where a tensor changes its dtype on the way
_FETCH = "fetch the checkpoint again"


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor where it lies."""

    name: str
    path: Path
    dtype: str  # as the file says it: BF16, F8_E4M3, ...
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    nbytes: int


def dtype_of(stored: Stored) -> torch.dtype:
    """UserError on a dtype that is not read: integers, and the eight and four bits of quantised weights."""
    if stored.dtype not in DTYPES:
        raise error(
            f"{stored.path}: tensor {stored.name} is stored as {stored.dtype}",
            ", ".join(DTYPES),
            "use a checkpoint that is not quantised, or dequantise it",
        )
    return DTYPES[stored.dtype]


def read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint by name. UserError where a file is missing, not whole, or not what it says."""
    folder = Path(folder)
    if (folder / SINGLE).exists():  # transformers looks for it first, too
        return read_header(folder / SINGLE)
    index = folder / INDEX
    if not index.exists():
        found = sorted(
            path.name for path in folder.glob("*") if path.suffix in (".bin", ".gguf", ".pth", ".safetensors")
        )
        raise error(
            f"{folder} has neither {SINGLE} nor {INDEX}" + (f", but {found[0]}" if found else ""),
            "a checkpoint in safetensors",
            "check the path, or " + _FETCH,
        )
    weight_map = _read_index(index)
    tensors: dict[str, Stored] = {}
    for shard in sorted(set(weight_map.values())):
        for name, stored in read_header(folder / shard).items():
            if name in tensors:
                raise error(
                    f"{folder}: tensor {name} lies in {tensors[name].path.name} and in {shard}",
                    "every tensor once",
                    _FETCH,
                )
            tensors[name] = stored
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise error(f"{folder / shard} lacks tensor {name}", f"what {INDEX} says", _FETCH)
    return tensors


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file, which must be as long as its header says."""
    head = _head(path)
    size = path.stat().st_size
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > min(_LONGEST_HEADER, size - 8):
        raise error(f"{path} has {size:,} bytes and no whole header", "a whole safetensors file", _FETCH)
    with open(path, "rb") as handle:
        handle.seek(8)
        text = handle.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_once)
        entries.pop("__metadata__", None)
        tensors = {name: _stored(name, path, entry, 8 + length) for name, entry in entries.items()}
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise error(f"{path} has a broken header ({exc})", "a whole safetensors file", _FETCH) from None
    whole = max((stored.start + stored.nbytes for stored in tensors.values()), default=8 + length)
    if size != whole:
        raise error(f"{path} has {size:,} bytes", f"{whole:,}, as its header says", _FETCH)
    return tensors


def weights_hash(folder: str | Path) -> str | None:
    """Of the weights whose function a folder computes: the first 16 digits of each file's sha256, in file order.

    An inflated model computes its small one's function, a packed store that of what was packed; both say so. Not in 4
    or 8 bits: that is a function of its own, named by what was packed, the bits and the group and the store's identity.
    None: no such files.
    """
    folder = Path(folder)
    for name, keys in (("store.json", ("facts", "model")), ("inflation.json", ("source_sha256",))):
        if (folder / name).is_file():
            said = found = json.loads((folder / name).read_text(encoding="utf-8"))
            for key in keys:
                found = found.get(key) or {}
            if bits := said.get("layout", {}).get("bits"):
                return f"{found or 'unnamed'}~{bits}bit{said['layout']['group']}~{said['identity'][:16]}"
            if found:
                return found if isinstance(found, str) else "+".join(h[:16] for _, h in sorted(found.items()))
    files = sorted(folder.glob("*.safetensors"))
    return "+".join(sha256(path)[:16] for path in files) or None


def refuse_pointer(path: Path) -> None:
    """UserError where a file is what Git LFS leaves behind in place of it."""
    _head(path)


def read_tensor(stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in memory of its own, cast where its dtype is another, by plain reads."""
    tensor = torch.empty(stored.shape, dtype=dtype)
    flat, source = tensor.view(-1), dtype_of(stored)
    if source == dtype:
        _read_into(stored, 0, flat)
        return tensor
    step = _CAST_BYTES // source.itemsize
    for i, part in enumerate(flat.split(step)):
        piece = torch.empty(len(part), dtype=source)
        _read_into(stored, i * step * source.itemsize, piece)
        part.copy_(piece)
    return tensor


def _read_into(stored: Stored, at: int, target: torch.Tensor) -> None:
    """Fill a flat tensor of the stored dtype from byte `at` of the stored tensor on."""
    buffer = memoryview(target.view(torch.uint8).numpy())
    with open(stored.path, "rb", buffering=0) as handle:
        done = 0
        while done < len(buffer):
            count = os.preadv(handle.fileno(), [buffer[done:]], stored.start + at + done)
            if not count:
                raise error(f"{stored.path} ends within tensor {stored.name}", "a whole file", _FETCH)
            done += count


def _stored(name: str, path: Path, entry: dict, data: int) -> Stored:
    """data: the byte at which the tensors of the file begin."""
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    stored = Stored(name, path, entry["dtype"], shape, data + start, stop - start)
    wants = math.prod(shape) * DTYPES[stored.dtype].itemsize if stored.dtype in DTYPES else stored.nbytes
    if start < 0 or min(shape, default=0) < 0 or stored.nbytes != wants:
        raise error(
            f"{path}: tensor {name} of shape {list(shape)}, {stored.dtype}, has {stored.nbytes:,} bytes",
            f"{wants:,}",
            _FETCH,
        )
    return stored


def _read_index(path: Path) -> dict[str, str]:
    """{tensor: file name} of an index."""
    _head(path)
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)["weight_map"]
        shards = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise error(f"{path} is broken ({exc})", "JSON with a weight_map", _FETCH) from None
    for shard in shards:
        if Path(str(shard)).name != shard:
            raise error(f"{path} names the shard {shard!r}", "files beside the index", _FETCH)
        if not (path.parent / shard).exists():
            there = [other.name for other in path.parent.glob("*.safetensors")]
            hint = f" ({nearest(shard, there)})" if there else ""
            raise error(f"{path.parent / shard} is missing", f"every shard of {path.name}{hint}", _FETCH)
    if not shards:
        raise error(f"{path} names no tensor", "JSON with a weight_map", _FETCH)
    return weight_map


def _head(path: Path) -> bytes:
    """The first bytes of a file that is no Git LFS pointer."""
    try:
        with open(path, "rb") as handle:
            head = handle.read(len(_POINTER))
    except OSError as exc:
        raise error(f"{path}: {exc.strerror}", "a file that can be read", "check the path and its rights") from None
    if head == _POINTER:
        raise error(f"{path} is a Git LFS pointer", "the file it points to", "run `git lfs pull` in that folder")
    return head


def _once(pairs: list[tuple[str, object]]) -> dict:
    """A JSON object whose keys are all different: json itself would keep the last of two."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} twice")
    return found
