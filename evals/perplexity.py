"""How much probability does a model give a text, token by token, under a miss policy?

A document is scored once, every token of it: one beginning-of-sequence token (where the tokenizer has one) is the only
context of the first, and a document longer than the context is cut into windows that follow each other without
overlap, each with the token before it as context. So a document of n tokens makes n events a layer, all decoding.

    [BOS] t1 t2 t3 | t3 t4 t5 t6        context 4: inputs of two windows
     t1   t2 t3 t4 | ...                targets: nothing is scored twice
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import error

_LARGEST_EXPONENT = 709.0  # exp of more is no float64


@dataclass(frozen=True)
class TokenizedDocument:
    """ids: the document's tokens without BOS. words and bytes are of the document's text, whatever the tokenizer."""

    id: str
    ids: tuple[int, ...]
    words: int
    bytes: int


def tokenize(
    tokenizer, documents: Sequence[tuple[str, str]], *, least: int = 1, where: str = "documents"
) -> list[TokenizedDocument]:
    """documents: (id, text). least: tokens a document needs to have a loss, 2 where no BOS is prepended.

    UserError on a document of fewer; `where` opens the message, e.g. the file.
    """
    result = []
    for name, text in documents:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) < least:
            raise error(f"{where}: document '{name}' of {len(ids)} tokens", f"at least {least}", "leave it out")
        result.append(TokenizedDocument(name, tuple(ids), len(text.split()), len(text.encode())))
    return result


def windows(document: TokenizedDocument, context: int, bos: int | None) -> Iterator[tuple[list[int], list[int]]]:
    """(inputs, targets) of equal length <= context, covering every token of the document once.

    Without a BOS token the first token of a document is context only and is not scored.
    """
    ids = list(document.ids)
    whole = ids if bos is None else [bos, *ids]
    for start in range(0, len(whole) - 1, context):
        inputs = whole[start : start + context]
        targets = whole[start + 1 : start + context + 1]
        yield inputs[: len(targets)], targets


def context_of(model, limit: int) -> int:
    """Tokens a window: the configured limit, or the model's own where that is shorter."""
    return min(limit, getattr(model.config.get_text_config(), "max_position_embeddings", limit))


@torch.inference_mode()
def losses(
    model,
    documents: Sequence[TokenizedDocument],
    *,
    context: int,
    bos: int | None,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Negative log-likelihood of every scored token in order, [tokens] float32, nats. One document after another.

    progress: called after every window with the number of tokens it scored.
    """
    parts = []
    for document in documents:
        for inputs, targets in windows(document, context, bos):
            logits = model(input_ids=torch.tensor([inputs], device=model.device), use_cache=False).logits[0]  # [T, V]
            wanted = torch.tensor(targets, device=model.device)
            parts.append(torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none").cpu().numpy())
            if progress is not None:
                progress(len(targets))
    return np.concatenate(parts)


def scored_tokens(document: TokenizedDocument, bos: int | None) -> int:
    return len(document.ids) - (bos is None)


def finite(loss: np.ndarray) -> np.ndarray:
    """The losses, all of which are numbers. UserError where some are not: they fail their cell, whoever scored it."""
    if bad := int((~np.isfinite(loss)).sum()):
        raise error(f"{bad} losses are NaN or infinite", "finite losses", "the cell is recorded as failed")
    return loss


def perplexities(loss: np.ndarray, documents: Sequence[TokenizedDocument]) -> dict[str, float | None]:
    """token_, word_ and byte_perplexity: the same summed loss over three denominators.

    None where there is none: no words, or so few (a script without spaces) that the number exceeds float64.
    """
    total = float(finite(loss).sum(dtype=np.float64))
    denominators = {
        "token": len(loss),
        "word": sum(d.words for d in documents),
        "byte": sum(d.bytes for d in documents),
    }
    return {f"{name}_perplexity": perplexity(total, count) for name, count in denominators.items()}


def perplexity(nll: float, count: int) -> float | None:
    """exp(nll / count), None where it is not a number. nll: summed loss in nats."""
    return math.exp(nll / count) if count and nll / count < _LARGEST_EXPONENT else None
