"""Greedy generation under a miss policy: the prompt is exact prefill, every token after the first is decoding.

with attach(model) as attachment:
    emulator = Emulator(attachment, policy, slots=64, demand=demand)
    for token in generate(model, emulator, prompt_ids, max_new_tokens=64, stop=tokenizer.eos_token_id):
        ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from engine.errors import error
from engine.phase import PhasedHandler


@torch.inference_mode()
def generate(
    model, handler: PhasedHandler, prompt: Sequence[int], *, max_new_tokens: int, stop: int | None = None
) -> Iterator[int]:
    """Yield up to `max_new_tokens` token ids; a yielded `stop` is the last. One sequence, KV cache kept.

    The first new token comes from the prompt's own pass, so n new tokens are n - 1 decoding events a layer.
    """
    if not len(prompt):
        raise error("an empty prompt", "at least one token", "begin with the model's BOS token")
    cache = None
    ids = torch.tensor([list(prompt)], device=model.device)  # [1, T]
    for count in range(max_new_tokens):
        with handler.phase("decode" if count else "prefill"):
            output = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        token = int(output.logits[0, -1].argmax())
        yield token
        if token == stop:
            return
        ids = torch.tensor([[token]], device=model.device)
