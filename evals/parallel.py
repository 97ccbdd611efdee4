"""Independent pieces of work side by side: one process a core, one thread each.

    with ahead([partial(run, text) for text in texts], processes=2) as results:
        for result in results:
            losses, log = result()          # waits for it; raises what it raised

The matrices of one window are so small that two threads of one pass mostly wait for each other, the more so beside
other load; two processes with a window each do not. The processes are forked, so they share the model that was loaded
before, and what they return is sent back. Where there is nothing to gain, or no safe fork, the work is done here, when
its result is asked for.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1  # prctl(2)
_work: Sequence[Callable[[], object]] = ()  # what a forked process finds here, as it was when it was forked


@contextmanager
def ahead(work: Sequence[Callable[[], T]], processes: int) -> Iterator[list[Callable[[], T]]]:
    """A call for every piece of work that gives its result, in the order of `work`.

    A process that dies (out of memory) fails what was not done yet: RuntimeError. The caller's process must compute on
    one thread by then (`torch.set_num_threads`): a fork does not take the others along.
    """
    global _work
    if processes < 2 or len(work) < 2 or sys.platform != "linux":
        yield list(work)
        return
    outer, _work = _work, work
    pool = ProcessPoolExecutor(
        min(processes, len(work)), multiprocessing.get_context("fork"), initializer=_end_with, initargs=(os.getpid(),)
    )
    try:
        yield [future.result for future in [pool.submit(_do, number) for number in range(len(work))]]
    finally:
        pool.shutdown(cancel_futures=True)
        _work = outer


def _end_with(parent: int) -> None:
    """No process outlives the one that asked; an interrupt of the terminal is the parent's to answer."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _do(number: int) -> object:
    return _work[number]()
