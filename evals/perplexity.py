"""How much probability does a model give a text, token by token, under a miss policy?

A document is scored once, every token of it: one beginning-of-sequence token (where the tokenizer has one) is the only
context of the first, and a document longer than the context is cut into windows that follow each other without
overlap, each with the token before it as context. So a document of n tokens makes n events a layer, all decoding.

    [BOS] t1 t2 t3 | t3 t4 t5 t6        context 4: inputs of two windows
     t1   t2 t3 t4 | ...                targets: nothing is scored twice
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import error


@dataclass(frozen=True)
class TokenizedDocument:
    """ids: the document's tokens without BOS. words and bytes are of the document's text, whatever the tokenizer."""

    id: str
    ids: tuple[int, ...]
    words: int
    bytes: int


def tokenize(tokenizer, documents: Sequence[tuple[str, str]]) -> list[TokenizedDocument]:
    """documents: (id, text). UserError on a document without tokens: it has no loss."""
    result = []
    for name, text in documents:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise error(f"document '{name}' has no tokens", "at least one", "leave it out of the text")
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
    before: Callable[[TokenizedDocument], None] | None = None,
    after: Callable[[TokenizedDocument], None] | None = None,
) -> np.ndarray:
    """Negative log-likelihood of every scored token in order, [tokens] float32, nats. One document after another.

    before, after: called around each document (restart a lane, move a progress bar).
    """
    parts = []
    for document in documents:
        if before is not None:
            before(document)
        for inputs, targets in windows(document, context, bos):
            logits = model(input_ids=torch.tensor([inputs], device=model.device), use_cache=False).logits[0]  # [T, V]
            wanted = torch.tensor(targets, device=model.device)
            parts.append(torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none").cpu().numpy())
        if after is not None:
            after(document)
    return np.concatenate(parts)


def scored_tokens(document: TokenizedDocument, bos: int | None) -> int:
    return len(document.ids) - (bos is None)


def perplexities(loss: np.ndarray, documents: Sequence[TokenizedDocument]) -> dict[str, float]:
    """token_, word_ and byte_perplexity: the same summed loss over three denominators."""
    total = float(loss.sum(dtype=np.float64))
    if not np.isfinite(total):
        bad = int((~np.isfinite(loss)).sum())
        raise error(f"{bad} losses are NaN or infinite", "finite losses", "the cell is recorded as failed")
    denominators = {
        "token": len(loss),
        "word": sum(d.words for d in documents),
        "byte": sum(d.bytes for d in documents),
    }
    return {f"{name}_perplexity": float(np.exp(total / count)) for name, count in denominators.items()}
