"""Would a policy say what the baseline said? The baseline's own continuation forced upon it, position by position.

Free generations part at their first difference and then say little about each other; forced, every position asks the
same question of every policy. The continuation goes on to the end-of-text token or the limit: the stop strings of a
task say how an answer is read, and would leave two tokens of some. The prompt is exact under every policy, so it is
read once; what differs, the residents it leaves behind, is followed from its routing. t1 is said by the prompt's own
pass and so is no position:

    prompt                | t1                   t2    t3    t4        n tokens are n - 1 positions
    exact, read once      | said by the prompt   ^     ^     ^         and n - 1 events a layer
                          |       --- event t1 --/     /     /
                          |               --- event t2 /     /         every problem from the warm start
                          |                     --- event t3 /

    said = continuation(model, attachment, ids, 64)
    prompt = read_prompt(model, attachment, ids)
    agreement(model, Emulator(attachment, policy, slots=64, demand=demand), prompt, said)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.emulator import Emulator
from engine.errors import error
from engine.generate import forced_after, generate, prefill
from engine.log import count
from engine.phase import PhasedHandler
from engine.policies import Policy
from engine.residency import Demand
from engine.trace import Recorder, RouterTrace
from evals.quality import CELL_FAILURES

NOTHING = {"events": 0, "substituted_mass": 0.0, "substitutions": 0, "drops": 0, "first_choices_changed": 0}


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


def continuation(model, attachment, ids: Sequence[int], new_tokens: int) -> list[int]:
    """What the stock model says, and so the baseline: it fetches every miss. The end-of-text token is the last."""
    ends, said = model.generation_config.eos_token_id, []
    for token in generate(model, _Reader(attachment), ids, max_new_tokens=new_tokens):
        said.append(token)
        if token in (ends if isinstance(ends, list) else [ends]):
            break
    return said


@torch.inference_mode()
def agreement(model, emulator: Emulator, prompt: Prompt, said: Sequence[int]) -> dict[str, int | float]:
    """positions, agreed, common_prefix (positions before the first difference), and counts of what happened.

    The emulator is at its start; the prompt stays as it is. UserError on logits that are not finite.
    """
    emulator.follow(prompt.routing)
    emulator.clear_log()
    same = [torch.empty(0, dtype=torch.bool)]
    for logits, tokens in forced_after(model, emulator, copy.deepcopy(prompt.cache), said):
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
    policies: Sequence[Policy],
    prompts: Mapping[str, Sequence[int]],
    *,
    new_tokens: int,
    slots: int,
    demand: Demand,
    delay: int,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[dict]:
    """A row a (problem, policy). prompts: token ids by problem. What fails keeps its reason and lets the rest go on."""
    for problem, ids in prompts.items():
        lost = None
        try:
            said = continuation(model, attachment, ids, new_tokens)
            prompt = read_prompt(model, attachment, ids)
        except CELL_FAILURES as exc:
            lost = failure(exc)
        for policy in policies:
            row = {"policy": policy.id, "problem": problem}
            try:
                if not lost:
                    emulator = Emulator(attachment, policy, slots=slots, demand=demand, delay=delay)
                    row |= {"status": "ok", **agreement(model, emulator, prompt, said)}
            except CELL_FAILURES as exc:
                row |= failure(exc)
            progress()
            yield row | (lost or {})


def failure(exc: BaseException) -> dict[str, str]:
    return {"status": "failed", "reason": f"{type(exc).__name__}: {' '.join(str(exc).split())}"}
