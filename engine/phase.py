"""Phases: is a forward pass prefill or decoding, which lane does each row belong to, and which positions are padding?

Every instrument that handles expert calls asks this, and none guesses it from the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import error

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class _Phase:
    kind: str
    lanes: np.ndarray | None  # [B] lane of each sequence of the batch; None: all rows are lane 0, in order
    valid: np.ndarray | None  # [B, T] bool, False is padding: no event


class PhasedHandler:
    """A handler whose caller opens the phase of every forward pass; nothing infers it from T.

    decodes_wide: whether several decoding tokens may come in one pass, as one event after another.
    """

    decodes_wide = False
    _phase: _Phase | None = None

    @contextmanager
    def phase(
        self, kind: str, lanes: Sequence[int] | None = None, valid: torch.Tensor | np.ndarray | None = None
    ) -> Iterator[None]:
        """kind: prefill | decode. lanes [B]: the lane of each sequence; valid [B, T]: False marks padding."""
        if kind not in PHASES:
            raise error(f"phase '{kind}'", " or ".join(PHASES), "open one of them")
        if self._phase is not None:
            raise RuntimeError("a phase is already open")
        mask = None if valid is None else np.asarray(valid.cpu() if isinstance(valid, torch.Tensor) else valid, bool)
        if lanes is not None and (mask is None or mask.ndim != 2 or len(lanes) != len(mask)):
            shape = "no valid mask" if mask is None else f"a valid mask of shape {mask.shape}"
            raise error(f"{len(lanes)} lanes with {shape}", "a lane for each row of valid [B, T]", "pass both")
        self._phase = _Phase(kind, None if lanes is None else np.asarray(lanes), mask)
        try:
            yield
        finally:
            self._phase = None

    def _rows_of_lanes(self, tokens: int) -> list[tuple[int, np.ndarray | slice]]:
        """(lane, rows of the flattened batch in order) for every lane of the open phase."""
        phase = self._phase
        if phase is None:
            raise RuntimeError("the model ran outside a phase")
        if phase.valid is None:
            return [(0, slice(None))]
        if phase.valid.size != tokens:
            raise error(f"a valid mask of {phase.valid.shape}", f"{tokens} tokens", "pass the batch's own mask")
        rows = np.flatnonzero(phase.valid)
        if phase.lanes is None:
            return [(0, rows)]
        lane_of_row = np.repeat(phase.lanes, phase.valid.shape[1])[rows]
        return [(int(lane), rows[lane_of_row == lane]) for lane in np.unique(lane_of_row)]
