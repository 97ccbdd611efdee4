"""Documents of different topics, one after another: what a miss policy meets where the topic changes again and again.

    texts = [cut(text, 320, tokenizer, bos) for text in texts]     # the beginning of every document
    for number, document in in_turn(texts): ...                    # the first of every text, the second of every text

Losses and counts are kept text by text and document by document all the same (`evals.quality`): the stream is an order.
The tokens since the change of topic are a token's place in its document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from evals.perplexity import TokenizedDocument, scored_tokens
from evals.quality import Text


def cut(text: Text, tokens: int, tokenizer, bos: int | None) -> Text:
    """The text with every document cut after its first `tokens` scored tokens; another text, so another sha256."""
    documents = tuple(_cut(document, tokens + (bos is None), tokenizer) for document in text.documents)
    digest = hashlib.sha256(f"{text.sha256} first {tokens} tokens of every document".encode()).hexdigest()
    scored = tuple(scored_tokens(document, bos) for document in documents)
    return replace(text, sha256=digest, documents=documents, scored=scored)


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
