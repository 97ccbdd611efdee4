"""Router traces as files: a public schema, written chunk by chunk and checked on reading.

One safetensors file a text, described in docs/router_traces.md (engine/trace_schema.py has the checks): what the router
chose at every token and layer, what it ranked by (all scores, the best M, or none), where documents begin, and where
all this comes from. Neither reader nor writer holds more than one chunk of tokens: arrays are read and written by their
offset, not mapped, so a trace larger than memory is replayed in little of it.

    with trace_writer(path, documents_of([("a", 700), ("b", 300)]), provenance) as writer:
        writer.append(chunk)                        # RouterTrace of the next tokens, of any number
    for chunk in open_trace(path).chunks(2048): ...

Axes: T tokens, L layers, E experts, K chosen a token, M scores known of an event. UserError names the file and, of an
array's content, token and layer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from engine.errors import error
from engine.files import atomic
from engine.policies import SUBSTITUTING, Policy
from engine.trace import RouterTrace
from engine.trace_schema import (
    ARRAYS,
    DTYPES,
    LONGEST_HEADER,
    PAGE,
    SCHEMA,
    SCORE_RULES,
    Document,
    Faults,
    Place,
    check_header,
    first_of,
    unusable,
    unusable_top,
)


# ---- reading ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TraceFile:
    """A trace whose header is read and sound; what the arrays hold is checked as chunks are read."""

    path: Path
    tokens: int  # T
    layers: int  # L
    experts: int  # E
    top_k: int  # K
    top_m: int  # M, 0: there are no scores or all E of them
    documents: list[Document]
    provenance: dict[str, str]
    places: dict[str, Place]

    @property
    def sigmoid(self) -> bool:
        """Weights follow a sigmoid of the logits, not a softmax."""
        return SCORE_RULES[self.provenance["score_rule"]]

    @property
    def has_scores(self) -> bool:
        """Of all experts, or of the best M."""
        return "scores" in self.places or "top_scores" in self.places

    @property
    def has_logits(self) -> bool:
        """Logits behind the weights; under a softmax the scores are the logits."""
        return "logits" in self.places or "top_logits" in self.places or (self.has_scores and not self.sigmoid)

    def chunks(self, tokens: int = 2048, *, scores: bool = True) -> Iterator[RouterTrace]:
        """Consecutive traces of at most `tokens` tokens, which cover the file; one is held at a time.

        scores=False leaves scores and logits unread.
        """
        if tokens < 1:
            raise error(f"chunks of {tokens} tokens", "at least 1", "give another number")
        for first in range(0, self.tokens, tokens):
            yield self.read(first, min(tokens, self.tokens - first), scores=scores)

    def read(self, first: int = 0, tokens: int | None = None, *, scores: bool = True) -> RouterTrace:
        """Tokens from `first` on, to the end unless said; checked."""
        tokens = self.tokens - first if tokens is None else tokens
        names = {"chosen", "weights", "chosen_scores"}
        if scores:
            names |= self.places.keys() - {"losses"}
        arrays = self._rows(names, first, tokens)
        top = {name: arrays.pop(name, None) for name in ("top_experts", "top_scores", "top_logits")}
        if top["top_experts"] is not None:
            self._check(unusable_top(top["top_experts"], top["top_scores"], top["top_logits"], self.experts), first)
            for name in ("scores", "logits"):
                if top[f"top_{name}"] is not None:
                    arrays[name] = np.full((tokens, self.layers, self.experts), -np.inf, np.float32)
                    np.put_along_axis(arrays[name], top["top_experts"].astype(np.int64), top[f"top_{name}"], axis=-1)
        chunk = RouterTrace(**arrays, experts=self.experts, top_m=self.top_m if scores else 0)
        self._check(unusable(chunk), first)
        return chunk

    def losses(self) -> np.ndarray | None:
        """[T] float32, nats, not checked: of losses that are not finite it is for the reader to say what they mean."""
        return self._rows({"losses"}, 0, self.tokens)["losses"] if "losses" in self.places else None

    def _rows(self, names: Iterable[str], first: int, tokens: int) -> dict[str, np.ndarray]:
        arrays = {}
        try:
            with open(self.path, "rb") as file:
                for name in names:
                    place = self.places[name]
                    array = np.empty((tokens, *place.shape[1:]), place.dtype)
                    file.seek(place.start + first * place.row_bytes)
                    if file.readinto(memoryview(array).cast("B")) != array.nbytes:
                        raise error(f"{self.path}: cut within '{name}'", "a whole trace", "copy or record it again")
                    arrays[name] = array
        except OSError as exc:
            raise error(f"{self.path}: {exc.strerror}", "a router trace", "check the path") from None
        return arrays

    def _check(self, faults: Faults, first: int) -> None:
        fault = first_of(faults)
        if fault is not None:
            token, layer, what = fault
            raise error(
                f"{self.path}: token {first + token}, layer {layer}: {what}",
                f"routing as {PAGE} has it",
                "record or convert it again",
            )

    # ---- does it fit -------------------------------------------------------------------------------------------------
    def check_model(
        self,
        *,
        model_hash: str | None = None,
        experts: int | None = None,
        layers: int | None = None,
        top_k: int | None = None,
    ) -> None:
        """Refuse a trace of another model than expected; what is None is not compared."""
        own = {
            "weights": self.provenance.get("model_hash", "not named"),
            "experts": self.experts,
            "layers": self.layers,
            "top-K": self.top_k,
        }
        wanted = dict(zip(own, (model_hash, experts, layers, top_k), strict=True))
        wrong = [name for name, value in wanted.items() if value is not None and value != own[name]]
        if wrong:
            raise error(
                f"{self.path}: a trace of model {self.provenance['model']}, "
                + ", ".join(f"{name} {own[name]}" for name in wrong),
                ", ".join(f"{name} {wanted[name]}" for name in wrong),
                "give this model's own trace, or record it again",
            )

    def check_policy(self, policy: Policy) -> None:
        """Refuse a policy that asks for what was not recorded: a stand-in's score, or the logit of its own weight."""
        if policy.miss_rule not in SUBSTITUTING:
            return
        lacks = None
        if policy.standin == "next_best" and not self.has_scores:
            lacks = "scores", "the scores of all experts, or of the best M"
        elif policy.standin_weight == "own" and not self.has_logits:
            lacks = "logits", "the logits behind the weights"
        elif policy.standin_weight == "own" and policy.standin != "next_best" and self.top_m:
            lacks = f"the logits of any but the best {self.top_m}", "the logits of all experts"
        if lacks is not None:
            raise error(
                f"{self.path}: policy '{policy.id}' (miss rule {policy.miss_rule}, stand-in '{policy.standin}' with "
                f"weight '{policy.standin_weight}') over a trace without {lacks[0]}",
                lacks[1],
                f"record them, or take a policy that never substitutes ({PAGE})",
            )


