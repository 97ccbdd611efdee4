"""Token by token under a miss policy: greedy generation, and a given continuation forced.

The prompt is exact prefill and its own pass gives the first new token; every token after that is decoding. So n new
tokens, generated or forced, are n - 1 decoding events a layer.

with attach(model) as attachment:
    emulator = Emulator(attachment, policy, slots=64, demand=demand)
    for token in generate(model, emulator, prompt_ids, max_new_tokens=64, stop=tokenizer.eos_token_id):
        ...
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch

from engine.errors import error
from engine.phase import PhasedHandler

_WIDE = 128  # forced tokens a pass where the handler can: bounds the logits that are held


@torch.inference_mode()
def generate(
    model, handler: PhasedHandler, prompt: Sequence[int], *, max_new_tokens: int, stop: int | None = None
) -> Iterator[int]:
    """Yield up to `max_new_tokens` token ids; a yielded `stop` is the last. UserError on NaN. KV cache kept."""
    output = _prefill(model, handler, prompt)
    for left in reversed(range(max_new_tokens)):
        logits = output.logits[0, -1]
        token = logits.argmax()  # of a NaN where there is one
        if not logits[token].isfinite():
            found = "logits that are NaN or infinite"
            raise error(found, "finite weights", "find the weight: python -m engine.offload verify FOLDER")
        yield int(token)
        if int(token) == stop or not left:
            return
        output = _decode(model, handler, token[None, None], output.cache)


@torch.inference_mode()
def forced(
    model, handler: PhasedHandler, prompt: Sequence[int], continuation: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (logits [n, V], tokens [n]) until all of `continuation` is through, whatever the model would have said.

    The logits are those that each token is judged by. A state that is no KV cache (linear attention, state space)
    takes single tokens: in some families (Jamba) several at once forget it.
    """
    wanted = torch.tensor([list(continuation)], device=model.device)  # [1, T]
    output = _prefill(model, handler, prompt)
    yield output.logits[0, -1:], wanted[0, :1]
    step = _WIDE if handler.decodes_wide and not model._is_stateful else 1
    for start in range(0, len(continuation) - 1, step):
        stop = min(start + step, len(continuation) - 1)
        output = _decode(model, handler, wanted[:, start:stop], output.cache)
        yield output.logits[0], wanted[0, start + 1 : stop + 1]


def _prefill(model, handler: PhasedHandler, prompt: Sequence[int]):
    """The prompt's pass; where the model can it makes the last position's logits alone, V numbers and not T x V."""
    if not len(prompt):
        raise error("an empty prompt", "at least one token", "begin with the model's BOS token")
    ids = torch.tensor([list(prompt)], device=model.device)  # [1, T]
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with handler.phase("prefill"):
        return model(input_ids=ids, use_cache=True, **keep)


def _decode(model, handler: PhasedHandler, ids: torch.Tensor, cache):
    """ids [1, T] after what the cache holds."""
    with handler.phase("decode"):
        return model(input_ids=ids, cache=cache, use_cache=True)
