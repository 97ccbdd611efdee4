"""Links and readers. Laws: what is needed now before what will be needed later, one background record at a time, errors
that hurt nothing else, throttles that are never early. Agreement: the queue is the simulator's. No test asserts a time:
orders come from a store whose reads wait to be told, and a throttle only promises lower bounds.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from engine.errors import UserError, error
from engine.host_times import SDCARD, Affine, Throttle
from engine.host_times import Link as ProfileLink
from engine.link import LINKS, Link, Place, Prefetch, limits_of
from engine.readers import Readers

PATIENCE_S = 10  # for what happens within milliseconds unless something is broken
SIZE = 4096  # of a record that comes whole, and of a piece
PIECES = 3  # of one that comes in pieces


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.0005)


class Gated:
    """A store that logs its reads. shut: experts that wait for `open`; broken: {expert: exception}.

    A piece of an expert is (expert, number) in all of them.
    """

    def __init__(self, *, shut=(), broken=None) -> None:
        self.gates = {expert: threading.Event() for expert in shut}
        self.broken = broken or {}
        self.log: list[tuple[str, int]] = []  # (begin | end | fail, expert)
        self.threads: list[int] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def read(self, layer: int, expert: int, target: memoryview) -> int:
        with self._lock:
            self.log.append(("begin", expert))
            self.threads.append(threading.get_ident())
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        outcome = "fail"
        try:
            if expert in self.gates:
                assert self.gates[expert].wait(PATIENCE_S), f"nobody opened {expert}"
            if expert in self.broken:
                raise self.broken[expert]
            target[:] = bytes([expert if isinstance(expert, int) else 0]) * SIZE
            outcome = "end"
        finally:
            with self._lock:
                self.at_once -= 1
                self.log.append((outcome, expert))
        return SIZE

    def read_part(self, layer: int, expert: int, target: memoryview, first: int) -> int:
        size = self.read(layer, (expert, first // SIZE), memoryview(bytearray(SIZE)))
        target[:] = bytes([expert % 256]) * SIZE
        return size

    def open(self, *experts: int) -> None:
        for expert in experts:
            self.gates[expert].set()

    def begun(self, *experts: int) -> None:
        until(lambda: all(("begin", expert) in self.log for expert in experts))


def place(expert: int, arrived=None) -> Place:
    return Place(0, expert, memoryview(bytearray(SIZE)), arrived)


def places(*experts: int) -> list[Place]:
    return [place(expert) for expert in experts]


def ahead(expert: int, arrived=None) -> Prefetch:
    """A record that is to come in pieces, one after another in one buffer."""
    record = memoryview(bytearray(PIECES * SIZE))
    pieces = [Place(0, expert, record[n * SIZE : (n + 1) * SIZE], arrived, n * SIZE) for n in range(PIECES)]
    return Prefetch(0, expert, PIECES, pieces.__getitem__)


def pieces_from(prefetch: Prefetch, first: int = 0) -> list[Place]:
    """Where its pieces from the first on go."""
    return [prefetch.place(n) for n in range(first, PIECES)]


def holds(*wanted: Place) -> bool:
    return all(bytes(one.target) == bytes([one.expert]) * SIZE for one in wanted)


@pytest.fixture
def aside():
    """aside(function, *arguments) runs it in a thread; the thread, joined at the end; its exception is raised there."""
    started = []

    def begin(function, *arguments):
        def run():
            try:
                function(*arguments)
            except BaseException as exc:
                failures.append(exc)

        failures: list[BaseException] = []
        thread = threading.Thread(target=run)
        thread.failures = failures
        thread.start()
        started.append(thread)
        return thread

    yield begin
    for thread in started:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def joined(thread) -> None:
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and not thread.failures


# ---- foreground -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("readers", [1, 2, 8])
def test_a_fetch_brings_all_and_tells_each_when_its_bytes_are_there(readers, count):
    told = []
    wanted = [place(e, lambda e=e: told.append((e, holds(wanted[e])))) for e in range(count)]
    store = Gated()
    with Link(store, readers=readers) as link:
        link.fetch(wanted)
        assert sorted(told) == [(e, True) for e in range(count)] and holds(*wanted)
        assert sorted(store.log) == sorted((what, e) for e in range(count) for what in ("begin", "end"))
        assert store.most_at_once <= readers


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_as_many_records_are_read_at_once_as_there_are_readers(readers, aside):
    experts = range(2 * readers)
    store = Gated(shut=experts)
    with Link(store, readers=readers) as link:
        fetch = aside(link.fetch, places(*experts))
        until(lambda: store.at_once == readers)
        store.open(*experts)
        joined(fetch)
    assert store.most_at_once == readers


def test_a_single_record_is_read_by_the_caller():
    store = Gated()
    with Link(store) as link:
        for expert in range(3):
            link.fetch(places(expert))
    assert set(store.threads) == {threading.get_ident()}


def test_several_threads_may_fetch_at_once(aside):
    store, wanted = Gated(), [places(*range(n, n + 20)) for n in range(4)]
    with Link(store, readers=3) as link:
        for fetch in [aside(link.fetch, some) for some in wanted]:
            joined(fetch)
        assert all(holds(*some) for some in wanted) and len(link.journal()) == 80


# ---- background -----------------------------------------------------------------------------------------------------
def test_background_records_pass_one_at_a_time_first_in_first_out():
    store = Gated(shut=[3])
    with Link(store) as link:
        transfers = [link.issue(place(e)) for e in (3, 1, 4, 2)]
        store.begun(3)
        assert [t.state for t in transfers] == ["in_transit", "queued", "queued", "queued"]
        store.open(3)
        for transfer in transfers:
            transfer.wait()
        assert [t.state for t in transfers] == ["done"] * 4 and holds(*(t.place for t in transfers))
    assert store.log == [(what, e) for e in (3, 1, 4, 2) for what in ("begin", "end")]


def test_a_fetch_waits_for_the_record_in_transit_and_goes_before_the_queued_ones(aside):
    store = Gated(shut=[0, 10])
    with Link(store) as link:
        transfers = [link.issue(place(e)) for e in (0, 1)]
        store.begun(0)
        fetch = aside(link.fetch, places(10, 11, 12))
        until(lambda: link._fetching)
        time.sleep(0.02)  # one that does not wait has begun by now
        assert store.log == [("begin", 0)]
        store.open(0)
        transfers[0].wait()
        store.begun(10)
        assert transfers[1].state == "queued"
        store.open(10)
        joined(fetch)
        transfers[1].wait()
    order = [e for what, e in store.log if what == "begin"]
    assert store.log[:2] == [("begin", 0), ("end", 0)] and store.log[-2:] == [("begin", 1), ("end", 1)]
    assert sorted(order[1:4]) == [10, 11, 12]


def test_nothing_starts_in_the_background_while_a_fetch_runs(aside):
    store = Gated(shut=[10, 11])
    with Link(store, readers=1) as link:
        fetch = aside(link.fetch, places(10, 11))
        store.begun(10)
        transfer = link.issue(place(0))
        store.open(10)
        store.begun(11)
        assert transfer.state == "queued"
        store.open(11)
        joined(fetch)
        transfer.wait()
    assert store.log == [(what, e) for e in (10, 11, 0) for what in ("begin", "end")]


def test_a_transfer_can_be_withdrawn_while_it_is_queued_and_only_then():
    broken = {3: OSError(errno.EIO, "gone")}
    store = Gated(shut=[0], broken=broken)
    with Link(store) as link:
        transit, queued, last, failing = (link.issue(place(e)) for e in range(4))
        store.begun(0)
        assert not link.withdraw(transit)
        assert link.withdraw(queued) and queued.state == "withdrawn" and not link.withdraw(queued)
        with pytest.raises(RuntimeError, match="withdrawn"):
            queued.wait()
        store.open(0)
        last.wait()
        assert (transit.state, last.state) == ("done", "done")
        until(lambda: failing.state == "failed")
        assert not any(link.withdraw(transfer) for transfer in (transit, last, failing))
        link.fetch([queued.place])  # needed now: fetched with the others
        assert holds(queued.place)
    assert [e for what, e in store.log if what == "begin"] == [0, 2, 3, 1]


# ---- prefetch -------------------------------------------------------------------------------------------------------
def test_pieces_pass_in_the_order_of_the_agenda_and_no_more_than_are_granted():
    store = Gated()
    with Link(store) as link:
        first, second, third = (ahead(e) for e in (1, 2, 3))
        link.schedule([(second, 2), (third, 0), (first, 9)])
        until(lambda: first.whole)
        assert (second.here, second.whole, third.here) == (2, False, 0)
        assert holds(*pieces_from(first))
        link.schedule([(third, 1), (second, 5)])
        until(lambda: second.whole)
        assert third.here == 1
        assert [e for what, e in store.log if what == "begin"] == [
            *((2, n) for n in range(2)),
            *((1, n) for n in range(3)),
            (3, 0),
            (2, 2),
        ]
        journal = link.journal()
        assert journal["prefetch"].all() and not journal["foreground"].any() and (journal["bytes"] == SIZE).all()


def test_a_new_agenda_replaces_the_former_and_the_piece_in_flight_ends():
    store = Gated(shut=[(1, 0)])
    with Link(store) as link:
        former, latter = ahead(1), ahead(2)
        link.schedule([(former, 3)])
        store.begun((1, 0))
        link.schedule([(latter, 1)])
        store.open((1, 0))
        until(lambda: latter.here == 1)
        assert (former.here, former.begun) == (1, 1)
        link.schedule([])
    assert len(link.journal()) == 2


def test_a_fetch_waits_for_the_piece_in_flight_and_for_no_other(aside):
    store = Gated(shut=[(1, 0), 10])
    with Link(store) as link:
        coming = ahead(1)
        load = link.issue(place(20))
        load.wait()
        link.schedule([(coming, 3)])
        store.begun((1, 0))
        fetch = aside(link.fetch, places(10, 11))
        until(lambda: link._fetching)
        time.sleep(0.02)  # one that does not wait has begun by now
        assert store.log[2:] == [("begin", (1, 0))]
        store.open((1, 0))
        store.begun(10)
        assert coming.begun == 1
        store.open(10)
        joined(fetch)
        until(lambda: coming.whole)
    order = [e for what, e in store.log[2:] if what == "begin"]
    assert order[0] == (1, 0) and sorted(order[1:3]) == [10, 11] and order[3:] == [(1, 1), (1, 2)]


def test_prefetches_go_before_background_loads_which_are_not_broken_off():
    store = Gated(shut=[0])
    with Link(store) as link:
        loads = [link.issue(place(e)) for e in (0, 1)]
        store.begun(0)
        coming = ahead(5)
        link.schedule([(coming, 2)])
        store.open(0)
        loads[1].wait()
    assert [e for what, e in store.log if what == "begin"] == [0, (5, 0), (5, 1), 1]


def test_what_is_lacking_of_a_halted_record_is_fetched_with_the_others(aside):
    store = Gated(shut=[(1, 1)])
    with Link(store) as link:
        coming = ahead(1)
        link.schedule([(coming, 3)])
        store.begun((1, 1))
        link.halt(coming)
        settled = aside(link.settle, coming)
        time.sleep(0.02)
        assert settled.is_alive() and coming.here == 1
        store.open((1, 1))
        joined(settled)
        assert (coming.here, coming.begun) == (2, 2)
        link.fetch([*pieces_from(coming, coming.here), place(9)])
        assert holds(*pieces_from(coming)) and link.journal()["foreground"].tolist() == [False, False, True, True]
    link.close()


def test_a_failed_piece_ends_its_record_and_no_other():
    store, told = Gated(broken={(1, 1): _broken("device")}), []
    with Link(store) as link:
        failing, other = ahead(1, lambda: told.append(1)), ahead(2, lambda: told.append(2))
        link.schedule([(failing, 3), (other, 3)])
        until(lambda: other.whole)
        assert isinstance(failing.error, UserError) and (failing.here, failing.begun) == (1, 2)
        link.schedule([(failing, 3)])
        link.fetch(places(9))
        assert told == [1, 2, 2, 2] and failing.begun == 2
        assert link.journal()["bytes"].tolist() == [SIZE] * 5


def test_a_link_that_closes_ends_the_piece_in_flight_and_begins_no_other(aside):
    store = Gated(shut=[(1, 0)])
    link, coming = Link(store), ahead(1)
    link.schedule([(coming, 3)])
    store.begun((1, 0))
    closing = aside(link.close)
    until(lambda: link._closed)
    store.open((1, 0))
    joined(closing)
    assert (coming.here, coming.begun) == (1, 1)
    with pytest.raises(RuntimeError, match="closed"):
        link.schedule([(coming, 1)])


# ---- agreement: the queue of the simulator --------------------------------------------------------------------------
def _fetched(link: Link, missing: list[int], promoted: list, coming: list[Prefetch]) -> float:
    """As the docstring of engine.link says; how many records the fetch brought, of those in pieces what was lacking."""
    with link.hold():
        queued = [link.withdraw(transfer) for transfer in promoted]
        wanted = [*places(*missing), *(t.place for t, was in zip(promoted, queued, strict=True) if was)]
        for prefetch in coming:
            link.settle(prefetch)
        lacking = [part for prefetch in coming for part in pieces_from(prefetch, prefetch.here)]
        link.fetch([*wanted, *lacking])
        for transfer, was in zip(promoted, queued, strict=True):
            if not was:
                transfer.wait()
    return len(wanted) + len(lacking) / PIECES


class _Beside:
    """The simulator's line beside a link, given the same: what is in transit and waits must be the same too."""

    def __init__(self, link: Link, store: Gated) -> None:
        from engine import clock

        self.clock, self.link, self.store = clock, link, store
        self.times = clock.Times(0.0, 0.0, 0.0, np.zeros(99), np.zeros(99), 1.0, 0.0, 1.0, 1.0, 1.0)
        self.line, self.totals = clock.new_line(1, 64), clock.new_totals(1)
        self.coming: list[Prefetch | None] = [None] * len(self.line.entries)

    def load(self, expert: int):
        self.clock._enqueue(self.line, self.times, self.totals, 0, expert, 0)
        return self.link.issue(place(expert))

    def end(self) -> None:
        self.store.open(self.in_transit())
        self.clock._end(self.line)
        self.start()

    def start(self) -> None:
        self.clock._start(self.line, self.times, self.totals)

    def plan(self, rng, fresh) -> None:
        """Some rows are given to others, and some pieces granted, in an order of their own."""
        order = rng.permutation(len(self.coming)).tolist()
        for i, entry in enumerate(self.line.entries):
            if rng.random() < 0.1 or self.coming[i] is None:
                self.coming[i] = ahead(next(fresh))
                entry["layer"], entry["expert"], entry["left"] = 0, self.coming[i].expert, PIECES
            entry["order"], entry["granted"] = order[i], rng.choice([0, entry["left"]])
        granted = self.line.entries["granted"].tolist()
        self.clock._disown(self.line)
        self.link.schedule([(self.coming[i], granted[i]) for i in np.argsort(order)])
        self.start()

    def wait(self, moves: np.ndarray) -> float:
        """The simulator's event; returns the records that it fetched."""
        _seconds, records = self.clock._wait(self.line, self.times, self.totals, PIECES, 0, moves, 0, len(moves))
        self.clock._release(self.line, 0)
        self.coming = [None] * len(self.coming)
        self.start()
        return records

    def in_transit(self):
        """What the link carries, as its store calls it."""
        with self.link._lock:
            job = self.link._transit
            if job is None:
                return None
            return (job.expert, job.begun - 1) if isinstance(job, Prefetch) else job.place.expert

    def compare(self) -> None:
        transit = self.line.transit[0]
        expert = int(transit["expert"]) if transit["layer"] >= 0 else None
        in_pieces = transit["entry"] != self.clock.BACKGROUND

        def state():
            found = self.in_transit()
            own = (found[0] if isinstance(found, tuple) else found, isinstance(found, tuple))
            return own, [coming and (PIECES - coming.begun, coming.granted) for coming in self.coming]

        entries = zip(self.line.entries, self.coming, strict=True)
        wanted = [coming and (int(entry["left"]), int(entry["granted"])) for entry, coming in entries]
        until(lambda: state() == ((expert, expert is not None and bool(in_pieces)), wanted))
        waiting = self.line.queue[transit["head"] : transit["tail"]]["expert"].tolist()
        assert [t.place.expert for t in self.link._queue] == waiting
        if expert is not None:
            self.store.begun(self.in_transit())


