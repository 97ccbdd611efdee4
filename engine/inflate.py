"""Inflate a small trained Qwen3-MoE: a sharded checkpoint of a given width and expert width that computes the same.

Small trained models stand in for big ones on real hardware: routing and perplexity stay the small model's own, while
an expert weighs megabytes. What is widened how, and why nothing changes, says engine/widening.py; here are the files.

    python -m engine.inflate --model FOLDER --width 1024 --expert-width 1024 --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.errors import error, main_guard
from engine.files import atomic_folder, sha256, sync, write_json
from engine.hub import resolve
from engine.safetensors_files import INDEX, SINGLE, Stored, read_headers, read_tensor
from engine.widening import DTYPES, FILLER_SEED, Filler, Part, axes, groups, widen, widen_config

SHARD_BYTES = 500_000_000
PROVENANCE = "inflation.json"
_PACKED = "model.int8.safetensors"
_REST_BYTES = 2**24  # index, configuration, tokenizer
_COMPANIONS = ("*token*.json", "*token*.model", "chat_template*", "generation_config.json", "merges.txt", "vocab*")


def inflate(
    source: str | Path,
    out: str | Path,
    *,
    width: int | None = None,
    expert_width: int | None = None,
    dtype: str = "bfloat16",
    shard_bytes: int = SHARD_BYTES,
    seed: int = FILLER_SEED,
    progress: Callable[[str], None] = lambda line: None,
) -> dict:
    """Write the folder `source`, widened, as the new folder `out`, whole or not at all; memory holds one shard.

    None: the model's own width. Returns what inflation.json says: sha256 of the source's weights, sizes, dtype, seed,
    and how many of the source's numbers `dtype` does not hold (they are rounded, as loading in it would). UserError for
    a model or sizes that cannot be, an existing `out`, a full disk.
    """
    source, out = Path(source), Path(out)
    if shard_bytes < 1:
        raise error(f"shards of {shard_bytes} bytes", "1 or more", "choose a size")
    config = _read_json(source / "config.json")
    wide_config = widen_config(config, width, expert_width, dtype)
    tensors = _find_tensors(source, config)
    plan = list(groups(config))
    sizes = _sizes(plan, wide_config)
    with atomic_folder(out, sum(sizes) + _REST_BYTES) as folder:
        filler = Filler(seed, DTYPES[dtype])
        rounded, written, weight_map = 0, 0, {}
        shards = _shards(plan, sizes, shard_bytes)
        for number, parts in enumerate(shards, start=1):
            wide, lost = _widen_parts(parts, tensors, config, wide_config, filler)
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            _save(wide, folder / file)
            weight_map |= dict.fromkeys(wide, file)
            rounded += lost
            written += sum(tensor.nbytes for tensor in wide.values())
            del wide  # before the next shard is made
            progress(f"shard {number} of {len(shards)}, {written / 1e9:.2f} of {sum(sizes) / 1e9:.2f} GB")
        for path in {path for pattern in _COMPANIONS for path in source.glob(pattern)}:
            shutil.copyfile(path, folder / path.name)
        write_json(folder / "config.json", wide_config)
        write_json(folder / INDEX, {"metadata": {"total_size": written}, "weight_map": weight_map})
        provenance = {
            "source_sha256": {path.name: sha256(path) for path in sorted({stored.path for stored in tensors.values()})},
            "source_width": config["hidden_size"],
            "source_expert_width": config["moe_intermediate_size"],
            "width": wide_config["hidden_size"],
            "expert_width": wide_config["moe_intermediate_size"],
            "dtype": dtype,
            "seed": seed,
            "rounded_weights": rounded,
        }
        write_json(folder / PROVENANCE, provenance)
        for path in folder.iterdir():
            sync(path)
    return provenance


# ---- the source -------------------------------------------------------------------------------------------------
def _find_tensors(source: Path, config: dict) -> dict[str, Stored]:
    """Refuse a folder without exactly the tensors that its config.json stands for, before anything is written."""
    if (source / _PACKED).exists() and not (source / SINGLE).exists():
        raise error(
            f"{source}: int8 weights ({_PACKED})",
            f"a plain folder ({SINGLE})",
            f"unpack it first: python -m evals.reference_model.pack unpack {source} FOLDER",
        )
    own, found = axes(config), read_headers(source)
    shapes = {name: tuple(own[a] for a in part.axes) for group in groups(config) for name, part in group.items()}
    ignored = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    if missing := sorted(set(shapes) - set(found)):
        raise error(f"no tensor {missing[0]}", "a tensor an expert matrix, as qwen3_moe is published", "save it so")
    if foreign := sorted(set(found) - set(shapes) - ignored):
        raise error(f"a tensor {foreign[0]}", "the tensors of a stock qwen3_moe", "inflate one")
    for name, shape in shapes.items():
        if found[name].shape != shape:
            raise error(f"{name} of shape {found[name].shape}", f"{shape} (config.json)", "check the folder")
    return found


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"no file {path}", "a Hugging Face folder", "check the path") from None
    except ValueError as exc:
        raise error(f"{path}: {exc}", "JSON", "fetch or make it again") from None


# ---- shards -----------------------------------------------------------------------------------------------------
def _sizes(plan: list[dict[str, Part]], wide_config: dict) -> list[int]:
    """Bytes of each group, widened."""
    wide, item = axes(wide_config), DTYPES[wide_config["dtype"]].itemsize
    return [sum(math.prod(wide[a] for a in part.axes) for part in group.values()) * item for group in plan]


def _shards(plan: list[dict[str, Part]], sizes: list[int], limit: int) -> list[dict[str, Part]]:
    """Groups in order, as many a shard as `limit` bytes hold, at least one."""
    shards, held = [], math.inf
    for group, size in zip(plan, sizes, strict=True):
        if held + size > limit:
            shards.append({})
            held = 0
        shards[-1] |= group
        held += size
    return shards


def _widen_parts(
    parts: dict[str, Part], tensors: dict[str, Stored], config: dict, wide_config: dict, filler: Filler
) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors of one shard, and how many of the source's numbers had to be rounded for them."""
    dtype, own, wide = DTYPES[wide_config["dtype"]], axes(config), axes(wide_config)
    root = math.isqrt(wide["D"] // own["D"])
    found, rounded = {}, 0
    for name, part in parts.items():
        exact = read_tensor(tensors[name], torch.float32)
        if not exact.isfinite().all():
            raise error(f"{name} with numbers that are not finite", "finite weights", "fetch or make the model again")
        if part.scaled:
            exact /= root
        cast = exact.to(dtype)
        rounded += int((cast != exact).sum())
        found[name] = widen(cast, tuple(wide[a] for a in part.axes), part.zero, filler)
    return found, rounded


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as exc:  # what it says of a full disk has no number
        raise OSError(str(exc)) from None
    path.chmod(0o644)  # safetensors writes for the owner alone


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.inflate", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="plain Hugging Face folder of a qwen3_moe, or a hub id")
    parser.add_argument("--revision", help="of a hub id: commit, branch or tag; default its main branch")
    parser.add_argument("--width", type=int, help="D: its own times a power of four; default its own")
    parser.add_argument("--expert-width", type=int, help="F: at least its own; default its own")
    parser.add_argument("--out", required=True, help="folder to write; must not be there yet")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (default) or float32")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="most bytes a file, and in memory")
    parser.add_argument("--seed", type=int, default=FILLER_SEED, help="of the filler")
    a = parser.parse_args()

    def show(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    provenance = inflate(
        resolve(a.model, a.revision),
        a.out,
        width=a.width,
        expert_width=a.expert_width,
        dtype=a.dtype,
        shard_bytes=a.shard_bytes,
        seed=a.seed,
        progress=show,
    )
    print(json.dumps(provenance))


if __name__ == "__main__":
    main_guard(main)
