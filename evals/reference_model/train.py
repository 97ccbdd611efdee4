"""The training loop: resumable, reproducible by seed and thread count, its log one JSON object a line.

A run lives in one folder: data.json, tokenizer.json, tokens.<topic>.npy, step<n>.safetensors (the last two),
log.jsonl, pid. SIGTERM and SIGINT write a checkpoint and leave with code 3; a killed run goes on from its
last checkpoint.

With `decay_from` the run starts from another folder's checkpoint and only decays: the stable run is left as
it was.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numba
import torch

from engine.errors import error
from evals.reference_model import checkpoint, heldout
from evals.reference_model.data import Batches
from evals.reference_model.model import Step, initial_parameters
from evals.reference_model.optimiser import Optimiser, schedule
from evals.reference_model.recipe import Recipe


@dataclass(frozen=True)
class Settings:
    """How to run, as opposed to what to train: none of these changes the recipe."""

    threads: int
    dense: str = "float32"
    checkpoint_s: float = 300.0
    evaluate_s: float = 900.0
    log_steps: int = 20
    decay_from: int | None = None
    decay_steps: int = 0
    stop_step: int | None = None


class Run:
    """State of a run in memory: parameters, optimiser, batches."""

    def __init__(self, recipe: Recipe, tokens: dict, settings: Settings, documents: dict, tokenizer):
        torch.set_num_threads(settings.threads)
        numba.set_num_threads(settings.threads)
        self.recipe, self.settings, self.documents, self.tokenizer = recipe, settings, documents, tokenizer
        self.parameters = initial_parameters(recipe.shape, recipe.seed)
        self.step = Step(recipe.shape, self.parameters, settings.threads, recipe.balance, settings.dense)
        self.optimiser = Optimiser(self.parameters, self.step.gradients, recipe.rates)
        self.batches = Batches(tokens, recipe.shares, recipe.shape.context, recipe.seed)

    def advance(self) -> dict[str, float]:
        """One step; its loss, balance loss and gradient norm."""
        s, r = self.settings, self.recipe
        decay_from, decay_steps = s.decay_from, s.decay_steps
        if decay_from is None:
            decay_from, decay_steps = r.decay_start(), r.total_steps() - r.decay_start()
        factor = schedule(self.optimiser.count, r.schedule.warmup, decay_from, decay_steps)
        loss, balance = self.step.loss_and_gradients(self.batches.next(r.batch))
        if not loss < 50:
            raise error(f"loss {loss} at step {self.optimiser.count}", "a finite one", "lower the rates")
        norm = self.optimiser.step(factor)
        return {"loss": loss, "balance": balance, "norm": norm, "factor": factor}

    def save(self, folder: Path) -> Path:
        return checkpoint.save(folder, self.optimiser, {"dealt": self.batches.dealt, "seed": self.recipe.seed})

    def resume(self, path: Path) -> None:
        state = checkpoint.load(path, self.optimiser)
        if state["seed"] != self.recipe.seed or set(state["dealt"]) != set(self.batches.dealt):
            raise error(f"{path}: seed or topics of another recipe", "this recipe's", "use another --workdir")
        self.batches.dealt = state["dealt"]

    def last_step(self) -> int:
        s = self.settings
        natural = self.recipe.total_steps() if s.decay_from is None else s.decay_from + s.decay_steps
        return natural if s.stop_step is None else min(natural, s.stop_step)


def train(run: Run, folder: Path) -> bool:
    """Train to the last step; True when it was reached, False when a signal stopped it."""
    stopped = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.append(1))
    (folder / "pid").write_text(f"{os.getpid()}\n")
    log = open(folder / "log.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - open for the whole run

    def write(**line) -> None:
        step = run.optimiser.count
        record = {"time": round(time.time(), 1), "step": step, "tokens": step * run.recipe.step_tokens, **line}
        log.write(json.dumps(record) + "\n")
        log.flush()

    last, saved, evaluated = run.last_step(), time.monotonic(), -1e18
    window, clock = [], time.monotonic()
    write(event="start", threads=run.settings.threads, dense=run.settings.dense, recipe=run.recipe.digest())
    while run.optimiser.count < last and not stopped:
        window.append(run.advance())
        now, at_end = time.monotonic(), run.optimiser.count >= last
        if len(window) == run.settings.log_steps or at_end:
            rate = len(window) * run.recipe.step_tokens / (now - clock)
            left = (last - run.optimiser.count) * run.recipe.step_tokens / rate
            means = {key: round(sum(x[key] for x in window) / len(window), 4) for key in window[0]}
            write(**means, tokens_per_s=round(rate, 1), left_s=round(left))
            print(f"step {run.optimiser.count}/{last} loss {means['loss']:.3f} {rate:.0f} tokens/s, "
                  f"{left / 3600:.1f} h left", flush=True)  # fmt: skip
            window, clock = [], time.monotonic()
        if run.documents and (now - evaluated > run.settings.evaluate_s or at_end):
            held = heldout.evaluate(run.step, run.tokenizer, run.documents, run.recipe.batch)
            write(event="heldout", topics=held)
            evaluated = clock = time.monotonic()
            window = []
        if now - saved > run.settings.checkpoint_s:
            run.save(folder)
            saved = time.monotonic()
    run.save(folder)
    write(event="end" if run.optimiser.count >= last else "stopped")
    log.close()
    return run.optimiser.count >= last
