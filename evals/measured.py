"""What a measured host decodes: the beginnings of documents, and where their events lie in the recorded routing.

parts = passages(text, bos, documents=4, tokens=32)
decode(model, engine, [part.ids for part in parts])
trace.read(part.rows.start, len(part.rows))                    # the same tokens in the router trace of the text
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import error
from evals.corpora import cluster
from evals.quality import Text


@dataclass(frozen=True)
class Passage:
    """The beginning of a document. rows: of its events in the recorded trace of the whole text."""

    document: str
    ids: tuple[int, ...]  # the context token, then those that are scored
    rows: range


def passages(text: Text, bos: int | None, *, documents: int, tokens: int) -> list[Passage]:
    """The first documents of different clusters that are long enough, each cut after `tokens` scored tokens.

    UserError where there is none. A document's first tokens are the start of a window of the trace, so both have the
    same context, as long as `tokens` is no more than a window's.
    """
    found, seen, first = [], set(), 0
    for document, scored in zip(text.documents, text.scored, strict=True):
        name = cluster(document.id)
        if scored >= tokens and name not in seen and len(found) < documents:
            seen.add(name)
            whole = document.ids if bos is None else (bos, *document.ids)
            found.append(Passage(document.id, tuple(whole[: tokens + 1]), range(first, first + tokens)))
        first += scored
    if not found:
        raise error(f"no document of {text.id} has {tokens} tokens", "one at least", "lower the tokens of `measure`")
    return found
