"""Reference models in the repository: int8 weights in, a standard Hugging Face folder out.

A matrix [..., rows, columns] becomes int8 with one float32 scale a row (absmax / 127, symmetric, round half
to even); the experts of a layer are stacked to one tensor. Router and norms stay bfloat16: they decide who
runs. `unpack` writes bfloat16 tensors under transformers' names (or float32, where the product of integer and
scale is exact).

Error bound, a weight: scale / 2 from int8, then half a unit in the last place of bfloat16. The same input
gives the same bytes, in both directions.

    python -m evals.reference_model.pack pack FOLDER models/reference
    python -m evals.reference_model.pack unpack models/reference FOLDER
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.errors import error, main_guard
from engine.files import atomic, write_text

PACKED, PLAIN = "model.int8.safetensors", "model.safetensors"
FORMAT = {"expertmiss": json.dumps({"format": "int8-rows", "version": 1})}  # one key: safetensors does not order them
COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md")
EXPERT = re.compile(r"(?P<head>.*\.experts\.)(?P<number>\d+)(?P<tail>\..*)")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def kept_whole(name: str, tensor: torch.Tensor) -> bool:
    """Norms and the router are not quantised."""
    return tensor.dim() < 2 or name.endswith(".mlp.gate.weight")


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., rows, columns] -> (int8 of the same shape, float32 scale [..., rows, 1])."""
    weight = weight.float()
    scale = weight.abs().amax(-1, keepdim=True) / 127
    codes = torch.round(weight / torch.where(scale > 0, scale, torch.ones_like(scale)))
    return codes.to(torch.int8), scale


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`....experts.3.up_proj.weight` of all experts -> one `....experts.*.up_proj.weight` [E, rows, columns]."""
    groups: dict[str, dict[int, torch.Tensor]] = {}
    result = {}
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        if match:
            groups.setdefault(f"{match['head']}*{match['tail']}", {})[int(match["number"])] = tensor
        else:
            result[name] = tensor
    for name, members in groups.items():
        if sorted(members) != list(range(len(members))):
            raise error(f"{name}: experts {sorted(members)[:3]}...", "0 to E-1, each once", "check the checkpoint")
        result[name] = torch.stack([members[e] for e in range(len(members))])
    return result


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors and the metadata of a safetensors file. Raises UserError if it is absent, cut short or not one."""
    if not path.is_file():
        raise error(f"no file {path}", f"a folder with {path.name}", "check the path")
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in sorted(handle.keys())}, handle.metadata() or {}
    except (SafetensorError, OSError) as exc:
        raise error(f"{path}: {exc}", "a whole safetensors file", "fetch or make it again") from None


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    with atomic(path) as temporary:
        save_file({name: tensors[name].contiguous() for name in sorted(tensors)}, temporary, metadata=metadata)
        temporary.chmod(0o644)  # safetensors writes for the owner alone


def copy_companions(source: Path, target: Path, dtype: str) -> None:
    """Copy configuration, tokenizer and card; config.json says the dtype of what `unpack` writes."""
    for name in COMPANIONS:
        if (source / name).is_file():
            with atomic(target / name) as temporary:
                shutil.copyfile(source / name, temporary)
    config = json.loads((target / "config.json").read_text())
    write_text(target / "config.json", json.dumps(config | {"dtype": dtype}, indent=1) + "\n")


def pack(source: str | Path, target: str | Path) -> Path:
    """Pack the Hugging Face folder `source` (model.safetensors, bfloat16 or float32) into the folder `target`."""
    source, target = Path(source), Path(target)
    packed = {}
    for name, tensor in stack_experts(read(source / PLAIN)[0]).items():
        if kept_whole(name, tensor):
            packed[name] = tensor.to(torch.bfloat16)
        else:
            packed[name], packed[f"{name}.scale"] = quantise(tensor)
    write(target / PACKED, packed, FORMAT)
    copy_companions(source, target, "bfloat16")
    return target / PACKED


def unpack_tensors(path: str | Path, dtype: str = "bfloat16") -> dict[str, torch.Tensor]:
    """Tensors of a packed file under transformers' names, one an expert matrix."""
    path = Path(path)
    packed, metadata = read(path)
    if metadata != FORMAT:
        raise error(f"{path}: metadata {metadata}", f"{FORMAT}", "give a file that `pack` wrote")
    if dtype not in DTYPES:
        raise error(f"dtype '{dtype}'", " or ".join(DTYPES), "choose one")
    tensors = {}
    for name, value in packed.items():
        if name.endswith(".scale"):
            continue
        if value.dtype == torch.int8:
            if f"{name}.scale" not in packed:
                raise error(f"{path}: no scale of {name}", "one scale a quantised matrix", "pack it again")
            value = value.float() * packed[f"{name}.scale"]
        value = value.to(DTYPES[dtype])
        if ".experts.*." in name:
            tensors |= {name.replace("*", str(e), 1): one for e, one in enumerate(value)}
        else:
            tensors[name] = value
    return tensors


def unpack(source: str | Path, target: str | Path, dtype: str = "bfloat16") -> Path:
    """Write the packed folder `source` as a Hugging Face folder `target` that stock transformers loads."""
    source, target = Path(source), Path(target)
    tensors = unpack_tensors(source / PACKED, dtype)
    write(target / PLAIN, tensors, {"format": "pt"})
    copy_companions(source, target, dtype)
    return target / PLAIN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["pack", "unpack"])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of what unpack writes")
    arguments = parser.parse_args()
    if arguments.command == "pack":
        path = pack(arguments.source, arguments.target)
    else:
        path = unpack(arguments.source, arguments.target, arguments.dtype)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main_guard(main)
