"""What each part of a token costs on one host, over one link, with one model's sizes: numbers the simulator adds up.

    timing = Timing.of(host, "pcie", geometry, slots=64)

A token takes token_s + the sum over layers of [layer_s + event_s + experts_s[executed] + waiting]. n experts fetched
together take fetch_s[n]; the background loads one record after another, each background_s.

Which links count (`offload_links`): those that bring an expert to where the model runs. On a CPU host these are the
disks and RAM itself. On a GPU host they are `pcie` (experts in pinned RAM) and the disks: from there a record passes
the disk and then the fastest `pcie`, as in a line of two machines that works on two records at once:

    fetch_s[n] = max(disk[n] + pcie[1], disk[1] + pcie[n])          background_s = disk[1] + pcie[1]

What a scheduler may count on (`window`): from the end of an event's fetches to the next layer's routing a token
computes its experts and the next layer; a record passes in as many pieces as bring the most bytes through that window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.errors import error, nearest
from engine.geometry import Geometry
from engine.host_times import Host, Link
from engine.scheduler import HORIZONS, Window

PAGE = 4096  # pieces are read past the page cache
PIECES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def offload_links(host: Host) -> tuple[dict[str, Link], dict[str, str]]:
    """The links of a profile that are simulated, and why each of the others is not."""
    simulated: dict[str, Link] = {}
    skipped: dict[str, str] = {}
    on_gpu = "cuda" in host.compute
    has_pcie = any(link.kind == "pcie" for link in host.links.values())
    for name, link in host.links.items():
        if host.offload is not None and name not in host.offload:
            skipped[name] = "experts do not wait behind it, as the profile says (offload)"
        elif on_gpu and link.kind == "memory":
            skipped[name] = "copies RAM to RAM: no way onto the GPU"
        elif on_gpu and link.kind == "disk" and not has_pcie:
            skipped[name] = "no pcie link in the profile to bring what it reads to the GPU"
        elif not on_gpu and link.kind == "pcie":
            skipped[name] = "leads to a GPU, and the model runs on the CPU"
        else:
            simulated[name] = link
    return simulated, skipped


@dataclass(frozen=True)
class Timing:
    """Seconds of one (host, link, model, slots); experts_s and fetch_s are indexed by a number of experts, 0 to K."""

    host: str
    link: str
    slots: int
    expert_bytes: int
    token_s: float
    layer_s: float
    event_s: float
    experts_s: tuple[float, ...]
    fetch_s: tuple[float, ...]
    background_s: float
    bandwidth_bytes_per_s: float  # the best this way can show, for the ceiling
    slowdown_compute: float = 1.0
    slowdown_transfer: float = 1.0
    pieces_s: tuple[tuple[int, float], ...] = ((1, math.inf),)  # pieces of a record, and what one of them takes
    predict_s: tuple[tuple[str, float], ...] = ()  # by predictor, what it takes of a layer

    @classmethod
    def of(cls, host: Host, link: str, geometry: Geometry, slots: int, *, context_tokens: int = 0) -> Timing:
        """context_tokens: keys and values of so many tokens are read by every layer. UserError: no such link."""
        simulated, skipped = offload_links(host)
        if link in skipped:
            raise error(f"link '{link}' of host {host.id} {skipped[link]}", f"one of {', '.join(simulated)}", "take it")
        if link not in simulated:
            raise error(f"link '{link}' of host {host.id}", "a link of its profile", nearest(link, simulated))
        way, onward = simulated[link], _onward(host, simulated[link])
        size, dtype, compute = geometry.expert_bytes, geometry.dtype, host.device
        fetch_s = tuple(_fetch_s(way, onward, size, n) for n in range(geometry.top_k + 1))
        background_s = way.transfer_s(size) + (onward.transfer_s(size) if onward else 0.0)
        peak = min(x.time.peak_bytes_per_s for x in (way, onward) if x)
        record_s = min(background_s, *(s / n for n, s in enumerate(fetch_s) if n))
        return cls(
            host=host.id,
            link=link,
            slots=slots,
            expert_bytes=size,
            token_s=compute.token_s(geometry.head_bytes, dtype),
            layer_s=compute.layer_s(geometry.dense_bytes + context_tokens * geometry.kv_bytes, dtype),
            event_s=compute.event_s,
            experts_s=tuple(compute.experts_s(size, n, dtype, slots) for n in range(geometry.top_k + 1)),
            fetch_s=fetch_s,
            background_s=background_s,
            bandwidth_bytes_per_s=max(peak, size / record_s if record_s else math.inf),
            slowdown_compute=way.slowdown_compute,
            slowdown_transfer=way.slowdown_transfer,
            pieces_s=tuple((n, _piece_s(way, onward, size, n)) for n in PIECES if n == 1 or size >= n * PAGE),
            predict_s=tuple(
                (kind, compute.experts_s(bytes, 1, dtype)) for kind, bytes in geometry.predictor_bytes.items()
            ),
        )

    def window(self, schedule: str) -> Window:
        """For the scheduler, under one of engine.policies.SCHEDULES."""
        part_s = (self.experts_s[-1] + self.layer_s) * self.slowdown_compute
        between_s = (self.event_s + self.predictor_s("spec_prefetch")) * self.slowdown_compute
        window_s = np.array([h * part_s + (h - 1) * between_s for h in range(1, HORIZONS + 1)])
        pieces, piece_s = self.pieces_s[0]
        if schedule == "pieces":
            window_s[:] = part_s  # whatever layer a piece is for, the next one to route may need the link
            pieces, piece_s = max(self.pieces_s, key=lambda piece: self._passing(piece, part_s))
        return Window(
            window_s=window_s,
            piece_s=piece_s * self.slowdown_transfer,
            pieces=pieces,
            names=len(self.fetch_s) - 1,
            bounded=schedule != "always",
            saved_s=self.fetch_s[1] / pieces,
            cost_s=piece_s * self.slowdown_transfer * (1.0 - 1.0 / self.slowdown_compute),
        )

    def _passing(self, piece: tuple[int, float], window_s: float) -> tuple[float, int]:
        """How much of records passes in a window in so many pieces; of equals fewer pieces are better."""
        pieces, piece_s = piece
        return int(window_s / (piece_s * self.slowdown_transfer)) / pieces, -pieces

    def predictor_s(self, kind: str) -> float:
        return dict(self.predict_s).get(kind, 0.0)


def limit_bytes_per_s(host: Host, link: str) -> float:
    """What no record can be faster than on the way from this link to where the model runs."""
    simulated, _ = offload_links(host)
    way, onward = simulated[link], _onward(host, simulated[link])
    return min(x.limit_bytes_per_s for x in (way, onward) if x)


def _piece_s(way: Link, onward: Link | None, bytes: int, pieces: int) -> float:
    """One of so many equal pieces of a record, asked for alone."""
    part = math.ceil(bytes / pieces / PAGE) * PAGE
    return way.transfer_s(part) + (onward.transfer_s(part) if onward else 0.0)


def _onward(host: Host, way: Link) -> Link | None:
    """The second link of a record that comes from disk to a GPU."""
    if way.kind != "disk" or host.device.device != "cuda":
        return None
    return max((x for x in host.links.values() if x.kind == "pcie"), key=lambda x: x.time.peak_bytes_per_s)


def _fetch_s(way: Link, onward: Link | None, bytes: int, count: int) -> float:
    if onward is None or not count:
        return way.batch_s(bytes, count)
    return max(
        way.batch_s(bytes, count) + onward.batch_s(bytes, 1), way.batch_s(bytes, 1) + onward.batch_s(bytes, count)
    )
