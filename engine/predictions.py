"""What a predictor said about a text, as a file: for every token and layer, the experts the next layers will choose.

The pipeline writes one file a (predictor, text); the simulator reads it beside the router trace of that text, chunk by
chunk. Entry (t, l, h - 1) is what anchor layer l of token t says about layer l + h of the same token: ids by falling
claim (probability), -1 with claim 0 where nothing more is said. Ids are int16; claims are float16 in the file, which
keeps their order.

    predictions = Predictions("results/predictions/reference/spec_prefetch/bible_test.safetensors")
    predictions.check(trace)
    for ids, claims in predictions.chunks(2048): ...                    # [t, L, H, N] int32, float64

Axes: T tokens, L layers, H horizons, N names, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from engine.errors import error
from engine.files import atomic
from engine.scheduler import HORIZONS
from engine.trace_file import TraceFile

SCHEMA = "predictions-1"
_DTYPES = {"ids": "I16", "claims": "F16"}


class Predictions:
    """A file whose header is read and sound; what the arrays hold is checked as chunks are read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with safe_open(self.path, framework="numpy") as file:
                facts = json.loads((file.metadata() or {}).get("expertmiss", "{}"))
                arrays = {name: file.get_slice(name) for name in _DTYPES if name in file.keys()}  # noqa: SIM118
                found = {name: (array.get_dtype(), tuple(array.get_shape())) for name, array in arrays.items()}
        except (FileNotFoundError, SafetensorError, ValueError) as exc:
            raise error(f"{self.path}: {exc}", "a whole file of predictions", "predict again") from None
        if not isinstance(facts, dict) or facts.pop("schema", None) != SCHEMA or "experts" not in facts:
            raise error(f"{self.path} holds no predictions", "a file of predict_experts.py", "check the path")
        shape = found.get("ids", ("", ()))[1]
        if found != {name: (dtype, shape) for name, dtype in _DTYPES.items()} or len(shape) != 4 or 0 in shape:
            raise error(f"{self.path}: arrays {found}", "ids I16 and claims F16, [T, L, H, N]", "predict again")
        self.tokens, self.layers, self.horizons, self.names = shape
        self.experts = int(facts["experts"])
        self.provenance: dict[str, str] = facts

    @property
    def predictor(self) -> str:
        return self.provenance["predictor"]

    def check(self, trace: TraceFile) -> None:
        """Refuse predictions of another model or text than the trace's."""
        own = {name: self.provenance.get(name) for name in ("model_hash", "text_sha256")}
        own |= {name: getattr(self, name) for name in ("tokens", "layers", "experts")}
        wanted = {name: trace.provenance.get(name) for name in ("model_hash", "text_sha256")}
        wanted |= {name: getattr(trace, name) for name in ("tokens", "layers", "experts")}
        wrong = [name for name in own if own[name] != wanted[name]]
        if wrong:
            raise error(
                f"{self.path}: predictions for " + ", ".join(f"{name} {own[name]}" for name in wrong),
                ", ".join(f"{name} {wanted[name]}" for name in wrong) + f", as in {trace.path}",
                "predict over this text with this model",
            )

    def chunks(self, tokens: int = 2048) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids [t, L, H, N] int32, claims [t, L, H, N] float64) of at most `tokens` tokens each, which cover the file.

        Chunks of the same `tokens` as a trace's lie beside its own.
        """
        if tokens < 1:
            raise error(f"chunks of {tokens} tokens", "at least 1", "give another number")
        try:
            with safe_open(self.path, framework="numpy") as file:
                arrays = {name: file.get_slice(name) for name in _DTYPES}
                for first in range(0, self.tokens, tokens):
                    ids, claims = (arrays[name][first : min(first + tokens, self.tokens)] for name in _DTYPES)
                    self._refuse(_fault(ids, claims, self.experts), first)
                    yield ids.astype(np.int32), claims.astype(np.float64)
        except (OSError, SafetensorError) as exc:
            raise error(f"{self.path}: {exc}", "a whole file of predictions", "predict again") from None

    def _refuse(self, fault: tuple[np.ndarray, str] | None, first: int) -> None:
        if fault is not None:
            token, layer, *_ = np.argwhere(fault[0])[0]
            found = f"{self.path}: token {first + token}, layer {layer}: {fault[1]}"
            raise error(found, "ids by falling claim, -1 and 0 after the last", "predict again")


def _fault(ids: np.ndarray, claims: np.ndarray, experts: int) -> tuple[np.ndarray, str] | None:
    """(mask [t, L, H], what is wrong where it is set) of the first kind of fault that there is."""
    layer = np.arange(ids.shape[1])[:, None] + np.arange(1, ids.shape[2] + 1)  # [L, H], the target
    ordered = np.sort(ids, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    faults = {
        f"an id outside -1 to {experts - 1}": (ids < -1) | (ids >= experts),
        "an expert of a layer that is not there": (ids >= 0) & (layer >= ids.shape[1])[..., None],
        "an expert after none": (ids[..., 1:] >= 0) & (ids[..., :-1] < 0),
        "an expert twice": twice,
        "a claim that is negative, NaN or infinite": ~(np.isfinite(claims) & (claims >= 0)),
        "a claim for no expert": (claims != 0) & (ids < 0),
        "claims that rise": claims[..., 1:] > claims[..., :-1],
    }
    return next(((mask.any(-1), what) for what, mask in faults.items() if mask.any()), None)


def save_predictions(
    path: str | Path, ids: np.ndarray, claims: np.ndarray, *, experts: int, provenance: dict[str, str]
) -> None:
    """ids, claims [T, L, H, N]. provenance: predictor, model, model_hash, text, text_sha256 and what made them."""
    arrays = {"ids": np.ascontiguousarray(ids, np.int16), "claims": np.ascontiguousarray(claims, np.float16)}
    facts = {name: str(value) for name, value in provenance.items()} | {"schema": SCHEMA, "experts": str(experts)}
    with atomic(path) as temporary:
        save_file(arrays, temporary, metadata={"expertmiss": json.dumps(facts, sort_keys=True)})


def from_trace(chosen: np.ndarray, chosen_scores: np.ndarray, names: int) -> tuple[np.ndarray, np.ndarray]:
    """The oracle: (ids, claims) [T, L, H, N] that name what was chosen in rank order, claim 1. chosen [T, L, K]."""
    order = np.lexsort((chosen, -chosen_scores), axis=-1)  # by score, then lower id
    ranked = np.take_along_axis(chosen, order, axis=-1)[..., :names]
    tokens, layers, known = ranked.shape
    ids = np.full((tokens, layers, HORIZONS, names), -1, np.int16)
    for horizon in range(1, min(HORIZONS, layers - 1) + 1):
        ids[:, : layers - horizon, horizon - 1, :known] = ranked[:, horizon:]
    return ids, (ids >= 0).astype(np.float16)
