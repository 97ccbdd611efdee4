"""How long a host takes: the arithmetic on a profile, for whoever adds the parts of a decoding step up.

Every time answers one question, the seconds until `count` things of `bytes` each, begun together, are done, and has one
of three shapes. A thing is a record of a link or an expert of a call.

    Table     measured: linear between rows (bytes) and columns (count), and along the last two beyond them
    Affine    modelled: overhead + count * bytes / rate: latencies overlap, bandwidth is shared
    Throttle  whichever is longer, the link it slows down or its limits as an Affine

`deepest` is the largest count that was measured together, `peak_bytes_per_s` the best rate the shape can show.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import error, nearest


@dataclass(frozen=True)
class Table:
    """seconds[r][c]: until counts[c] things of bytes[r] each are done. Less than bytes[0] costs what bytes[0] does."""

    bytes: tuple[float, ...]
    counts: tuple[float, ...]  # begins with 1
    seconds: tuple[tuple[float, ...], ...]

    def total_s(self, bytes: float, count: float = 1) -> float:
        return _on_line(self.bytes, [_on_line(self.counts, row, count) for row in self.seconds], bytes)

    @property
    def deepest(self) -> float:
        return self.counts[-1]

    @property
    def peak_bytes_per_s(self) -> float:
        rows = zip(self.bytes, self.seconds, strict=True)
        return max(b * c / s for b, row in rows for c, s in zip(self.counts, row, strict=True))


@dataclass(frozen=True)
class Affine:
    overhead_s: float
    bytes_per_s: float

    deepest = math.inf

    def total_s(self, bytes: float, count: float = 1) -> float:
        return self.overhead_s + count * bytes / self.bytes_per_s

    @property
    def peak_bytes_per_s(self) -> float:
        return self.bytes_per_s


@dataclass(frozen=True)
class Throttle:
    base: Table | Affine
    limits: Affine

    def total_s(self, bytes: float, count: float = 1) -> float:
        return max(self.base.total_s(bytes, count), self.limits.total_s(bytes, count))

    @property
    def deepest(self) -> float:
        return self.base.deepest

    @property
    def peak_bytes_per_s(self) -> float:
        return min(self.base.peak_bytes_per_s, self.limits.bytes_per_s)


Time = Table | Affine | Throttle
SDCARD = Affine(0.001, 90_000_000)  # what a memory card of the usual class gives: limits that any faster disk can keep


def _on_line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear: flat before the first point, never falling after the last; a single point is proportional."""
    if x <= xs[0]:
        return ys[0]
    if len(xs) == 1:
        return ys[0] * x / xs[0]
    i = min(bisect.bisect_left(xs, x), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + slope * (x - xs[i - 1]) if x <= xs[i] else ys[i] + max(slope, 0.0) * (x - xs[i])


# ---- a host ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Link:
    """A way an expert comes in. slowdown_*: factors on the times of both while this link and compute run together."""

    name: str
    kind: str  # disk | memory | pcie
    status: str  # measured | throttled | modelled
    time: Time
    limit_bytes_per_s: float  # a record that claims more is an error: page cache
    slowdown_compute: float = 1.0
    slowdown_transfer: float = 1.0

    def transfer_s(self, bytes: float, depth: int = 1) -> float:
        """Seconds a record takes of the link while `depth` are kept in flight; at depth 1 also its latency."""
        depth = min(depth, self.time.deepest)
        return self.time.total_s(bytes, depth) / depth

    def batch_s(self, bytes: float, count: int, depth: int | None = None) -> float:
        """Seconds until `count` records asked for together are here, at most `depth` at once (None: as measured)."""
        if not count:
            return 0.0
        depth = min(count if depth is None else depth, count, self.time.deepest)
        return self.time.total_s(bytes, depth) * count / depth

    def check_observed(self, bytes: float, seconds: float, where: str) -> None:
        """Raise UserError where an observation is faster than the link can be."""
        if bytes > self.limit_bytes_per_s * seconds:
            raise error(
                f"{where}: {bytes / seconds:.3g} bytes/s over link {self.name}",
                f"at most its limit of {self.limit_bytes_per_s:.3g} bytes/s",
                "the page cache answered: read with O_DIRECT",
            )


@dataclass(frozen=True)
class Compute:
    """One device's own times, by dtype. event_s: one decision with the hook around it, whatever the dtype."""

    device: str  # cpu | cuda
    event_s: float
    times: dict[str, dict[str, Time]]  # dtype: {token, layers, experts}
    slots: int  # a layer's slot buffer while the experts were measured
    slot_s: dict[str, float]  # dtype: what a slot more costs a call (the kernels walk over all of them)

    def token_s(self, head_bytes: float, dtype: str) -> float:
        """What a token costs outside its layers, with an output projection of `head_bytes`."""
        return self._time(dtype, "token").total_s(head_bytes)

    def layer_s(self, dense_bytes: float, dtype: str) -> float:
        """A layer without its experts and its decision: norms, attention, router. dense_bytes: weights and KV read."""
        return self._time(dtype, "layers").total_s(dense_bytes)

    def experts_s(self, expert_bytes: float, count: int, dtype: str, slots: int | None = None) -> float:
        """One call that runs `count` experts of `expert_bytes` each for one token, out of a buffer of `slots`."""
        if not count:
            return 0.0
        seconds = self._time(dtype, "experts").total_s(expert_bytes, count)
        return max(seconds + (0 if slots is None else slots - self.slots) * self.slot_s[dtype], 0.5 * seconds)

    def _time(self, dtype: str, part: str) -> Time:
        if dtype not in self.times:
            raise error(f"dtype '{dtype}' on {self.device}", "a dtype of the profile", nearest(dtype, self.times))
        return self.times[dtype][part]


@dataclass(frozen=True)
class Host:
    id: str
    status: str  # measured | modelled
    fingerprint: str
    quick: bool  # a coarse probe: good for trying things out, not for a record
    facts: dict
    compute: dict[str, Compute]
    links: dict[str, Link]
    offload: tuple[str, ...] | None = None  # links behind which experts wait; None: all that lead to the device

    def link(self, name: str) -> Link:
        if name not in self.links:
            raise error(f"link '{name}' of host {self.id}", "a link of its profile", nearest(name, self.links))
        return self.links[name]

    @property
    def device(self) -> Compute:
        """Where the model runs: the GPU where there is one."""
        return self.compute.get("cuda") or self.compute["cpu"]