@pytest.mark.parametrize("seed", range(6))
def test_the_queue_is_the_simulators(seed, aside):
    """Random loads, plans, ends of transfers and events, given to both: the same record or piece in transit, the same
    queue behind it, as many pieces left and granted, the same number of records in every fetch."""
    from engine.decision import FETCHED, MOVE, PROMOTED, TAKEN

    rng = np.random.default_rng(seed)
    experts, parts = range(200), range(200, 1000)
    store = Gated(shut=[*experts, *((e, n) for e in parts for n in range(PIECES))])
    pending: dict[int, object] = {}  # expert: transfer that is not resident yet
    fresh, fresh_parts = iter(experts), iter(parts)
    happened = {"load": 0, "end": 0, "plan": 0, "event": 0, "taken": 0, "taken in part": 0}
    with Link(store) as link:
        beside = _Beside(link, store)
        for _ in range(300):
            step = rng.choice(["load", "end", "end", "end", "end", "end", "plan", "plan", "event"])
            if step == "load":
                expert = next(fresh)
                pending[expert] = beside.load(expert)
            elif step == "end" and link._transit:
                beside.end()
            elif step == "plan":
                beside.plan(rng, fresh_parts)
            elif step == "event":
                missing = [next(fresh) for _ in range(rng.integers(0, 3))]
                chosen = rng.permutation(list(pending))[: rng.integers(0, 3)].tolist()
                known = [p for p in beside.coming if p]
                coming = [known[i] for i in rng.permutation(len(known))[: rng.integers(0, 5)]]
                for prefetch in known:
                    link.halt(prefetch)
                causes = [TAKEN if prefetch.whole else FETCHED for prefetch in coming]
                happened["taken"] += causes.count(TAKEN)
                happened["taken in part"] += sum(0 < prefetch.begun < PIECES for prefetch in coming)
                moves = np.zeros(len(missing) + len(chosen) + len(coming), MOVE)
                moves["expert"] = missing + chosen + [prefetch.expert for prefetch in coming]
                moves["cause"] = [FETCHED] * len(missing) + [PROMOTED] * len(chosen) + causes
                transit, before = link._transit, len(link.journal())
                promoted = [pending.pop(expert) for expert in chosen]
                waits = missing or transit in promoted or FETCHED in causes
                waits = waits or any(transfer.state == "queued" for transfer in promoted)
                store.open(*missing, *(t.place.expert for t in promoted if t is not transit))
                store.open(*((p.expert, n) for p in coming for n in range(p.begun, PIECES)))
                counts: list[float] = []
                event = aside(lambda m=missing, p=promoted, q=coming, c=counts: c.append(_fetched(link, m, p, q)))
                if transit and waits:
                    until(lambda: link._fetching)
                    store.open(beside.in_transit())
                joined(event)
                lacking = link.journal()["foreground"][before:].sum()
                records = beside.wait(moves)
                assert counts == [pytest.approx(records)] and lacking >= records
            happened[step] += 1
            beside.compare()
        store.open(*experts, *((e, n) for e in parts for n in range(PIECES)))
    assert min(happened.values()) > 1


