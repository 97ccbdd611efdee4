"""Documents of different topics, one after another: what a miss policy meets where the topic changes again and again.

    texts = [cut(text, 320, tokenizer, bos) for text in texts]     # the beginning of every document
    for number, document in in_turn(texts): ...                    # the first of every text, the second of every text
    rows = cells(policy, texts, ..., run=text_by_text(texts, run), ...)    # one run over all of them

Losses and counts are kept text by text and document by document all the same (`evals.quality`): the stream is an order.
The tokens since the change of topic are a token's place in its document, as long as texts of two topics are left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from engine.log import STEP, DecisionLog
from evals.perplexity import TokenizedDocument, scored_tokens
from evals.quality import CELL_FAILURES, Text


def cut(text: Text, tokens: int, tokenizer, bos: int | None) -> Text:
    """The text with every document cut after its first `tokens` scored tokens; another text, so another sha256."""
    documents = tuple(_cut(document, tokens + (bos is None), tokenizer) for document in text.documents)
    digest = hashlib.sha256(f"{text.sha256} first {tokens} tokens of every document".encode()).hexdigest()
    scored = tuple(scored_tokens(document, bos) for document in documents)
    return replace(text, sha256=digest, documents=documents, scored=scored)


def beginnings(sizes: Sequence[int], tokens: int) -> np.ndarray:
    """Places, in a whole text, of the first `tokens` of every document; sizes: tokens of the documents, or of parts."""
    ends = np.cumsum(sizes)
    return np.concatenate([np.arange(end - n, end - n + min(n, tokens)) for end, n in zip(ends, sizes, strict=True)])


def _cut(document: TokenizedDocument, tokens: int, tokenizer) -> TokenizedDocument:
    if len(document.ids) <= tokens:
        return document
    ids = document.ids[:tokens]
    words = tokenizer.decode(ids)
    return TokenizedDocument(document.id, ids, len(words.split()), len(words.encode()))


def in_turn(texts: Sequence[Text]) -> Iterator[tuple[int, TokenizedDocument]]:
    """(number of its text, document): round after round, until the longest text has no more."""
    for turn in range(max(len(text.documents) for text in texts)):
        for number, text in enumerate(texts):
            if turn < len(text.documents):
                yield number, text.documents[turn]


def joined(texts: Sequence[Text]) -> tuple[Text, np.ndarray]:
    """The documents of all texts in turn as one text, and the number of the text [T] that every token of it is of."""
    order = list(in_turn(texts))
    sizes = [iter(text.scored) for text in texts]
    scored = tuple(next(sizes[number]) for number, _ in order)
    digest = hashlib.sha256(" ".join(text.sha256 for text in texts).encode()).hexdigest()
    stream = Text("in_turn", "all", digest, tuple(document for _, document in order), scored)
    return stream, np.repeat([number for number, _ in order], scored)


def part_of(loss: np.ndarray, log: DecisionLog, rows: np.ndarray) -> tuple[np.ndarray, DecisionLog]:
    """Losses and decisions of some tokens of one run from its start; rows: their places, rising. Steps are theirs."""
    moves = log.moves[np.isin(log.moves[:, STEP], rows)]
    moves[:, STEP] = np.searchsorted(rows, moves[:, STEP])
    arrays = {name: getattr(log, name)[rows] for name in ("executed", "weights", "kind", "first", "g")}
    return loss[rows], replace(log, **arrays, moves=moves)


def text_by_text(
    texts: Sequence[Text], run: Callable[[Text, int], tuple[np.ndarray, DecisionLog]]
) -> Callable[[Text, int], tuple[np.ndarray, DecisionLog]]:
    """One run of the stream at every slot budget, as `evals.quality.cells` asks for it, a text at a time.

    run(stream, slots): its losses and decisions. What it raises is raised for every text; its time is the first one's.
    """
    stream, owner = joined(texts)
    numbers = {text.id: number for number, text in enumerate(texts)}
    done: dict[int, tuple[np.ndarray, DecisionLog] | Exception] = {}

    def of_text(text: Text, slots: int) -> tuple[np.ndarray, DecisionLog]:
        if slots not in done:
            try:
                done[slots] = run(stream, slots)
            except CELL_FAILURES as exc:
                done[slots] = exc
        if isinstance(done[slots], Exception):
            raise done[slots]
        return part_of(*done[slots], np.flatnonzero(owner == numbers[text.id]))

    return of_text
