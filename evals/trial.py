"""One completion against one test: two cells are started, watched and judged.

The completion and the test each run in a cell of their own (evals/cell), joined by a pipe for calls and one for
answers. The verdict is the word of the test's process, which alone holds the pipe for it, and how the kernel says the
completion's process ended; the completion can reach neither.

    judge({"prompt": "def f(x):\\n", "canonical_solution": "", "entry_point": "f",
           "test": "def check(f): assert f(2) == 4"}, "    return 2 * x")      # Outcome("passed", "")
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

VERDICTS = ("passed", "failed", "timed_out", "out_of_memory", "output_limit", "killed", "refused")
ROOT = Path(__file__).parents[1]
LAUNCH = "import sys; sys.path.insert(0, sys.argv[1]); from evals.cell.inside import main; main()"
FLAGS = ("-s", "-S", "-P", "-B", "-X", "utf8")  # no packages, no file of the working folder, no bytecode written
ENVIRONMENT = {"PYTHONHASHSEED": "0"}  # and nothing else: the order of a set of strings is the same every time
LATE_S = 30  # a launcher that says nothing for so long after the wall limit is given up
TAIL_BYTES = 500


@dataclass(frozen=True)
class Limits:
    """Of one cell. The limit on processor time tells a loop from a wrong answer on a busy machine too; the wall limit,
    far above it, ends what sleeps."""

    memory_bytes: int = 512 << 20  # address space
    cpu_s: int = 10
    wall_s: float = 60.0
    output_bytes: int = 1 << 20  # of standard output and error together
    answer_bytes: int = 4 << 20  # of one returned value
    file_bytes: int = 1 << 20
    open_files: int = 32


@dataclass(frozen=True)
class Outcome:
    verdict: str  # of VERDICTS
    reason: str = ""  # empty where passed; else one line of printable characters, partly the completion's own


@dataclass
class Seen:
    """What came out of a trial: bytes of the test's word, of the reports of both cells, the end and size of output."""

    test: bytes = b""
    completion: bytes = b""
    word: bytes = b""
    tail: bytes = b""
    output_bytes: int = 0
    flooded: bool = False


@dataclass
class Pipe:
    """Two ends, each closed once."""

    read: int = -1
    write: int = -1
    open: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.read, self.write = os.pipe()
        self.open = {self.read, self.write}

    def close(self, *fds: int) -> None:
        for fd in self.open & set(fds or self.open):
            os.close(fd)
            self.open.remove(fd)


class Cell:
    """A launcher (evals/cell/inside.py) at work, with one job."""

    def __init__(self, job: dict, limits: Limits, output: int, channels: dict[str, int]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *FLAGS, "-c", LAUNCH, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            pass_fds=tuple(channels.values()),
            env=ENVIRONMENT,
            start_new_session=True,  # an interrupt from the terminal is for this process, which then ends the cell
        )
        self.report = self.process.stdout.fileno()
        line = json.dumps(job | {"channels": channels, "limits": asdict(limits)}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it died: no report will come
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def stop(self) -> None:
        """Ask for the end; the report follows."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self) -> None:
        self.stop()
        try:
            self.process.wait(LATE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # the cell's first process dies with it, and all others with that
            self.process.wait()
        self.process.stdout.close()


def judge(row: Mapping[str, str], completion: str, limits: Limits | None = None) -> Outcome:
    """The verdict on `completion`, which goes on where the prompt ends; the row has HumanEval's columns.

    Refused, with the reason, where a cell is not to be had, or where the task's own code is broken. Whether generated
    code may run at all is the caller's to ask first: evals.sandbox.require_opt_in.
    """
    limits = limits or Limits()
    ask = {"role": "test", "code": row["prompt"] + row["canonical_solution"], "test": row["test"]}
    reply = {"role": "completion", "code": row["prompt"] + completion, "entry_point": row["entry_point"]}
    with contextlib.ExitStack() as stack:
        requests, answers, word, output = pipes = [Pipe() for _ in range(4)]
        for pipe in pipes:
            stack.callback(pipe.close)
        try:
            channels = {"requests": requests.write, "answers": answers.read, "word": word.write}
            tester = Cell(ask, limits, output.write, channels)
            stack.callback(tester.end)
            channels = {"requests": requests.read, "answers": answers.write}
            answerer = Cell(reply, limits, output.write, channels)
            stack.callback(answerer.end)
        except OSError as exc:
            return Outcome("refused", f"no process could be started: {exc.strerror}")
        for pipe in (requests, answers):
            pipe.close()
        word.close(word.write)
        output.close(output.write)
        seen = follow(tester, answerer, word.read, output.read, limits)
    return decide(seen, limits)


def follow(tester: Cell, answerer: Cell, word: int, output: int, limits: Limits) -> Seen:
    """Read everything until both cells have reported. The answerer is stopped when the test has ended."""
    seen = Seen()
    names = {tester.report: "test", answerer.report: "completion", word: "word"}
    last = time.monotonic() + limits.wall_s + LATE_S
    with selectors.DefaultSelector() as selector:
        for fd in (*names, output):
            selector.register(fd, selectors.EVENT_READ)
        waiting = set(names)
        while waiting and time.monotonic() < last:
            for key, _ in selector.select(last - time.monotonic()):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fd)
                    waiting.discard(key.fd)
                    if key.fd == tester.report:
                        answerer.stop()
                elif key.fd != output:
                    setattr(seen, names[key.fd], getattr(seen, names[key.fd]) + chunk)
                else:
                    seen.tail = (seen.tail + chunk)[-TAIL_BYTES:]
                    seen.output_bytes += len(chunk)
                    if seen.output_bytes > limits.output_bytes:
                        seen.flooded = True
                        selector.unregister(output)
                        tester.stop()
                        answerer.stop()
    return seen


def decide(seen: Seen, limits: Limits) -> Outcome:
    """From what was seen to a verdict. `passed` is the test's word alone, and that of a test that ended well."""
    reports = []
    for content in (seen.test, seen.completion):
        if not content.endswith(b"\n"):
            return Outcome("refused", f"a launcher ended without a report: {seen.tail.decode(errors='replace')!r}")
        reports.append(json.loads(content))
        if "refused" in reports[-1]:
            return Outcome("refused", reports[-1]["refused"])
    test, completion = reports
    if seen.flooded:
        return Outcome("output_limit", f"more than {limits.output_bytes:,} bytes of output")
    word = json.loads(seen.word) if seen.word.endswith(b"\n") and test["status"] == 0 else None
    if word and word["verdict"] == "passed":
        return Outcome("passed")
    for who, report in (("the completion", completion), ("the test of its answers", test)):
        if report["by"] == "cpu":
            return Outcome("timed_out", f"{who} used {limits.cpu_s:g} s of processor time")
        if report["by"] == "wall":
            return Outcome("timed_out", f"{who} took {limits.wall_s:g} s")
    if completion["by"] == "itself" and completion["status"] < 0:
        name = signal.Signals(-completion["status"]).name
        if name == "SIGKILL":  # it cannot send that to itself: the kernel did
            return Outcome("out_of_memory", "the kernel ended the completion, as it does when memory is short")
        return Outcome("killed", f"the completion ended by {name}")
    if word is None:
        return Outcome("failed", f"its answers ended the test's process with status {test['status']}")
    return Outcome(word["verdict"], "".join(c if c.isprintable() else " " for c in word["reason"]))