# ---- faults ---------------------------------------------------------------------------------------------------------
def _broken(kind: str):
    return {
        "device": OSError(errno.EIO, os.strerror(errno.EIO)),
        "store": error("bytes that are not there", "a record", "pack it again"),
    }[kind]


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_read_error_names_the_expert_and_the_other_records_come_in(readers, at):
    store, told = Gated(broken={at: _broken("device")}), []
    wanted = [place(e, lambda e=e: told.append(e)) for e in range(5)]
    with Link(store, readers=readers) as link:
        with pytest.raises(UserError, match=rf"layer 0, expert {at}: Input/output error; expected a device"):
            link.fetch(wanted)
        others = [e for e in range(5) if e != at]
        assert sorted(told) == others and holds(*(wanted[e] for e in others))
        assert len(link.journal()) == 4
        store.broken.clear()
        link.fetch(wanted)  # the pool is alive, and so is the background
        transfer = link.issue(place(9))
        transfer.wait()
        assert holds(*wanted, transfer.place)


def test_an_error_of_the_store_is_raised_as_it_is():
    broken = _broken("store")
    with Link(Gated(broken={1: broken})) as link, pytest.raises(UserError) as caught:
        link.fetch(places(0, 1))
    assert caught.value is broken


def test_an_error_when_told_is_an_error_of_the_record():
    def refuse():
        raise RuntimeError("no room on the device")

    with Link(Gated()) as link:
        with pytest.raises(RuntimeError, match="no room"):
            link.fetch([place(0, refuse), *places(1, 2)])
        transfer = link.issue(place(3, refuse))
        with pytest.raises(RuntimeError, match="no room"):
            transfer.wait()
        assert transfer.state == "failed"


