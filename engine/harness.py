"""What does a token take? The timed loop: a text decoded token by token, each token timed by itself.

The timed section is one call of the model, which ends when its output is there. Tokens are the text's own (forced), so
every policy decodes the same ones. Documents follow each other with a fresh KV cache and, for an engine, the slots as
they are. `null` in place of a model times the loop itself.

    timed = decode(model, engine, [[bos, 17, 4], [bos, 9]])
    timed.token_s, timed.stall_s, timed.losses
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.offload_engine import Engine


@dataclass(frozen=True)
class Timed:
    """One policy over the inputs of several documents, T tokens in all; seconds of each, its losses where scored."""

    token_s: np.ndarray  # [T]
    stall_s: np.ndarray  # [T], of it waiting for records
    losses: np.ndarray  # [T] float32, nats, of the token that follows
    starts: np.ndarray  # [documents] int64, where each begins

    @property
    def first_token_s(self) -> np.ndarray:
        """[documents]: of a document's first token, whose caches know nothing of it."""
        return self.token_s[self.starts]


@torch.inference_mode()
def decode(model, engine: Engine, documents: Sequence[Sequence[int]]) -> Timed:
    """documents: token ids of each, beginning with its context token; n ids are n - 1 decoded tokens with a loss."""
    token_s, stall_s, losses, starts = [], [], [], []
    synchronise = torch.cuda.synchronize if model.device.type == "cuda" else _nothing
    for ids in documents:
        starts.append(len(token_s))
        cache = None
        engine.new_sequence()
        for token, target in itertools.pairwise(ids):
            wanted = torch.tensor([[token]], device=model.device)
            stalled = engine.stalled_s
            with engine.phase("decode"):
                synchronise()
                began = time.perf_counter()
                output = model(input_ids=wanted, cache=cache, use_cache=True)
                synchronise()
                token_s.append(time.perf_counter() - began)
            cache = output.past_key_values
            stall_s.append(engine.stalled_s - stalled)
            losses.append(float(-output.logits[0, -1].float().log_softmax(-1)[target]))
    return Timed(np.array(token_s), np.array(stall_s), np.array(losses, np.float32), np.array(starts, np.int64))


def null(tokens: int) -> np.ndarray:
    """[tokens]: seconds that the loop measures where there is nothing between its two looks at the clock but a call."""
    found = np.empty(tokens)
    for t in range(tokens):
        began = time.perf_counter()
        _nothing()
        found[t] = time.perf_counter() - began
    return found


def _nothing() -> None: ...
