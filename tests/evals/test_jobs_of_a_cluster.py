"""Laws: a job sees the hosts and threads of the run it is for, and only jobs of the folder are cancelled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from engine.errors import UserError
from evals.cluster import SUBMITTED, Submitted, ask_again, cancel_orphans, submitted, tell_jobs
from evals.settings import check

ROOT = Path(__file__).parents[2]
RUN = "5f92864d-d8db-4448-9997-942c6fc4f5af"
QUEUE = f"1 {RUN} /a b\n2 {RUN} /a\n3 {RUN} /a b/c\n4_2 prefix_{RUN} /a b\n5 interactive /a b\n"


@pytest.fixture
def configuration(monkeypatch) -> dict:
    monkeypatch.chdir(ROOT)
    return yaml.safe_load((ROOT / "config" / "config.yaml").read_text(encoding="utf-8"))


def test_a_job_is_told_what_its_run_found(monkeypatch):
    monkeypatch.setenv(SUBMITTED, "")  # put back after the test
    assert submitted() is None
    tell_jobs("box", 7)
    assert submitted() == Submitted("box", 7)


def test_on_its_node_a_job_sees_the_hosts_and_threads_of_its_run(configuration):
    here = check(configuration)
    another = next(name for name in here.hosts if name != here.this_host)
    told = check(configuration, told=Submitted(another, here.threads + 5))
    assert (told.this_host, told.threads) == (another, here.threads + 5)
    assert check(configuration, told=Submitted(here.this_host, here.threads)) == here


def test_threads_that_the_configuration_states_are_not_overruled(configuration):
    assert check(configuration | {"threads": 3}, told=Submitted("local", 8)).threads == 3


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """A queue, of which scancel ends those it is given: two programs of a made-up Slurm."""
    for name, body in (
        ("squeue", 'while read -r job; do echo "$job"; done < "$QUEUE"'),
        ("scancel", 'for id in "$@"; do grep -v "^$id " "$QUEUE" > "$QUEUE.left"; mv "$QUEUE.left" "$QUEUE"; done'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = tmp_path / "queue"
    path.write_text(QUEUE, encoding="utf-8")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("QUEUE", str(path))
    return path


def test_jobs_of_the_folder_are_cancelled_and_others_left(queue, capsys):
    assert cancel_orphans("/a b") == ["1", "4_2"]
    assert [line[0] for line in queue.read_text(encoding="utf-8").splitlines()] == ["2", "3", "5"]
    assert "1, 4_2" in capsys.readouterr().out
    assert cancel_orphans("/a b") == []


@pytest.mark.parametrize("program", ["squeue", "scancel"])
def test_a_controller_that_does_not_answer_is_one_line_and_no_empty_queue(program, queue):
    (queue.parent / program).write_text("#!/bin/sh\necho Unable to contact >&2\nexit 1\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"{program}: Unable to contact; expected a Slurm controller") as caught:
        cancel_orphans("/a b")
    assert "\n" not in str(caught.value) and queue.read_text(encoding="utf-8") == QUEUE


def test_without_slurm_there_is_nothing_to_cancel(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cancel_orphans("/a") == []


@pytest.mark.parametrize(("answers", "kept"), [(True, ["runs"]), (False, ["runs", "done"])])
def test_jobs_whose_status_nobody_told_are_asked_for_again(answers, kept):
    class Executor:  # as the plugin: what is done is reported, nothing is given where no query was answered
        _status_query_calls = 0

        async def check_active_jobs(self, active_jobs):
            self._status_query_calls += answers
            for job in active_jobs if answers else ():
                if job == "runs":
                    yield job

    ask_again(Executor)
    assert asyncio.run(given(Executor(), ["runs", "done"])) == kept


def test_the_plugin_is_asked_for_no_job_before_it_has_its_attributes():
    class Executor:
        async def check_active_jobs(self, active_jobs):
            for job in active_jobs:
                yield job

    ask_again(Executor)
    assert asyncio.run(given(Executor(), [])) == []


async def given(executor, jobs: list[str]) -> list[str]:
    return [job async for job in executor.check_active_jobs(jobs)]