@pytest.mark.parametrize("kind", ["device", "store"])
def test_a_failed_background_load_is_reported_and_its_bytes_do_not_count(kind):
    store, told = Gated(broken={1: _broken(kind)}), []
    with Link(store) as link:
        first, failing, last = (link.issue(place(e, lambda e=e: told.append(e))) for e in range(3))
        last.wait()
        for _ in range(2):
            with pytest.raises(UserError):
                failing.wait()
        assert [t.state for t in (first, failing, last)] == ["done", "failed", "done"]
        assert isinstance(failing.error, UserError) and told == [0, 2]
        assert link.journal()["bytes"].tolist() == [SIZE, SIZE]
        link.fetch(places(5))
        assert len(link.journal()) == 3


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_an_interrupted_fetch_returns_when_no_reader_writes_any_more(readers):
    """Ctrl-C reaches the caller in its own read; the others are still writing, and no further record is begun."""
    interrupted = threading.Event()
    caller = threading.get_ident()

    class Interrupted(Gated):
        def read(self, layer, expert, target):
            try:
                return super().read(layer, expert, target)
            except KeyboardInterrupt:
                interrupted.set()
                raise

    experts = range(3 * readers)
    store = Interrupted(shut=experts)

    def interrupt():
        try:
            until(lambda: store.at_once == readers)
            signal.pthread_kill(caller, signal.SIGINT)
            assert interrupted.wait(PATIENCE_S)
            if readers > 1:
                until(lambda: link._readers._idle._waiters)  # the caller waits for the others: once more
                signal.pthread_kill(caller, signal.SIGINT)
                time.sleep(0.02)  # a fetch that does not wait is over by now
        finally:
            store.open(*experts)

    with Link(store, readers=readers) as link:
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                link.fetch(places(*experts))
        finally:
            at_work, begun = store.at_once, sum(what == "begin" for what, _ in store.log)
            thread.join()
        assert (at_work, begun) == (0, readers)
        link.fetch(places(0, 1))  # and the link is as good as before


