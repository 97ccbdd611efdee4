"""What do a run and the jobs that a cluster does for it need to know of one another?

A job reads the configuration again on its node, where another machine is "this host" and `all` threads are others: its
files would not be those that the run asked for. So the run tells its jobs, through the environment, what it found.

A run that is killed outright cannot cancel what it submitted. Left alone, such a job would write the very files that
the next run makes, and time what the next run times: it is cancelled. A measurement goes on where it was.

While the controller is away, the plugin that submits (2.x) forgets the jobs whose status it cannot get, and the run
waits for ever: such jobs are asked for again.

tell_jobs(settings.this_host, settings.threads); submitted()
cancel_orphans("the folder of the workflow")
ask_again(plugin.Executor)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass

from engine.errors import error

SUBMITTED = "EXPERTMISS_SUBMITTED"
NAME = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")  # of Snakemake's jobs: the run's id
LIMIT_S = 120.0


@dataclass(frozen=True)
class Submitted:
    """What the machine that submits found of itself."""

    this_host: str  # id
    threads: int


def tell_jobs(this_host: str, threads: int) -> None:
    os.environ[SUBMITTED] = json.dumps([this_host, threads])


def submitted() -> Submitted | None:
    """None in a job that no cluster runs."""
    told = os.environ.get(SUBMITTED)
    return Submitted(*json.loads(told)) if told else None


def cancel_orphans(folder: str) -> list[str]:
    """The ids of Snakemake's jobs that work in the folder, cancelled and gone. Without Slurm there are none.

    Call it where no other run is alive in the folder. UserError where they do not end, or Slurm does not answer.
    """
    if not shutil.which("squeue"):
        return []
    found = left = jobs_in(folder)
    if found:
        print(f"a killed run left jobs {', '.join(found)} behind; they are cancelled", flush=True)
        _slurm("scancel", *found)
    end = time.monotonic() + LIMIT_S
    while left:
        if time.monotonic() > end:
            raise error(f"jobs {', '.join(left)} are still in the queue", "none of a killed run", "end them first")
        time.sleep(0.5)
        left = jobs_in(folder)
    return found


def jobs_in(folder: str) -> list[str]:
    """Ids of Snakemake's jobs that wait, run or end in a working folder.

    A shell that this user has on a node, or Snakemake itself in a job of its own, is no such job.
    """
    told = _slurm("squeue", "--me", "--noheader", "--array-unique", "--format=%i %j %Z")
    rows = [line.split(maxsplit=2) for line in told.splitlines()]
    return [job for job, name, place in rows if place == folder and NAME.search(name)]


def ask_again(executor: type) -> None:
    """Let an executor of snakemake-executor-plugin-slurm keep its jobs where no query of their status was answered."""
    check = executor.check_active_jobs

    async def check_active_jobs(self, active_jobs):
        # its thread starts before it has its attributes, and then there is no job
        answered = self._status_query_calls if active_jobs else 0
        async for job in check(self, active_jobs):
            yield job
        if active_jobs and self._status_query_calls == answered:  # then it gave none, and reported none
            for job in active_jobs:
                yield job

    executor.check_active_jobs = check_active_jobs


def _slurm(*command: str) -> str:
    """What a command of Slurm prints. UserError where it fails or does not end."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        said = " ".join(ended.stderr.split())[:200] if ended.returncode else None
    except (OSError, subprocess.TimeoutExpired) as exc:
        said = str(exc)
    if said is not None:
        todo = "jobs of a killed run may be left: start it, or, where none are, remove .snakemake/slurm_logs"
        raise error(f"{command[0]}: {said or 'failed'}", "a Slurm controller that answers", todo)
    return ended.stdout
