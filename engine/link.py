"""The way that records come in: what is needed now before what will be needed later, as slow as the link is said to be.

The queue is that of the simulator (engine/clock.py, docs/simulator.md):

* Foreground: `fetch` brings all records of an event, several at once, and blocks. It first waits for what is in
  transit, a piece or a background record; no transfer is broken off.
* Prefetch: `schedule` says of which records how many pieces may start, in this order, until it is called again. One
  passes at a time, and none starts while a fetch runs or waits.
* Background: `issue` queues a record. Queued ones pass whole, one at a time, first in first out, and none starts
  while a fetch runs or waits or a piece may pass.
* A queued expert that is needed now leaves the queue and is fetched with the others; one in transit is waited for:

    with link.hold():
        promoted = [link.withdraw(transfer) for transfer in wanted]       # True: it was queued, fetch it
        link.fetch([*missing, *(t.place for t, queued in zip(wanted, promoted) if queued)])
        for transfer, queued in zip(wanted, promoted): queued or transfer.wait()

What of a prefetched record has not come when it is needed is a place of its own in the fetch, from its first byte on:

    link.halt(prefetch)                         # once its layer has routed, no further piece starts
    with link.hold():
        link.settle(prefetch)                   # waits for one in transit
        link.fetch([*missing, rest])            # rest: the record from piece prefetch.here on

A throttled link holds records back in the reader that brought them: n records begun together are in no sooner than
latency + n * bytes / bandwidth after they began (engine.host_times.Affine), and a piece counts as a small record;
latencies overlap, and all share the bandwidth through one date at which the link is free. It can only be late, never
early, and the journal, which has a row a record or piece, shows it: of all that began at B or later, at most
bandwidth * (E - B - latency) bytes have ended by E.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, Lock, Thread

import numpy as np

from engine import host_times
from engine.host_times import SDCARD, Affine, Throttle
from engine.readers import Readers
from engine.record import Store, read_record

READERS = 8  # as deep as the probe measures a disk, so that the simulator's times are of as many reads in flight
LINKS: dict[str, Affine | None] = {"disk": None, "sdcard": SDCARD}  # limits of the links that every host has
JOURNAL = np.dtype(
    [("begin_s", "f8"), ("end_s", "f8"), ("bytes", "i8"), ("foreground", "?"), ("prefetch", "?")]
)  # neither foreground nor prefetch: background
_entry = struct.Struct("=ddq??").pack  # one row of JOURNAL
_WATCHED_S = 1e-4  # before a date; time.sleep is 0.05 to 0.1 ms late, by the kernel's timer slack and the waking


def limits_of(link: host_times.Link) -> Affine | None:
    """What a host profile's link is throttled to; None: as fast as it is."""
    return link.time.limits if isinstance(link.time, Throttle) else None


@dataclass(frozen=True)
class Place:
    """Where an expert goes. arrived: called by the reader when `target` [record_bytes] holds it.

    first: of a part, which is as long as the target, the byte of the record where it begins; None: the whole record.
    """

    layer: int
    expert: int
    target: memoryview
    arrived: Callable[[], None] | None = None
    first: int | None = None


class Transfer:
    """One background record. state: queued | in_transit | done | failed | withdrawn."""

    def __init__(self, place: Place, turn: Condition) -> None:
        """turn: of its link."""
        self.place, self.state, self._turn = place, "queued", turn
        self.error: BaseException | None = None

    def begin(self) -> Place:
        self.state = "in_transit"
        return self.place

    def end(self, error: BaseException | None) -> None:
        self.state, self.error = "failed" if error else "done", error

    def wait(self) -> None:
        """Until it is done; raises what it failed with."""
        with self._turn:
            while self.state in ("queued", "in_transit"):
                self._turn.wait()
        if self.error:
            raise self.error
        if self.state != "done":
            raise RuntimeError("a transfer that was withdrawn, or whose link was closed, never arrives")


class Prefetch:
    """One record that comes in pieces before it is needed: the first `here` are in, of `begun` that have started.

    error: of a piece that failed; no further one starts.
    """

    def __init__(self, layer: int, expert: int, pieces: int, place: Callable[[int], Place]) -> None:
        """place(n): where the n-th piece goes; together they cover the record."""
        self.layer, self.expert, self.pieces, self.place = layer, expert, pieces, place
        self.begun = self.here = self.granted = 0
        self.error: BaseException | None = None

    @property
    def whole(self) -> bool:
        return self.here == self.pieces

    def begin(self) -> Place:
        self.granted, self.begun = self.granted - 1, self.begun + 1
        return self.place(self.begun - 1)

    def end(self, error: BaseException | None) -> None:
        if error:
            self.error, self.granted = error, 0
        else:
            self.here += 1