# ---- the throttle ---------------------------------------------------------------------------------------------------
def broken_promises(journal: np.ndarray, limits: Affine) -> list[tuple[float, float]]:
    """Windows from a begin to an end in which more bytes began and ended than the limits allow."""
    found = []
    for begin in journal["begin_s"]:
        for end in journal["end_s"]:
            inside = (journal["begin_s"] >= begin) & (journal["end_s"] <= end)
            seconds = end - begin - limits.overhead_s
            if inside.any() and journal["bytes"][inside].sum() > limits.bytes_per_s * seconds + 1:  # a byte: rounding
                found.append((float(begin), float(end)))
    return found


@pytest.mark.parametrize(
    "limits", [Affine(0.003, 1e7), Affine(0.0, 4e6), Affine(0.002, 1e12)], ids=["both", "bandwidth", "latency"]
)
@pytest.mark.parametrize("readers", [1, 4])
def test_a_throttled_link_is_never_faster_than_its_limits(limits, readers):
    with Link(Gated(), readers=readers, limits=limits) as link:
        transfers, coming = [], []
        for count in (1, 5, 12):
            before = len(link.journal())
            began_s = time.perf_counter()
            link.fetch(places(*range(count)))
            took_s = time.perf_counter() - began_s
            rows = link.journal()[before:]
            rows = rows[rows["foreground"]]
            assert len(rows) == count and took_s >= limits.total_s(SIZE, count)
            assert np.ptp(rows["begin_s"]) == 0  # asked for together
            assert rows["end_s"].max() - rows["begin_s"].min() >= limits.total_s(SIZE, count) - 1e-9
            transfers += [link.issue(place(e)) for e in range(3)]
            coming.append(ahead(count))
            link.schedule([(coming[-1], 2)])
        for transfer in transfers:
            transfer.wait()
        until(lambda: coming[-1].here == 2)
        journal = link.journal()
    assert broken_promises(journal, limits) == []
    pieces = sum(prefetch.here for prefetch in coming)
    assert pieces >= 2 and int(journal["prefetch"].sum()) == pieces
    assert (len(journal) - pieces, int(journal["foreground"].sum())) == (27, 18)


