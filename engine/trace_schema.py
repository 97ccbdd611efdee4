"""The schema of router traces as files, and everything that a file can have wrong: its header, its arrays.

docs/router_traces.md is the same for those who write one. engine/trace_file.py reads and writes by what stands here.

Axes: T tokens, L layers, E experts, K chosen a token, M scores known of an event. UserError names the file and, of an
array's content, token and layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.errors import error, nearest
from engine.trace import RouterTrace

SCHEMA = "router-trace-1"
EXACT = "exact"  # provenance `policy` of a trace under which every chosen expert ran
# name: weights follow a sigmoid
SCORE_RULES = {
    "probabilities": False,
    "sigmoid": True,
    "sigmoid_biased_logits": True,
    "softmax": False,
    "softmax_groups": False,
}
REQUIRED = ("model", "policy", "score_rule", "text")  # provenance without which a trace says nothing
PAGE = "docs/router_traces.md"
_LARGEST_ID = np.iinfo(np.int16).max
LONGEST_HEADER = 100_000_000  # bytes, as safetensors has it
DTYPES = {"F32": np.dtype("<f4"), "I16": np.dtype("<i2")}
# name: (dtype, axes); float32 first, so that every array is aligned
ARRAYS = {
    "weights": ("F32", "TLK"),
    "chosen_scores": ("F32", "TLK"),
    "scores": ("F32", "TLE"),
    "logits": ("F32", "TLE"),
    "top_scores": ("F32", "TLM"),
    "top_logits": ("F32", "TLM"),
    "losses": ("F32", "T"),
    "chosen": ("I16", "TLK"),
    "top_experts": ("I16", "TLM"),
}


class Document(NamedTuple):
    """Tokens first_token .. first_token + tokens - 1 of the trace."""

    id: str
    first_token: int
    tokens: int


class Place(NamedTuple):
    """Where an array lies in the file, in bytes from its beginning."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Of one token."""
        return self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    @property
    def stop(self) -> int:
        return self.start + self.shape[0] * self.row_bytes


def documents_of(sizes: Iterable[tuple[str, int]]) -> list[Document]:
    """Documents that follow each other, from (id, tokens) of each."""
    documents, first = [], 0
    for name, tokens in sizes:
        documents.append(Document(name, first, tokens))
        first += tokens
    return documents


# ---- the header ------------------------------------------------------------------------------------------------------
def check_header(path: Path, header: object, start: int) -> dict:
    """The fields of TraceFile, from the JSON of a safetensors header. start: of the data, in bytes."""
    places, metadata = _read_places(path, header, start)
    schema = metadata.pop("expertmiss", None)
    if schema != SCHEMA:
        raise error(f"{path}: metadata expertmiss is {schema!r}", f"'{SCHEMA}' ({PAGE})", "give a router trace")
    for name in ("experts", "documents", *REQUIRED):
        if not metadata.get(name):
            raise error(f"{path}: metadata without '{name}'", f"a line for it ({PAGE})", "write it with its provenance")
    if metadata["score_rule"] not in SCORE_RULES:
        known = nearest(metadata["score_rule"], SCORE_RULES)
        raise error(f"{path}: score_rule '{metadata['score_rule']}'", "a known score rule", known)
    experts = metadata.pop("experts")
    if not experts.isdecimal() or not 1 <= int(experts) <= _LARGEST_ID:
        raise error(f"{path}: experts '{experts}'", f"a whole number from 1 to {_LARGEST_ID}", "mend its metadata")
    experts = int(experts)
    sizes = _check_shapes(path, places, experts)
    documents = _read_documents(path, metadata.pop("documents"), sizes["T"])
    return {
        "tokens": sizes["T"],
        "layers": sizes["L"],
        "experts": experts,
        "top_k": sizes["K"],
        "top_m": sizes.get("M", 0),
        "documents": documents,
        "provenance": metadata,
        "places": places,
    }