def open_trace(path: str | Path) -> TraceFile:
    """Read and check the header alone: schema, shapes, documents, provenance, and that the file is whole."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= min(size - 8, LONGEST_HEADER) else b""
        header = json.loads(text)
    except OSError as exc:
        raise error(f"{path}: {exc.strerror}", "a router trace", "check the path") from None
    except ValueError:  # no JSON, or no UTF-8
        raise error(f"{path}: cut, or no safetensors file", "a router trace", "copy or record it again") from None
    trace = TraceFile(path, **check_header(path, header, 8 + length))
    stop = max(place.stop for place in trace.places.values())
    if size != stop:
        raise error(
            f"{path}: {size} bytes, its header tells of {stop}", "a whole trace", "it was cut: copy or record it again"
        )
    return trace


def outside_top_m(executed: np.ndarray, chunk: RouterTrace) -> int:
    """Executed experts [T, L, K] (-1 dropped) whose score was not recorded: each stands in for want of knowledge."""
    if not chunk.top_m:
        return 0
    scores = np.take_along_axis(chunk.scores, np.maximum(executed, 0), axis=-1)
    return int((np.isneginf(scores) & (executed >= 0)).sum())


# ---- writing ---------------------------------------------------------------------------------------------------------
class TraceWriter:
    """Appends chunks to an open file; made by `trace_writer`. The first chunk says which arrays there are."""

    def __init__(
        self,
        path: Path,
        file: BinaryIO,
        documents: Sequence[Document],
        provenance: dict[str, str],
        top_m: int,
        losses: bool,
    ) -> None:
        self._path, self._file = path, file
        self._tokens = sum(tokens for _, _, tokens in documents)
        if self._tokens < 1:
            raise error(f"{path}: documents of {self._tokens} tokens", "at least 1", "give the documents of the trace")
        self._metadata = {"expertmiss": SCHEMA} | {name: str(value) for name, value in provenance.items()}
        self._metadata["documents"] = json.dumps([list(document) for document in documents])
        self._top_m, self._losses = top_m, losses
        self._trace: TraceFile | None = None
        self.written = 0  # tokens so far

    def append(self, chunk: RouterTrace) -> None:
        """The next tokens. UserError names the first event that a reader would refuse."""
        self._refuse(unusable(chunk))
        arrays = {name: getattr(chunk, name) for name in ("chosen", "weights", "chosen_scores", "scores", "logits")}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        if self._top_m or chunk.top_m:
            arrays = _only_top(arrays, self._top_m or chunk.top_m)
            top = map(arrays.get, ("top_experts", "top_scores", "top_logits"))
            self._refuse(unusable_top(*top, chunk.experts))
        if self._trace is None:
            self._begin(chunk.experts, {name: array.shape[1:] for name, array in arrays.items()})
        wanted = {n: p.shape[1:] for n, p in self._trace.places.items() if n != "losses"}
        if {n: a.shape[1:] for n, a in arrays.items()} != wanted or len(chunk.chosen) > self._tokens - self.written:
            raise error(
                f"{self._path}: {len(chunk.chosen)} tokens after {self.written}, arrays {', '.join(arrays)}",
                f"at most {self._tokens - self.written} tokens, arrays and widths as in the first chunk",
                "give documents that cover the trace, and chunks of one kind",
            )
        for name, array in arrays.items():
            self._write(name, self.written, array)
        self.written += len(chunk.chosen)

    def write_losses(self, losses: np.ndarray) -> None:
        """[T] float32, after all chunks. Only of a writer that was told of them."""
        if losses.shape != (self._tokens,):
            raise error(f"{self._path}: {len(losses)} losses", f"{self._tokens}, one a token", "check the text")
        self._write("losses", 0, losses)
        self._losses = False

    def finish(self) -> None:
        """UserError unless everything that the header tells of was written."""
        if self._trace is None or self.written != self._tokens or self._losses:
            raise error(
                f"{self._path}: {self.written} tokens written" + (", no losses" if self._losses else ""),
                f"the {self._tokens} of the documents",
                "append all chunks",
            )

    def _begin(self, experts: int, widths: dict[str, tuple[int, ...]]) -> None:
        """Write the header and make the file as long as it will be."""
        header, begin = {"__metadata__": {**self._metadata, "experts": str(experts)}}, 0
        if self._losses:
            widths |= {"losses": ()}
        for name, (dtype, _) in ARRAYS.items():
            if name in widths:
                shape = (self._tokens, *widths[name])
                stop = Place(DTYPES[dtype], shape, begin).stop
                header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, stop]}
                begin = stop
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._trace = TraceFile(self._path, **check_header(self._path, header, 8 + len(text)))
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(8 + len(text) + begin)

    def _write(self, name: str, first: int, array: np.ndarray) -> None:
        place = self._trace.places[name]
        self._file.seek(place.start + first * place.row_bytes)
        self._file.write(memoryview(np.ascontiguousarray(array, place.dtype)).cast("B"))

    def _refuse(self, faults: Faults) -> None:
        fault = first_of(faults)
        if fault is not None:
            token, layer, what = fault
            raise error(
                f"{self._path}: token {self.written + token}, layer {layer}: {what}",
                f"routing as {PAGE} has it",
                "check the model, or what recorded it",
            )


@contextmanager
def trace_writer(
    path: str | Path,
    documents: Sequence[tuple[str, int, int]],
    provenance: dict[str, str],
    *,
    top_m: int = 0,
    losses: bool = False,
) -> Iterator[TraceWriter]:
    """Write a trace chunk by chunk; the file is there, whole, when the block ends without an error, and else not.

    documents: (id, first token, tokens) in order, which also say how many tokens there will be. top_m: keep the best M
    scores of an event alone; 0 keeps what the chunks have. losses: `write_losses` will be called.
    """
    with atomic(path) as temporary, open(temporary, "wb") as file:
        writer = TraceWriter(Path(path), file, documents, provenance, top_m, losses)
        yield writer
        writer.finish()


def save_trace(
    path: str | Path,
    chunks: RouterTrace | Iterable[RouterTrace],
    documents: Sequence[tuple[str, int, int]],
    provenance: dict[str, str],
    *,
    top_m: int = 0,
    losses: np.ndarray | None = None,
) -> None:
    """Write a whole trace, or one that comes in chunks; as `trace_writer`."""
    with trace_writer(path, documents, provenance, top_m=top_m, losses=losses is not None) as writer:
        for chunk in [chunks] if isinstance(chunks, RouterTrace) else chunks:
            writer.append(chunk)
        if losses is not None:
            writer.write_losses(losses)


def _only_top(arrays: dict[str, np.ndarray], top_m: int) -> dict[str, np.ndarray]:
    """Scores and logits [T, L, E] of the M best alone [T, L, M], by id; the chosen are among them."""
    if "scores" not in arrays:
        raise error("a trace without scores", "scores to take the best of", "record them, or leave top_m out")
    top_k, experts = arrays["chosen"].shape[-1], arrays["scores"].shape[-1]
    if not top_k <= top_m <= experts:
        raise error(f"the best M = {top_m} scores", f"from K = {top_k} to E = {experts}", "choose another M")
    ranked = arrays["scores"].copy()
    np.put_along_axis(ranked, arrays["chosen"].astype(np.int64), np.inf, axis=-1)
    best = np.sort(np.argpartition(ranked, -top_m, axis=-1)[..., -top_m:], axis=-1)
    kept = {name: array for name, array in arrays.items() if name not in ("scores", "logits")}
    kept["top_experts"] = best
    for name in ("scores", "logits"):
        if name in arrays:
            kept[f"top_{name}"] = np.take_along_axis(arrays[name], best, axis=-1)
    return kept
