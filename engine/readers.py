"""A bounded pool of readers: how several records are read at once, by the engine's links and by the probe alike.

The calling thread is one of the readers: a single record is read without waking anyone. The others are threads that
wait for a batch, not for a record, and take its items one after another from a shared deque: a record costs no
hand-over, and a reader that is late to wake up finds its share done by the rest.

    with Readers(4) as readers:
        readers.read_all(read, items)       # read(item) for every item, at most four at once; back when all are in
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import Any

from engine.errors import error


class _Batch:
    """Items that nobody has taken yet, and how many helpers are at work on others."""

    def __init__(self, read: Callable[[Any], object], items: Sequence[Any]) -> None:
        self.read, self.items = read, deque(items)
        self.helpers = 0
        self.errors: list[BaseException] = []

    def work(self, caught: type[BaseException]) -> None:
        while True:
            try:
                item = self.items.popleft()  # atomic: no lock a record
            except IndexError:
                return
            try:
                self.read(item)
            except caught as exc:
                self.errors.append(exc)


class Readers:
    """At most `depth` reads at once: the caller's and depth - 1 threads'. Several threads may call at a time."""

    def __init__(self, depth: int, name: str = "reader") -> None:
        if depth < 1:
            raise error(f"{depth} readers", "1 or more", "choose another number")
        self.depth = depth
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._lock = Lock()  # of every batch's `helpers`
        self._idle = Condition(self._lock)
        self._threads = [Thread(target=self._help, name=f"{name}-{n}", daemon=True) for n in range(1, depth)]
        for thread in self._threads:
            thread.start()

    def read_all(
        self, read: Callable[[Any], object], items: Sequence[Any], meanwhile: Callable[[], object] | None = None
    ) -> None:
        """read(item) for all items. Where some raise, the others are read all the same, then the first error is raised.

        meanwhile: what the caller does while the others have begun to read, before it reads too.
        An interrupt of the caller leaves items that were not begun unread, and is raised when no reader is at work any
        more: what they write to may be given back then.
        """
        if len(items) == 1 and not meanwhile:
            read(items[0])
            return
        batch = _Batch(read, items)
        try:
            for _ in range(min(len(items) - (not meanwhile), self.depth - 1)):
                self._batches.put(batch)
            if meanwhile:
                meanwhile()
            batch.work(Exception)
        finally:
            self._settle(batch)
        if batch.errors:
            raise batch.errors[0]

    def _settle(self, batch: _Batch) -> None:
        """Until no helper is at work, however often the caller is interrupted."""
        interrupt = None
        while True:
            try:
                with self._lock:
                    batch.items.clear()
                    while batch.helpers:
                        self._idle.wait()
                break
            except KeyboardInterrupt as exc:
                interrupt = exc
        if interrupt:
            raise interrupt

    def _help(self) -> None:
        while (batch := self._batches.get()) is not None:
            with self._lock:
                if not batch.items:
                    continue
                batch.helpers += 1
            batch.work(BaseException)
            with self._lock:
                batch.helpers -= 1
                if not batch.helpers:
                    self._idle.notify_all()
            del batch  # it holds on to the caller's buffers

    def close(self) -> None:
        """End the threads; nobody may be reading."""
        for _ in self._threads:
            self._batches.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