def test_the_law_sees_a_link_that_breaks_it():
    with Link(Gated()) as link:
        link.fetch(places(*range(5)))
        assert broken_promises(link.journal(), Affine(1.0, 1e12))
        assert broken_promises(link.journal(), Affine(0.0, 1.0))


def test_a_slow_store_is_not_held_back_further():
    """Whichever is longer, the store or the limits: a record that took longer than its turn goes straight on."""
    store = Gated(shut=[0])
    held = []

    class Watched(Link):
        def _hold_back(self, begin_s, size, limits):
            super()._hold_back(begin_s, size, limits)
            held.append((self._free_at_s - begin_s, time.perf_counter() - begin_s))

    with Watched(store, limits=Affine(0.001, 1e9)) as link:
        transfer = link.issue(place(0))
        store.begun(0)
        time.sleep(0.02)
        store.open(0)
        transfer.wait()
    (date_s, now_s), *others = held
    assert date_s == pytest.approx(0.001 + SIZE / 1e9) and now_s >= 0.02 and not others


def test_limits_come_from_a_profile_or_from_the_links_every_host_has():
    base = Affine(0.0, 1e9)
    assert limits_of(ProfileLink("disk", "disk", "measured", base, 1e9)) is None
    assert limits_of(ProfileLink("sdcard", "disk", "throttled", Throttle(base, SDCARD), 9e7)) == SDCARD
    assert LINKS == {"disk": None, "sdcard": Affine(0.001, 90e6)}


