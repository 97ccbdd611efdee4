"""Train an embedded reference model, or decay a finished one off a checkpoint of a run still going on.

    python workflow/scripts/train_reference_model.py --id reference --workdir results/training/reference
    ... --id reference --workdir results/training/interim --data results/training/reference \\
        --decay-from results/training/reference/step0004000.safetensors --decay-steps 500
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# before numpy: compiled loops call the BLAS from several threads, so it must not start its own
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
STOPPED = 3  # exit status of a run that was stopped before its end


def keep_freed_memory() -> None:
    """Tell glibc to reuse large blocks: returning and faulting them in again costs a tenth of a step."""
    import ctypes

    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass  # another C library


def compile_in_a_child(arguments: argparse.Namespace, texts: Path, dense: str) -> None:
    """One step in another process fills numba's cache on disk.

    Kernels compiled in the process that runs them round otherwise than the same kernels from the cache; so every run
    takes them from there, the first one too, and a run killed and resumed equals one that was not.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, "--compiled", "--stop-step", "1", "--workdir", scratch]
        command += ["--recipe", arguments.recipe, "--id", arguments.id, "--data", str(texts)]
        command += ["--threads", str(arguments.threads), "--dense", dense]
        print("compiling, once on this machine", flush=True)
        ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != STOPPED:
        raise RuntimeError(f"the step that compiles failed:\n{ended.stderr[-2000:]}")


def main() -> None:
    from engine.errors import error

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="config/reference_models.yaml")
    parser.add_argument("--id", required=True)
    parser.add_argument("--workdir", help="folder of the run; default results/training/<id>")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dense", choices=["bfloat16", "float32"], help="of dense products; default: the recipe's")
    parser.add_argument("--decay-from", type=Path, help="checkpoint to decay from, of another folder")
    parser.add_argument("--decay-steps", type=int, default=500)
    parser.add_argument("--stop-step", type=int, help="leave after this step, for a trial")
    parser.add_argument("--data", type=Path, help="folder with the prepared texts; default --workdir")
    parser.add_argument("--evaluate-s", type=float, default=900.0)
    parser.add_argument("--compiled", action="store_true", help="numba's cache on disk is filled: do not fill it first")
    parser.add_argument("--output", type=Path, help="also write the facts of the finished model here")
    arguments = parser.parse_args()
    if not 1 <= arguments.threads <= os.cpu_count():
        raise error(f"--threads {arguments.threads}", f"1 to {os.cpu_count()}", "give what this machine has")
    keep_freed_memory()

    from tokenizers import Tokenizer

    from engine.files import write_json
    from evals.reference_model import card, checkpoint, data, heldout, recipe, train

    chosen = recipe.load(arguments.recipe, arguments.id)
    folder = Path(arguments.workdir or f"results/training/{arguments.id}")
    folder.mkdir(parents=True, exist_ok=True)
    texts = arguments.data or folder
    data.prepare(texts, chosen.shape.vocabulary, chosen.join, chosen.seed, chosen.shares, chosen.decay_shares or ())
    if not arguments.compiled:
        compile_in_a_child(arguments, texts, arguments.dense or chosen.dense)
    tokens = data.open_tokens(texts, chosen.topics())
    decay = {}
    if arguments.decay_from:
        first = checkpoint.step_of(arguments.decay_from)
        decay = {"decay_from": first, "decay_steps": arguments.decay_steps}
    settings = train.Settings(
        threads=arguments.threads, dense=arguments.dense or chosen.dense, stop_step=arguments.stop_step,
        evaluate_s=arguments.evaluate_s, **decay,
    )  # fmt: skip
    tokenizer = Tokenizer.from_file(str(texts / "tokenizer.json"))
    run = train.Run(chosen, tokens, settings, heldout.load_documents(), tokenizer)
    start = checkpoint.latest(folder) or arguments.decay_from
    if start:
        run.resume(start)
    print(f"{'from ' + str(start) if start else 'from the seed'}, to step {run.last_step()}", flush=True)
    if start == arguments.decay_from and start:
        train.inherit_log(start, folder)
    if not train.train(run, folder):
        print(f"stopped at step {run.optimiser.count}; the same command goes on from there", flush=True)
        raise SystemExit(STOPPED)
    facts = card.finish(run, texts, folder)
    if arguments.output:
        write_json(arguments.output, facts)
    print(json.dumps(facts["heldout_packed"]), flush=True)


if __name__ == "__main__":
    from engine.errors import main_guard

    main_guard(main)
