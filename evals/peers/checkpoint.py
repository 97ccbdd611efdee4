"""A checkpoint as stock programs map it into memory: the model's own parameters, nothing to convert when it is loaded.

Experts that lie in a file one by one are put together when transformers loads them, which takes memory for all of them.

    python -m evals.peers.checkpoint --model FOLDER --out FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from engine.errors import main_guard
from engine.files import atomic_folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evals.peers.checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, type=Path, help="a checkpoint folder in bfloat16")
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    logging.disable_progress_bar()
    write(a.model, a.out)


def write(model: Path, folder: str | Path) -> None:
    """`folder`: the checkpoint `model` in bfloat16, its experts together. Takes memory for all of it."""
    with atomic_folder(folder, sum(path.stat().st_size for path in model.glob("*.safetensors"))) as building:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, local_files_only=True)
        loaded.save_pretrained(building, save_original_format=False)
        AutoTokenizer.from_pretrained(model, local_files_only=True).save_pretrained(building)


if __name__ == "__main__":
    main_guard(main)
