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
from engine.link import LINKS, Link, Place, limits_of
from engine.readers import Readers

PATIENCE_S = 10  # for what happens within milliseconds unless something is broken
SIZE = 4096


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.0005)


class Gated:
    """A store that logs its reads. shut: experts that wait for `open`; broken: {expert: exception}."""

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
            target[:] = bytes([expert]) * SIZE
            outcome = "end"
        finally:
            with self._lock:
                self.at_once -= 1
                self.log.append((outcome, expert))
        return SIZE

    def open(self, *experts: int) -> None:
        for expert in experts:
            self.gates[expert].set()

    def begun(self, *experts: int) -> None:
        until(lambda: all(("begin", expert) in self.log for expert in experts))


def place(expert: int, arrived=None) -> Place:
    return Place(0, expert, memoryview(bytearray(SIZE)), arrived)


def places(*experts: int) -> list[Place]:
    return [place(expert) for expert in experts]


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


# ---- agreement: the queue of the simulator --------------------------------------------------------------------------
def _fetched(link: Link, missing: list[int], promoted: list) -> int:
    """As the docstring of engine.link says; how many records the fetch brought."""
    queued = [link.withdraw(transfer) for transfer in promoted]
    wanted = [*places(*missing), *(t.place for t, was in zip(promoted, queued, strict=True) if was)]
    link.fetch(wanted)
    for transfer, was in zip(promoted, queued, strict=True):
        if not was:
            transfer.wait()
    return len(wanted)


@pytest.mark.parametrize("seed", range(6))
def test_the_queue_is_the_simulators(seed, aside):
    """Random loads, ends of transfers and events, given to both: the same record in transit, the same queue behind it,
    the same number of records in every fetch."""
    from engine import clock
    from engine.decision import FETCHED, MOVE, PROMOTED

    rng = np.random.default_rng(seed)
    times = clock.Times(0.0, 0.0, 0.0, np.zeros(9), np.zeros(9), 1.0, 1.0, 1.0)
    line = clock.new_line(1, 64)
    store = Gated(shut=range(200))
    pending: dict[int, object] = {}  # expert: transfer that is not resident yet
    fresh = iter(range(200))
    happened = {"load": 0, "end": 0, "event": 0}
    with Link(store) as link:

        def compare():
            transit = line.transit[0]
            in_transit = int(transit["expert"]) if transit["layer"] >= 0 else None
            until(lambda: (link._transit and link._transit.place.expert) == in_transit)
            waiting = line.queue[transit["head"] : transit["tail"]]["expert"].tolist()
            assert [t.place.expert for t in link._queue] == waiting
            if in_transit is not None:
                store.begun(in_transit)

        for _ in range(60):
            step = rng.choice(["load", "load", "end", "event"])
            if step == "load":
                expert = next(fresh)
                pending[expert] = link.issue(place(expert))
                clock._enqueue(line, times, 0, expert, 0)
            elif step == "end" and link._transit:
                transfer = link._transit
                store.open(transfer.place.expert)
                transfer.wait()
                clock._end(line)
                clock._start(line, times)
            elif step == "event":
                missing = [next(fresh) for _ in range(rng.integers(0, 3))]
                chosen = rng.permutation(list(pending))[: rng.integers(0, 3)].tolist()
                moves = np.zeros(len(missing) + len(chosen), MOVE)
                moves["expert"], moves["cause"] = missing + chosen, [FETCHED] * len(missing) + [PROMOTED] * len(chosen)
                transit, before = link._transit, len(link.journal())
                promoted = [pending.pop(expert) for expert in chosen]
                batch = len(missing) + sum(transfer.state == "queued" for transfer in promoted)
                store.open(*missing, *(t.place.expert for t in promoted if t is not transit))
                counts: list[int] = []
                event = aside(lambda m=missing, p=promoted, c=counts: c.append(_fetched(link, m, p)))
                if transit and (batch or transit in promoted):
                    until(lambda n=batch: link._fetching or not n)
                    store.open(transit.place.expert)
                joined(event)
                _seconds, records = clock._wait(line, times, 0, moves, 0, len(moves))
                assert counts == [records]
                assert link.journal()["foreground"][before:].sum() == records
            happened[step] += 1
            compare()
        store.open(*range(200))
    assert min(happened.values()) > 3


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
        transfers = []
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
        for transfer in transfers:
            transfer.wait()
        journal = link.journal()
    assert broken_promises(journal, limits) == []
    assert (len(journal), int(journal["foreground"].sum())) == (27, 18)


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
        def _hold_back(self, begin_s, size):
            super()._hold_back(begin_s, size)
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
