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
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with atomic_folder(a.out, sum(path.stat().st_size for path in a.model.glob("*.safetensors"))) as building:
        model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.bfloat16, local_files_only=True)
        model.save_pretrained(building, save_original_format=False)
        AutoTokenizer.from_pretrained(a.model, local_files_only=True).save_pretrained(building)


if __name__ == "__main__":
    main_guard(main)
