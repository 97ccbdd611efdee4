"""The process that holds a cell: makes it, starts the code as its first process, ends it at the wall limit.

evals/sandbox.py starts this in a fresh Python with an empty environment, writes the job on its standard input as one
line and keeps that open: when it closes, or ends with its owner, the cell ends too. On standard output one line comes
back: how the code ended, or why it was not started. When the first process of a pid namespace ends the kernel kills
all others, and `wait4` returns after that: what is reported is over.

    python -c "import sys; sys.path.insert(0, '/path/of/the/repository'); from evals.cell.inside import main; main()"
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys

from evals.cell import namespaces
from evals.cell.roles import ROLES

# Extension modules that need a shared library which the cell does not have: loaded now, they can be imported there.
for name in ("bz2", "decimal", "hashlib", "lzma", "zlib"):
    with contextlib.suppress(ImportError):
        __import__(name)

GRACE_S = 0.2  # for an end that has begun when it is asked for


def main() -> None:
    job = json.loads(sys.stdin.buffer.readline())
    try:
        report = hold(job)
    except OSError as exc:
        report = {"refused": str(exc)}
    os.write(1, json.dumps(report).encode() + b"\n")


def hold(job: dict) -> dict:
    """Run the job in a cell, to its end."""
    namespaces.enter()
    ready, entered = os.pipe()
    nothing, unused = os.pipe()
    os.close(unused)
    child = os.fork()
    if child == 0:
        try:
            os.dup2(nothing, 0)  # at its end already; /dev/null would be a file of the host
            os.dup2(2, 1)  # the code's output; standard output here is the report
            keep_open({0, 1, 2, entered, *job["channels"].values()})
            start(job, entered)
        finally:
            os._exit(1)  # whatever is raised, nothing returns from the cell into this function
    for fd in (nothing, entered, *job["channels"].values()):
        os.close(fd)  # so that a pipe ends with the code that holds its other end
    with os.fdopen(ready, "rb") as reader:
        word = reader.read().decode(errors="replace")
    ended = watch(child, job["limits"]["wall_s"])
    return ended if word == "entered" else {"refused": word or "the cell ended before it was made"}


def keep_open(fds: set[int]) -> None:
    edges = sorted(fds)
    for low, high in zip(edges, [*edges[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)


def start(job: dict, entered: int) -> None:
    """In the cell's first process: give up every right, look round, run; never return."""
    try:
        namespaces.confine(job["limits"])
        word = "; ".join(namespaces.faults(job["limits"])) or "entered"
    except OSError as exc:
        word = str(exc)
    os.write(entered, word.encode())
    os.close(entered)
    if word == "entered":
        ROLES[job["role"]](job, job["channels"])
    os._exit(0)


def watch(child: int, wall_s: float) -> dict:
    """Wait for the child, the wall limit or the owner's wish; end the cell; say how it was."""
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(0, select.POLLIN)
    events = [fd for fd, _ in poll.poll(wall_s * 1000)]
    by = "itself" if handle in events else "owner" if events else "wall"
    if by == "owner":
        poll.unregister(0)
        poll.poll(GRACE_S * 1000)
    if by != "itself":
        os.kill(child, signal.SIGKILL)  # not reaped yet: the number is still its own
    _, status, usage = os.wait4(child, 0)
    return {"by": by, "status": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime}
