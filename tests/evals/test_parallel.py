"""Laws of work side by side: the same results in the same order, failures at their place, no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from engine.errors import UserError, error
from evals.jobs import Progress
from evals.parallel import ahead

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="no fork beside torch here: the work is done in turn")


def work_of(number: int) -> tuple[int, int]:
    return number**2, os.getpid()


def fail(number: int) -> int:
    raise error(f"piece {number}", "another", "mend it")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_law_results_are_those_of_the_work_in_turn(threads):
    work = [partial(work_of, number) for number in range(7)]
    with ahead(work, threads) as results:
        found = [result() for result in results]
    assert [square for square, _ in found] == [number**2 for number in range(7)]
    here = {pid == os.getpid() for _, pid in found}
    assert here == {sys.platform != "linux" or threads == 1}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failure_is_raised_where_its_result_is_asked_for_and_the_rest_goes_on(processes):
    with ahead([partial(work_of, 2), partial(fail, 1), partial(work_of, 3)], processes) as results:
        assert results[0]()[0] == 4
        with pytest.raises(UserError, match="piece 1; expected another; mend it"):
            results[1]()
        assert results[2]()[0] == 9


@needs_fork
def test_a_process_that_is_killed_fails_what_was_not_done():
    with ahead([die, partial(work_of, 2)], 2) as results, pytest.raises(RuntimeError):
        [result() for result in results]


@needs_fork
def test_an_interrupt_does_not_wait_for_what_is_still_computed():
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), ahead([partial(time.sleep, 3600)] * 2, 2):
        raise KeyboardInterrupt
    assert time.monotonic() - started < 1800  # not the hour that they would take


@needs_fork
def test_processes_of_one_progress_count_together(capfd):
    progress = Progress("pieces", 6, unit="pieces", every_s=0)
    with ahead([partial(progress.advance, 2)] * 3, 2) as results:
        [result() for result in results]
    assert "pieces: 6 of 6 pieces" in capfd.readouterr().err.splitlines()[-1]


@needs_fork
def test_no_process_outlives_a_run_that_is_killed(tmp_path):
    script = (
        "import time, os, sys; from functools import partial; from evals.parallel import ahead\n"
        "def wait(n):\n    open(f'{sys.argv[1]}/{n}', 'w').write(str(os.getpid())); time.sleep(60)\n"
        "with ahead([partial(wait, 0), partial(wait, 1)], 2) as results:\n    results[0]()\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    end = time.monotonic() + 60
    while sum(path.read_text() != "" for path in tmp_path.iterdir()) < 2:
        assert time.monotonic() < end and run.poll() is None
        time.sleep(0.02)
    children = [int(path.read_text()) for path in tmp_path.iterdir()]
    run.kill()
    run.wait()
    while any(alive(pid) for pid in children):
        assert time.monotonic() < end, "a process outlived its parent"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has collected yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
