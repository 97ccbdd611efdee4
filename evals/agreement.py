"""Would a policy say what the baseline said? The baseline's own continuation forced upon it, position by position.

Free generations part at their first difference and then say little about each other; forced, every position asks the
same question of every policy. The prompt is exact under all of them, so it is read once; what differs by policy, the
residents it leaves behind, is followed from its routing. t1 is said by the prompt's own pass and so is no position:

    prompt                | t1                   t2    t3    t4        n tokens are n - 1 positions
    exact, read once      | said by the prompt   ^     ^     ^         and n - 1 events a layer
                          |       --- event t1 --/     /     /
                          |               --- event t2 /     /         every problem from the warm start
                          |                     --- event t3 /

    prompt = read_prompt(model, attachment, ids)
    agreement(model, Emulator(attachment, policy, slots=64, demand=demand), prompt, continuation)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.emulator import Emulator
from engine.errors import error
from engine.generate import forced_after, prefill
from engine.log import count
from engine.phase import PhasedHandler
from engine.policies import Policy
from engine.residency import Demand
from engine.trace import Recorder, RouterTrace
from evals.quality import CELL_FAILURES

NOTHING = {"events": 0, "substituted_mass": 0.0, "substitutions": 0, "first_choices_changed": 0}


class _Reader(Recorder, PhasedHandler):
    """The stock experts under a phase, and what they were asked for."""


@dataclass(frozen=True)
class Prompt:
    """An exact prompt: the cache that its pass left, and what its routers chose."""

    cache: Any
    routing: RouterTrace


def read_prompt(model, attachment, ids: Sequence[int]) -> Prompt:
    reader = _Reader(attachment)
    return Prompt(prefill(model, reader, ids).cache, reader.trace())


@torch.inference_mode()
def agreement(model, emulator: Emulator, prompt: Prompt, continuation: Sequence[int]) -> dict[str, int | float]:
    """positions, agreed, common_prefix (positions before the first difference), and counts of what happened.

    The emulator is at its start; the prompt stays as it is. UserError on logits that are not finite.
    """
    emulator.follow(prompt.routing)
    emulator.clear_log()
    same = [torch.empty(0, dtype=torch.bool)]
    for logits, tokens in forced_after(model, emulator, copy.deepcopy(prompt.cache), continuation):
        if not logits.isfinite().all():
            raise error("logits that are not finite", "finite weights", "python -m engine.offload verify FOLDER")
        same.append((logits.argmax(-1) == tokens).cpu())
    agrees = torch.cat(same)  # [positions]
    counts = count(emulator.log()) if len(agrees) else NOTHING
    return {
        "positions": len(agrees),
        "agreed": int(agrees.sum()),
        "common_prefix": int(agrees.cumprod(0).sum()),
        **{name: counts[name] for name in NOTHING},
    }


def agreements(
    model,
    attachment,
    policies: Mapping[str, Policy],
    said: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    *,
    slots: int,
    demand: Demand,
    delay: int,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[dict]:
    """A row a (problem, policy). said: prompt and continuation of every problem. What fails keeps its reason."""
    for problem, (ids, continuation) in said.items():
        prompt = read_prompt(model, attachment, ids)
        for policy in policies.values():
            row = {"policy": policy.id, "problem": problem}
            try:
                emulator = Emulator(attachment, policy, slots=slots, demand=demand, delay=delay)
                row |= {"status": "ok", **agreement(model, emulator, prompt, continuation)}
            except CELL_FAILURES as exc:
                row |= {"status": "failed", "reason": f"{type(exc).__name__}: {' '.join(str(exc).split())}"}
            progress()
            yield row
