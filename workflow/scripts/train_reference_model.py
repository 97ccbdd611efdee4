"""Train an embedded reference model, or decay a finished one off a checkpoint of a run still going on.

    python workflow/scripts/train_reference_model.py --recipe config/reference_models.yaml --id reference \\
        --workdir results/training/reference
    ... --workdir results/training/interim --decay-from results/training/reference/step0004000.safetensors \\
        --decay-steps 500
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# before numpy: compiled loops call the BLAS from several threads, so it must not start its own
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def keep_freed_memory() -> None:
    """Tell glibc to reuse large blocks: returning and faulting them in again costs a tenth of a step."""
    import ctypes

    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass  # another C library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="config/reference_models.yaml")
    parser.add_argument("--id", required=True)
    parser.add_argument("--workdir", help="folder of the run; default results/training/<id>")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dense", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--decay-from", type=Path, help="checkpoint to decay from, of another folder")
    parser.add_argument("--decay-steps", type=int, default=500)
    parser.add_argument("--stop-step", type=int, help="leave after this step, for a trial")
    parser.add_argument("--data", type=Path, help="folder with the prepared texts; default --workdir")
    parser.add_argument("--evaluate-s", type=float, default=900.0)
    arguments = parser.parse_args()
    keep_freed_memory()

    from tokenizers import Tokenizer

    from evals.reference_model import checkpoint, data, heldout, recipe, train

    chosen = recipe.load(arguments.recipe, arguments.id)
    folder = Path(arguments.workdir or f"results/training/{arguments.id}")
    folder.mkdir(parents=True, exist_ok=True)
    texts = arguments.data or folder
    facts = data.prepare(texts, chosen.shape.vocabulary, chosen.join, chosen.seed)
    tokens = data.open_tokens(texts, facts["topics"])
    decay = {}
    if arguments.decay_from:
        first = checkpoint.step_of(arguments.decay_from)
        decay = {"decay_from": first, "decay_steps": arguments.decay_steps}
    settings = train.Settings(
        threads=arguments.threads, dense=arguments.dense, stop_step=arguments.stop_step,
        evaluate_s=arguments.evaluate_s, **decay,
    )  # fmt: skip
    tokenizer = Tokenizer.from_file(str(texts / "tokenizer.json"))
    run = train.Run(chosen, tokens, settings, heldout.load_documents(), tokenizer)
    start = checkpoint.latest(folder) or arguments.decay_from
    if start:
        run.resume(start)
    print(f"{'from ' + str(start) if start else 'from the seed'}, to step {run.last_step()}", flush=True)
    finished = train.train(run, folder)
    raise SystemExit(0 if finished else 3)


if __name__ == "__main__":
    from engine.errors import main_guard

    main_guard(main)
