"""Who may run generated code, and what is made of the verdicts. Goldens of pass@k by hand; the command line.

The verdicts here are made up: what earns them is tests/evals/test_sandbox.py's.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import UserError
from evals import pass_at, sandbox
from evals.trial import Outcome

ROOT = Path(__file__).parents[2]
ROWS = [dict.fromkeys(pass_at.COLUMNS, "") | {"task_id": f"task/{number}"} for number in range(4)]


@pytest.fixture
def verdicts(monkeypatch):
    """Completions are their own verdicts."""
    monkeypatch.setattr(pass_at, "judge", lambda row, completion, limits: Outcome(completion, row["task_id"]))


@pytest.fixture
def nothing_runs(monkeypatch):
    def judge(*arguments):
        raise AssertionError("code was run")

    monkeypatch.setattr(pass_at, "judge", judge)
    monkeypatch.setattr(sandbox, "judge", judge)


# ---------------------------------------------------------------- the opt-in


@pytest.mark.parametrize("consent", [None, "", "0", "1", "true", "yes"])
def test_not_asked_for_is_not_run_whatever_the_environment_says(monkeypatch, nothing_runs, consent):
    if consent is None:
        monkeypatch.delenv(sandbox.OPT_IN, raising=False)
    else:
        monkeypatch.setenv(sandbox.OPT_IN, consent)
    assert sandbox.require_opt_in(False) is False


@pytest.mark.parametrize("consent", [None, "", "0", "true", "yes", "1 "])
def test_asked_for_without_consent_is_one_line(monkeypatch, nothing_runs, consent):
    if consent is None:
        monkeypatch.delenv(sandbox.OPT_IN, raising=False)
    else:
        monkeypatch.setenv(sandbox.OPT_IN, consent)
    with pytest.raises(UserError, match=sandbox.OPT_IN) as caught:
        sandbox.require_opt_in(True)
    assert "\n" not in str(caught.value) and "tasks.run_code: false" in str(caught.value)


def test_consent_without_a_sandbox_is_one_line(monkeypatch):
    monkeypatch.setenv(sandbox.OPT_IN, "1")
    monkeypatch.setattr(sandbox, "probe", lambda: "unshare: Operation not permitted")
    with pytest.raises(UserError, match=r"unshare.*no weaker mode"):
        sandbox.require_opt_in(True)


def test_consent_and_a_sandbox_allow_it(monkeypatch):
    monkeypatch.setenv(sandbox.OPT_IN, "1")
    monkeypatch.setattr(sandbox, "probe", lambda: None)
    assert sandbox.require_opt_in(True) is True


@pytest.mark.parametrize("platform, machine", [("darwin", "arm64"), ("linux", "riscv64"), ("win32", "AMD64")])
def test_a_machine_without_the_means_has_a_reason(monkeypatch, nothing_runs, platform, machine):
    monkeypatch.setattr(sandbox.sys, "platform", platform)
    monkeypatch.setattr(sandbox.platform, "machine", lambda: machine)
    assert {"darwin": "Linux", "linux": machine, "win32": "Linux"}[platform] in sandbox.probe.__wrapped__()


def test_a_sandbox_that_does_not_work_has_its_reason(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "platform", "linux")
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sandbox, "judge", lambda *arguments: Outcome("refused", "unshare: Operation not permitted"))
    assert sandbox.probe.__wrapped__() == "unshare: Operation not permitted"


# ---------------------------------------------------------------- pass@k


@pytest.mark.parametrize(
    "samples, passed, k, share",
    [(1, 0, 1, 0), (1, 1, 1, 1), (5, 2, 1, 0.4), (5, 2, 2, 0.7), (5, 2, 4, 1), (4, 1, 2, 0.5), (3, 0, 3, 0)],
)
def test_the_estimate_of_one_problem(samples, passed, k, share):
    """Golden, by hand: 5 samples of which 2 pass, k = 2: 3 of the 10 pairs have none, 1 - 3/10."""
    assert pass_at.estimate(samples, passed, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("samples, passed, k", [(6, 2, 3), (7, 0, 2), (5, 5, 1), (6, 4, 2)])
def test_the_estimate_is_the_share_of_all_draws_with_one_that_passes(samples, passed, k):
    draws = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
    assert pass_at.estimate(samples, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("samples, k", [(1, 2), (3, 0), (0, 1)])
def test_more_draws_than_samples_are_refused(samples, k):
    with pytest.raises(UserError, match=f"pass@{k} from {samples} samples"):
        pass_at.estimate(samples, 0, k)


def test_one_completion_a_problem(verdicts):
    record = pass_at.pass_at_1(["passed", "failed", "timed_out", "passed"], ROWS, allowed=True)
    assert record["status"] == "run" and record["pass_at_1"] == 0.5 and record["problems"] == 4
    assert record["counts"] == dict.fromkeys(sandbox.VERDICTS, 0) | {"failed": 1, "passed": 2, "timed_out": 1}
    assert record["outcomes"][2] == {"task_id": "task/2", "verdict": "timed_out", "reason": "task/2"}
    json.dumps(record, allow_nan=False)


def test_several_completions_a_problem(verdicts):
    """Golden: pass@1 is (2/2 + 1/2) / 2, pass@2 is 1 for each."""
    samples = [["passed", "passed"], ["failed", "passed"]]
    record = pass_at.pass_at_k(samples, ROWS[:2], True, ks=(1, 2))
    assert record["pass_at"] == {1: 0.75, 2: 1.0}
    assert record["counts"]["passed"] == 3


def test_not_allowed_is_a_status_and_no_number(nothing_runs):
    record = pass_at.pass_at_1(["x"] * 4, ROWS, allowed=False)
    assert record == {
        "status": "not run (opt-in)", "problems": 4, "pass_at_1": None, "counts": {}, "outcomes": []
    }  # fmt: skip


def test_a_refusal_leaves_no_number(verdicts):
    record = pass_at.pass_at_1(["passed", "refused", "passed", "failed"], ROWS, allowed=True)
    assert (record["status"], record["pass_at_1"]) == ("not run (task/1)", None)
    assert record["counts"]["passed"] == 2


def test_no_problem_has_no_number(verdicts):
    record = pass_at.pass_at_1([], [], allowed=True)
    assert (record["status"], record["pass_at_1"]) == ("not run (no problems)", None)


@pytest.mark.parametrize("completions", [["passed"], ["passed"] * 5])
def test_completions_without_their_row_are_refused(verdicts, completions):
    with pytest.raises(UserError, match=f"of {len(completions)} problems"):
        pass_at.pass_at_1(completions, ROWS, allowed=True)


@pytest.mark.parametrize("column", pass_at.COLUMNS)
def test_a_row_without_a_column_is_refused(verdicts, column):
    row = {name: value for name, value in ROWS[0].items() if name != column}
    with pytest.raises(UserError, match=column):
        pass_at.pass_at_1(["passed"], [row], allowed=True)


# ---------------------------------------------------------------- the module of evaluate


@pytest.fixture
def metric(monkeypatch, tmp_path):
    """The module, loaded by its path with no way to the network."""
    evaluate = pytest.importorskip("evaluate")
    monkeypatch.setattr("socket.socket.connect", lambda *arguments: pytest.fail("the network was asked"))
    monkeypatch.setattr("evaluate.loading.init_dynamic_modules", _modules_in(tmp_path))
    return evaluate.load(str(ROOT / "evals/metrics/pass_at_1"), cache_dir=str(tmp_path / "cache"))


def _modules_in(folder):
    from evaluate.loading import init_dynamic_modules

    return lambda *arguments: init_dynamic_modules(hf_modules_cache=str(folder))


def test_the_module_counts_as_the_function_does(monkeypatch, metric, verdicts):
    monkeypatch.setenv(sandbox.OPT_IN, "1")
    monkeypatch.setattr(sandbox, "probe", lambda: None)
    samples = [["passed", "failed"], ["failed", "timed_out"]]
    result = metric.compute(predictions=samples, references=ROWS[:2], allowed=True, k=[1, 2])
    assert (result["status"], result["pass_at_1"], result["pass_at_2"]) == ("run", 0.25, 0.5)
    assert result["counts"]["timed_out"] == 1


def test_the_module_runs_nothing_unless_allowed(metric, nothing_runs):
    result = metric.compute(predictions=[["x"]], references=ROWS[:1])
    assert (result["status"], result["pass_at_1"]) == ("not run (opt-in)", None)


def test_the_module_asks_for_consent(monkeypatch, metric, nothing_runs):
    monkeypatch.delenv(sandbox.OPT_IN, raising=False)
    with pytest.raises(UserError, match=sandbox.OPT_IN):
        metric.compute(predictions=[["x"]], references=ROWS[:1], allowed=True)


# ---------------------------------------------------------------- the command line


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name not in (sandbox.OPT_IN, "EXPERTMISS_DATA")}
    return subprocess.run(
        [sys.executable, "-m", "evals.sandbox", *arguments],
        cwd=ROOT, env=kept | environment, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("arguments, word", [(["--help"], "humaneval"), (["humaneval", "--help"], "--completions")])
def test_help_says_what_there_is(arguments, word):
    ran = command(*arguments)
    assert ran.returncode == 0 and word in ran.stdout


def test_completions_need_the_consent_first(tmp_path):
    """Before the file is looked at."""
    ran = command("humaneval", "--completions", str(tmp_path / "none.jsonl"))
    assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (2, "", 1)
    assert sandbox.OPT_IN in ran.stderr


LINE = '{"task_id": "task/0", "completion": "passed"}'


@pytest.mark.parametrize(
    "content, found",
    [
        ("{", ":1: JSONDecodeError"),
        (f"{LINE}\n[]", ":2: TypeError"),
        ('{"task_id": "task/0"}', ":1: KeyError: 'completion'"),
        ('{"task_id": "task/9", "completion": ""}', ":1: ValueError"),
        ('{"task_id": "task/0", "completion": null}', ":1: ValueError"),
        ('{"task_id": [], "completion": ""}', ":1: TypeError"),
    ],
)
def test_a_bad_line_of_completions_is_named(tmp_path, content, found):
    path = tmp_path / "samples.jsonl"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        sandbox.samples_of(str(path), {"task/0"})
    assert found in str(caught.value)


def test_completions_are_read_by_task(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text(f"{LINE}\n{LINE.replace('/0', '/1')}\n{LINE}\n")
    assert sandbox.samples_of(str(path), {"task/0", "task/1"}) == {"task/0": ["passed"] * 2, "task/1": ["passed"]}
    with pytest.raises(UserError, match=r"none\.jsonl: No such file"):
        sandbox.samples_of(str(tmp_path / "none.jsonl"), {"task/0"})


def test_a_wrong_file_of_problems_is_refused(tmp_path):
    (tmp_path / "humaneval").mkdir()
    with gzip.open(tmp_path / "humaneval/HumanEval.jsonl.gz", "wt") as handle:
        handle.write(json.dumps(ROWS[0]))
    with pytest.raises(UserError, match="sha256"):
        pass_at.humaneval_rows(tmp_path)
