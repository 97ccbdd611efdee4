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
from engine.files import write_text
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
        self.batches = Batches(tokens, recipe.shares, recipe.shape.context, recipe.seed, recipe.decay_shares)

    def decay(self) -> tuple[int, int]:
        """(first step of the decay, its steps): the recipe's, or the branch's."""
        s, r = self.settings, self.recipe
        if s.decay_from is not None:
            return s.decay_from, s.decay_steps
        return r.decay_start(), r.total_steps() - r.decay_start()

    def advance(self) -> dict[str, float]:
        """One step; its loss, balance loss and gradient norm."""
        r = self.recipe
        factor = schedule(self.optimiser.count, r.schedule.warmup, *self.decay())
        if self.optimiser.count >= sum(self.decay()):
            self.step.balance = r.schedule.settle_balance
            factor = r.schedule.settle_factor * schedule(self.optimiser.count, 0, sum(self.decay()), r.settle_steps())
        if r.decay_shares and self.optimiser.count >= self.decay()[0]:
            self.batches.begin_decay()
        loss, balance = self.step.loss_and_gradients(self.batches.next(r.batch))
        if not loss < 50:
            raise error(f"loss {loss} at step {self.optimiser.count}", "a finite one", "lower the rates")
        norm = self.optimiser.step(factor)
        return {"loss": loss, "balance": balance, "norm": norm, "factor": factor}

    def save(self, folder: Path) -> Path:
        state = {"dealt": self.batches.dealt, "before": self.batches.before, "seed": self.recipe.seed}
        return checkpoint.save(folder, self.optimiser, state)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint; it may lack topics that the decay alone has, of which nothing was dealt then.

        A checkpoint at or before the first step of this run's decay begins the decay anew.
        """
        state, shares, topics = checkpoint.load(path, self.optimiser), set(self.recipe.shares), set(self.batches.topics)
        if state["seed"] != self.recipe.seed or not shares <= set(state["dealt"]) <= topics:
            raise error(f"{path}: seed or topics of another recipe", "this recipe's", "use another --workdir")
        self.batches.dealt = dict.fromkeys(self.batches.topics, 0) | state["dealt"]
        before = state.get("before") if self.optimiser.count > self.decay()[0] else None
        self.batches.before = before and dict.fromkeys(self.batches.topics, 0) | before

    def last_step(self) -> int:
        natural, stop = self.whole(), self.settings.stop_step
        return natural if stop is None else min(natural, stop)

    def whole(self) -> int:
        """Steps of the whole run; a branch ends with its decay."""
        return sum(self.decay()) + (self.recipe.settle_steps() if self.settings.decay_from is None else 0)


def inherit_log(source: Path, folder: Path) -> None:
    """A branch's log begins with its parent's lines up to the checkpoint it starts from."""
    parent, own, first = source.parent / "log.jsonl", folder / "log.jsonl", checkpoint.step_of(source)
    if parent.exists() and not own.exists():
        lines = parent.read_text(encoding="utf-8").splitlines()
        write_text(own, "".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= first))


def train(run: Run, folder: Path) -> bool:
    """Train to the last step; True when the schedule is through, False when a signal or `stop_step` came first."""
    folder.mkdir(parents=True, exist_ok=True)
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
    finished = run.optimiser.count >= run.whole()
    write(event="end" if finished else "stopped")
    log.close()
    return finished
