"""Independent pieces of work side by side: a process each, and the threads shared out among them.

    model = load_model(..., threads=1)                              # nothing but this thread may be there when it forks
    with ahead([partial(run, text) for text in texts], threads=2) as results:
        for result in results:
            losses, log = result()          # waits for it; raises what it raised

The matrices of one window are so small that two threads of one pass mostly wait for each other, the more so beside
other load; two processes with a window each do not. The processes are forked, so they share the model that was loaded
before, and what they return is sent back. Where there is nothing to gain, or no safe fork, the work is done here on all
threads, when its result is asked for.
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
def ahead(work: Sequence[Callable[[], T]], threads: int) -> Iterator[list[Callable[[], T]]]:
    """A call for every piece of work that gives its result, in the order of `work`; threads: of all processes together.

    A process that dies (out of memory) fails what was not done yet: RuntimeError.
    """
    global _work
    import torch  # not by who never computes

    processes = min(threads, len(work))
    if processes < 2 or sys.platform != "linux":
        torch.set_num_threads(threads)
        yield list(work)
        return
    outer, _work = _work, work
    context, start = multiprocessing.get_context("fork"), (os.getpid(), threads // processes)
    pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=start)
    try:
        yield [future.result for future in [pool.submit(_do, number) for number in range(len(work))]]
    except BaseException:  # an interrupt, say: nobody waits for what is still computed
        for process in list(pool._processes.values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        _work = outer


def _begin(parent: int, threads: int) -> None:
    """No process outlives the one that asked; an interrupt of the terminal is the parent's to answer."""
    import torch

    torch.set_num_threads(threads)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _do(number: int) -> object:
    return _work[number]()
