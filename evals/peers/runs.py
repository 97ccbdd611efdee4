"""One program over a workload, alone under its memory limit: what it took, as it printed it.

outcome = run(command, files, limit_bytes=2_600_000_000, documents=9, timeout_s=1800)
outcome.seconds, outcome.losses, outcome.read_bytes, outcome.peak_bytes
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from evals.peers.memory import MemoryGroup, evict, evict_libraries, read_ahead

# whose pages a program would find cached
LIBRARIES = ("torch", "numpy", "numba", "llvmlite", "tokenizers", "safetensors")


@dataclass
class Outcome:
    """Of D documents, the warm-up first; what was printed before a program ended is kept."""

    seconds: list[list[float]] = field(default_factory=list)  # a document: a token
    losses: list[list[float]] = field(default_factory=list)
    read_bytes: int | None = None  # over the documents that count
    peak_bytes: int | None = None  # charged to the group, page cache included
    counts: dict = field(default_factory=dict)  # of the engine
    output: str = ""
    reason: str = ""


def run(
    command: list[str],
    files: Iterable[str | Path],
    *,
    limit_bytes: int | None,
    documents: int,
    timeout_s: float,
    ahead_kb: int | None = None,
) -> Outcome:
    """files: of the model, taken out of the page cache first, and, without a limit, brought into it by the same group.

    ahead_kb: of the device that holds the first of them. UserError where no memory group can be made.
    """
    evict(files)
    evict_libraries(LIBRARIES)
    outcome = Outcome()
    with MemoryGroup(limit_bytes) as group, read_ahead(next(iter(files), "."), ahead_kb):
        if not limit_bytes:
            subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, preexec_fn=group.enter, check=True)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=group.enter
        )
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            output, errors = process.communicate()
        finally:
            late = not timer.is_alive()
            timer.cancel()
            process.kill()
        outcome.peak_bytes = group.peak_bytes()
        status, killed = process.returncode, group.killed()
    outcome.output = output
    if documents:
        read_lines(output, outcome)
    if status or len(outcome.seconds) != documents:
        outcome.reason = _why(status, killed, late, timeout_s, errors, outcome)
    return outcome


def read_lines(output: str, outcome: Outcome) -> None:
    """What a program printed, as llama_decode.c and worker.py do."""
    read = []
    for line in output.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "bytes":
            read.append(int(rest))
        elif kind == "counts":
            outcome.counts = json.loads(rest)
        elif kind.isdigit():
            seconds, loss = map(float, rest.split())
            while len(outcome.seconds) <= int(kind):
                outcome.seconds.append([])
                outcome.losses.append([])
            outcome.seconds[-1].append(seconds)
            outcome.losses[-1].append(loss)
    if len(read) == 2 and read[0] >= 0:
        outcome.read_bytes = read[1] - read[0]


def read_rate(output: str) -> float:
    """Tokens a second of what llama-bench printed with `-o json`."""
    return float(json.loads(output)[0]["avg_ts"])


def _why(status: int, killed: bool, late: bool, timeout_s: float, errors: str, outcome: Outcome) -> str:
    decoded = sum(map(len, outcome.seconds))
    if killed:
        return f"the system ended it for want of memory, after {decoded} tokens"
    if late:
        return f"not done after {timeout_s:.0f} s, {decoded} tokens"
    lines = [line for line in errors.splitlines() if line.strip()]
    return f"status {status}, after {decoded} tokens: {' '.join((lines or ['it said nothing'])[-1].split())[:200]}"
