"""The process that holds a cell: makes it, starts the code as its first process, ends it at a limit on time.

evals/sandbox.py starts this in a fresh Python with an empty environment, writes the job on its standard input as one
line and keeps that open: when it closes, or ends with its owner, the cell ends too. On standard output one line comes
back: how the code ended, or why it was not started. When the first process of a pid namespace ends the kernel kills
all others, and `waitpid` returns after that: what is reported is over.

    python -c "import sys; sys.path.insert(0, '/path/of/the/repository'); from evals.cell.inside import main; main()"
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time

from evals.cell import namespaces
from evals.cell.roles import ROLES

# Extension modules that need a shared library which the cell does not have: loaded now, they can be imported there.
for name in ("bz2", "decimal", "hashlib", "lzma", "zlib"):
    with contextlib.suppress(ImportError):
        __import__(name)

CPUCLOCK_SCHED = 2
LOOK_S = 0.05  # between looks at the clocks
GRACE_S = 0.5  # for an end that had begun before it was asked for: pipes close first


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
            os.setsid()  # kill(0, ...) reaches a process group across pid namespaces: not that of this process
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
    ended = watch(child, job["limits"])
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


def watch(child: int, limits: dict) -> dict:
    """Wait for the child, a limit on time or the owner's wish; end the cell; say how it was.

    Processor time is read from the scheduler's clock. The kernel's own limit counts ticks of the timer, a sixth off
    either way where calls are short; it stands at twice this one, for the case that this process is not there.
    """
    handle = os.pidfd_open(child)
    clock = ~child << 3 | CPUCLOCK_SCHED  # clock_getcpuclockid(3)
    last = time.monotonic() + limits["wall_s"]
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(0, select.POLLIN)
    by = None
    while by is None:
        events = [fd for fd, _ in poll.poll(LOOK_S * 1000)]
        if handle in events:
            by = "itself"
        elif events:
            poll.unregister(0)
            by = "itself" if poll.poll(GRACE_S * 1000) else "owner"
        elif time.clock_gettime(clock) >= limits["cpu_s"]:
            by = "cpu"
        elif time.monotonic() >= last:
            by = "wall"
    if by != "itself":
        os.kill(child, signal.SIGKILL)  # not reaped yet: the number is still its own
    _, status = os.waitpid(child, 0)
    return {"by": by, "status": os.waitstatus_to_exitcode(status)}