class Link:
    """Carries records from a store to where they are told. One lane fetches; the store stays open after `close`."""

    def __init__(
        self, store: Store, *, readers: int = READERS, limits: Affine | None = None, name: str = "disk"
    ) -> None:
        """readers: records of one fetch that are read at once. limits: None is as fast as the store."""
        self.store, self.limits, self.name = store, limits, name
        self._readers = Readers(readers, name)
        self._lock = Lock()  # guards the five below
        self._turn = Condition(self._lock)
        self._queue: deque[Transfer] = deque()
        self._agenda: deque[Prefetch] = deque()
        self._transit: Transfer | Prefetch | None = None
        self._fetching: set[object] = set()
        self._closed = False
        self._booking = Lock()
        self._free_at_s = 0.0  # when the throttled link has passed all that it was given
        self._journal = bytearray()  # rows of JOURNAL
        self._carrier = Thread(target=self._carry, name=f"{name}-background", daemon=True)
        self._carrier.start()

    # ---- foreground --------------------------------------------------------------------------------------------------
    def fetch(self, places: Sequence[Place], meanwhile: Callable[[], object] | None = None) -> None:
        """Bring all of them; back when they are in. meanwhile: what the caller does while others read.

        Raises UserError where one could not be read, after the others are in; what its target holds is undefined.
        """
        if not places:
            return
        with self.hold():
            with self._lock:
                while self._transit:
                    self._turn.wait()
            begin_s = time.perf_counter()
            self._readers.read_all(lambda place: self._bring(place, begin_s, foreground=True), places, meanwhile)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Nothing starts in the background: of an event that looks at what is under way before it fetches."""
        mark = object()
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError("the link is closed")
                self._fetching.add(mark)
            yield
        finally:
            with self._lock:
                self._fetching.discard(mark)
                if self._queue or self._agenda:
                    self._turn.notify_all()

    # ---- prefetch ----------------------------------------------------------------------------------------------------
    def schedule(self, agenda: Sequence[tuple[Prefetch, int]]) -> None:
        """From now on so many more pieces of these may start, in this order; of all others none."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the link is closed")
            for prefetch in self._agenda:
                prefetch.granted = 0
            for prefetch, pieces in agenda:
                prefetch.granted = 0 if prefetch.error else min(pieces, prefetch.pieces - prefetch.begun)
            self._agenda = deque(prefetch for prefetch, _ in agenda if prefetch.granted > 0)
            if self._agenda:
                self._turn.notify_all()

    def halt(self, prefetch: Prefetch) -> None:
        """No further piece of it starts."""
        with self._lock:
            prefetch.granted = 0

    def settle(self, prefetch: Prefetch) -> None:
        """Back when no piece of it is in transit."""
        with self._lock:
            while self._transit is prefetch:
                self._turn.wait()

    # ---- background --------------------------------------------------------------------------------------------------
    def issue(self, place: Place) -> Transfer:
        """Queue a record; back at once. Its target is the link's until the transfer is done, failed or withdrawn."""
        transfer = Transfer(place, self._turn)
        with self._lock:
            if self._closed:
                raise RuntimeError("the link is closed")
            self._queue.append(transfer)
            self._turn.notify_all()
        return transfer

    def withdraw(self, transfer: Transfer) -> bool:
        """Take a transfer off the queue; False where it has started, then it can only be waited for."""
        with self._lock:
            if transfer.state != "queued":
                return False
            self._queue.remove(transfer)
            transfer.state = "withdrawn"
            return True

    def _carry(self) -> None:
        """The background thread."""
        while True:
            with self._lock:
                while not self._closed and (self._fetching or not self._next()):
                    self._turn.wait()
                if self._closed:
                    return
                job = self._transit = self._next()
                prefetch = isinstance(job, Prefetch)
                if not prefetch:
                    self._queue.popleft()
                place, failed = job.begin(), None
            try:
                self._bring(place, time.perf_counter(), prefetch=prefetch)
            except BaseException as exc:  # whoever waits for it is told
                failed = exc
            with self._lock:
                job.end(failed)
                self._transit = None
                self._turn.notify_all()
            del job, place, failed  # they hold on to its target

    def _next(self) -> Prefetch | Transfer | None:
        """What the background thread carries next: of the first prefetch that may pass one a piece, else a record."""
        while self._agenda and self._agenda[0].granted <= 0:
            self._agenda.popleft()
        return self._agenda[0] if self._agenda else self._queue[0] if self._queue else None

    # ---- one record or piece -----------------------------------------------------------------------------------------
    def _bring(self, place: Place, begin_s: float, *, foreground: bool = False, prefetch: bool = False) -> None:
        """begin_s: when the link was asked, the same for all records of a fetch."""
        size = read_record(self.store, place.layer, place.expert, place.target, place.first)
        if limits := self.limits:  # once: `restart` lifts them while a piece may be held back
            self._hold_back(begin_s, size, limits)
        if place.arrived:
            place.arrived()  # a record is in when it is all the way in
        self._journal.extend(_entry(begin_s, time.perf_counter(), size, foreground, prefetch))  # atomic

    def _hold_back(self, begin_s: float, size: int, limits: Affine) -> None:
        with self._booking:
            start_s = max(self._free_at_s, begin_s + limits.overhead_s)
            date_s = self._free_at_s = start_s + size / limits.bytes_per_s
        if (left_s := date_s - time.perf_counter()) > _WATCHED_S:
            time.sleep(left_s - _WATCHED_S)  # without the GIL
        while time.perf_counter() < date_s:
            pass  # with it, but shorter than a wake-up

    # ---- journal and end ---------------------------------------------------------------------------------------------
    def journal(self) -> np.ndarray:
        """Every record and piece that came in since the last `clear`, rows of JOURNAL."""
        return np.frombuffer(bytes(self._journal), JOURNAL)

    def clear(self) -> None:
        self._journal.clear()

    def close(self) -> None:
        """Wait for what is in transit, withdraw the queued records, forget the agenda, end all threads."""
        with self._lock:
            self._closed = True
            for transfer in self._queue:
                transfer.state = "withdrawn"
            self._queue.clear()
            self._agenda.clear()
            self._turn.notify_all()
        self._carrier.join()
        self._readers.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