def _read_places(path: Path, header: object, start: int) -> tuple[dict[str, Place], dict[str, str]]:
    """Arrays and metadata of a safetensors header. UserError on arrays that are unknown or do not tile the data."""
    try:
        metadata = {str(name): str(value) for name, value in header.pop("__metadata__", {}).items()}
        found = {
            name: (e["dtype"], tuple(map(int, e["shape"])), *map(int, e["data_offsets"])) for name, e in header.items()
        }
        ordered = sorted((begin, end) for _, _, begin, end in found.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        raise error(f"{path}: a header that is no safetensors header", "a router trace", "write it again") from None
    if metadata.get("expertmiss") != SCHEMA:
        return {}, metadata  # of a foreign file, that is what to say first
    for name, (dtype, *_) in found.items():
        if name not in ARRAYS:
            raise error(f"{path}: array '{name}'", f"an array of {PAGE}", nearest(name, ARRAYS))
        if dtype != ARRAYS[name][0]:
            raise error(f"{path}: array '{name}' is {dtype}", ARRAYS[name][0], "write it in that type")
    places = {n: Place(DTYPES[dtype], shape, start + begin) for n, (dtype, shape, begin, _) in found.items()}
    tiled = all(end == begin for (_, end), (begin, _) in zip([(0, 0), *ordered], ordered, strict=False))
    sound = all(min(p.shape, default=0) > 0 and p.stop == start + found[name][3] for name, p in places.items())
    if not (tiled and sound):
        raise error(f"{path}: offsets that do not fit the shapes", "a safetensors file", "write it again")
    return places, metadata


def _check_shapes(path: Path, places: dict[str, Place], experts: int) -> dict[str, int]:
    """Length of every axis. UserError: an array is missing, or its shape is not that of the others."""
    needed = ["chosen", "weights", "chosen_scores"]
    if "logits" in places:
        needed.append("scores")
    if {"top_experts", "top_scores", "top_logits"} & places.keys():
        needed += ["top_experts", "top_scores"]
    if missing := [name for name in needed if name not in places]:
        raise error(f"{path}: no array '{missing[0]}'", f"{', '.join(needed)} ({PAGE})", "write it too")
    if "scores" in places and "top_scores" in places:
        raise error(f"{path}: both scores and top_scores", "one of them", "leave the other out")
    sizes = {"E": experts}
    for name in sorted(places, key=lambda name: (needed.index(name) if name in needed else len(needed), name)):
        axes, shape = ARRAYS[name][1], places[name].shape
        if len(shape) != len(axes) or any(sizes.setdefault(a, n) != n for a, n in zip(axes, shape, strict=True)):
            expected = ", ".join(f"{axis} = {sizes[axis]}" if axis in sizes else axis for axis in axes)
            raise error(f"{path}: array '{name}' of shape {list(shape)}", f"[{expected}]", "write it again")
    if not sizes["K"] <= sizes.get("M", experts) <= experts:
        raise error(
            f"{path}: K = {sizes['K']}"
            + (f", M = {sizes['M']}" if "M" in sizes else "")
            + f" of E = {experts} experts",
            "K <= M <= E",
            "check what was recorded",
        )
    return sizes


def _read_documents(path: Path, text: str, tokens: int) -> list[Document]:
    """UserError unless they follow each other without a gap from token 0 to the last."""
    try:
        documents = [Document(str(name), first, size) for name, first, size in json.loads(text)]
        if not all(type(n) is int for d in documents for n in d[1:]):
            raise TypeError
    except (TypeError, ValueError):
        raise error(
            f"{path}: documents '{text[:80]}'", "JSON of [[id, first token, tokens], ...]", "write it so"
        ) from None
    after = 0
    for number, document in enumerate(documents):
        if document.first_token != after or document.tokens < 1:
            raise error(
                f"{path}: document {number} ('{document.id}') of {document.tokens} tokens from token "
                f"{document.first_token}",
                f"at least 1 token, from token {after} (documents follow each other without a gap)",
                "sort them, or cut the trace anew",
            )
        after += document.tokens
    if after != tokens:
        raise error(f"{path}: documents of {after} tokens together", f"the trace's {tokens}", "write all of them")
    return documents


# ---- what the arrays hold --------------------------------------------------------------------------------------------
Faults = Iterable[tuple[np.ndarray, str]]  # (mask [T, L], what is wrong where it is set), asked for one after another


def first_of(faults: Faults) -> tuple[int, int, str] | None:
    """(token of the chunk, layer, what is wrong) of the first event with a fault."""
    for wrong, what in faults:
        if wrong.any():
            token, layer = np.unravel_index(int(wrong.argmax()), wrong.shape)
            return int(token), int(layer), what
    return None


def unusable(chunk: RouterTrace) -> Iterator[tuple[np.ndarray, str]]:
    """Later masks may only be asked for where the earlier ones are clear. A score of -inf is an excluded expert."""
    yield from _unusable_ids(chunk.chosen, chunk.experts, "chosen")
    weights = chunk.weights
    yield (~np.isfinite(weights) | (weights < 0)).any(-1), "a weight that is negative, NaN or infinite"
    yield weights.sum(-1) == 0, "weights that sum to zero"
    if chunk.scores is None:
        yield ~np.isfinite(chunk.chosen_scores).all(-1), "a score of a chosen expert that is NaN or infinite"
    else:
        yield ~(chunk.scores.max(-1) < np.inf), "a score that is NaN or infinite"
        own = np.take_along_axis(chunk.scores, chunk.chosen, axis=-1)
        yield np.isneginf(own).any(-1), f"a chosen expert that is not among the {chunk.top_m or 'possible'} best"
        yield (own != chunk.chosen_scores).any(-1), "chosen_scores that are not the scores of the chosen"
    if chunk.logits is not None:
        yield ~(chunk.logits.max(-1) < np.inf), "a logit that is NaN or infinite"
        own = np.take_along_axis(chunk.logits, chunk.chosen, axis=-1)
        yield np.isneginf(own).any(-1), "a chosen expert without a logit"


def unusable_top(experts, scores, logits, of: int) -> Iterator[tuple[np.ndarray, str]]:
    """experts, scores, logits (or None) [T, L, M] of E = of."""
    yield from _unusable_ids(experts, of, "top_experts")
    for array, name in ((scores, "score"), (logits, "logit")):
        if array is not None:
            yield ~np.isfinite(array).all(-1), f"a {name} that is NaN or infinite"


def _unusable_ids(ids: np.ndarray, experts: int, name: str) -> Iterator[tuple[np.ndarray, str]]:
    ordered = np.sort(ids, axis=-1)
    yield (ordered[..., 0] < 0) | (ordered[..., -1] >= experts), f"{name} with an id outside 0 to {experts - 1}"
    yield (ordered[..., 1:] == ordered[..., :-1]).any(-1), f"{name} with an id twice"