# ---- the journal and the end ----------------------------------------------------------------------------------------
def test_the_journal_has_every_record_until_it_is_cleared():
    start_s = time.perf_counter()
    with Link(Gated()) as link:
        link.fetch(places(1, 2, 3))
        link.issue(place(4)).wait()
        journal = link.journal()
        assert journal["bytes"].tolist() == [SIZE] * 4 and journal["foreground"].tolist() == [True] * 3 + [False]
        assert (journal["begin_s"] <= journal["end_s"]).all()
        assert start_s <= journal["begin_s"].min() and journal["end_s"].max() <= time.perf_counter()
        link.clear()
        assert len(link.journal()) == 0 and len(journal) == 4
        link.fetch(places(5))
        assert link.journal()["begin_s"][0] >= journal["end_s"].max()


def test_no_thread_outlives_its_link_and_nothing_waits_for_it_in_vain(aside):
    before = set(threading.enumerate())
    store = Gated(shut=[0])
    link = Link(store, readers=5)
    link.fetch(places(7, 8))
    transit, queued = link.issue(place(0)), link.issue(place(1))
    store.begun(0)
    raised = []

    def wait():
        with pytest.raises(RuntimeError, match="never arrives"):
            queued.wait()
        raised.append(True)

    waiting = aside(wait)
    closing = aside(link.close)
    joined(waiting)
    assert closing.is_alive() and transit.state == "in_transit" and raised
    store.open(0)
    joined(closing)
    assert (transit.state, queued.state) == ("done", "withdrawn") and holds(transit.place)
    assert set(threading.enumerate()) - before <= {waiting, closing}
    for use in (lambda: link.fetch(places(1)), lambda: link.issue(place(1))):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    link.close()


@pytest.mark.parametrize("depth", [0, -1])
def test_a_pool_without_readers_is_refused(depth):
    with pytest.raises(UserError, match=rf"{depth} readers; expected 1 or more"):
        Readers(depth)


def test_readers_go_on_after_a_helper_failed():
    def read(item):
        if item % 2:
            raise SystemExit(item)  # even what would end a thread

    with Readers(4) as readers:
        for _ in range(20):
            seen = []
            readers.read_all(seen.append, range(30))
            assert sorted(seen) == list(range(30))
            with pytest.raises((SystemExit, ValueError)):
                readers.read_all(read, range(8))
