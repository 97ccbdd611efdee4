"""Routing recorded elsewhere: what is imported is what was recorded, what is wrong is named by file and line.

The example code and the example file of docs/router_traces.md are run as they stand there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tiny import ROOT, run_script

from engine.errors import UserError
from engine.policies import load_policies
from engine.trace import RouterTrace, replay
from engine.trace_file import open_trace

PAGE = (ROOT / "docs" / "router_traces.md").read_text(encoding="utf-8")
POLICIES = load_policies(ROOT / "config" / "policies.tsv")
T, L, E, K, M = 20, 2, 16, 4, 7
HEADER = {"model": "m", "experts": E, "layers": L, "top_k": K, "text": "t", "policy": "exact", "score_rule": "softmax"}
SIGMOID = HEADER | {"score_rule": "sigmoid"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def recorded(header: dict, kind: str = "logits") -> list[dict]:
    """The lines of a made-up recording: two documents; kind: logits, top_logits or none."""
    rng = np.random.default_rng(9)
    logits = (2 * rng.normal(size=(T, L, E))).astype(np.float32)
    sigmoid = header["score_rule"] == "sigmoid"
    own = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits)
    selection = own + np.array(header["correction_bias"]) if "correction_bias" in header else logits
    order = np.argsort(-selection, axis=-1)
    chosen = rng.permuted(order[..., :K], axis=-1)
    weights = np.take_along_axis(own, chosen, axis=-1)
    weights = 2.5 * weights / weights.sum(axis=-1, keepdims=True)
    top = order[..., :M]
    top_logits = np.take_along_axis(logits, top, axis=-1)
    lines = []
    for t in range(T):
        line = {"document": "a" if t < 12 else "b", "chosen": chosen[t].tolist(), "weights": weights[t].tolist()}
        if kind == "logits":
            line["logits"] = logits[t].tolist()
        if kind == "top_logits":
            line["top_logits"] = {"experts": top[t].tolist(), "logits": top_logits[t].tolist()}
        lines.append(line)
    return [header, *lines]


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def imported(folder: Path, lines: list[dict], *flags):
    jsonl = write(folder / "routing.jsonl", lines)
    return run_script("import_trace.py", "--jsonl", jsonl, "--out", folder / "out" / "trace.safetensors", *flags)


def column(lines: list[dict], name: str) -> np.ndarray:
    return np.array([line[name] for line in lines[1:]])


# ---- what is imported ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch", [1, 7, 256])
@pytest.mark.parametrize("kind", ["logits", "top_logits", "none"])
def test_law_what_is_imported_is_what_was_recorded(tmp_path, kind, batch):
    lines = recorded(HEADER | {"model_hash": "abc", "tokens": T}, kind)
    ended = imported(tmp_path, lines, "--batch", batch)
    known = {"logits": "all scores", "top_logits": "the best 7 scores", "none": "no scores"}[kind]
    assert ended.code == 0 and f"20 tokens in 2 documents, {known}" in ended.out, ended
    file = open_trace(tmp_path / "out" / "trace.safetensors")
    trace = file.read()
    assert file.documents == [("a", 0, 12), ("b", 12, 8)] and (file.top_k, file.top_m) == (
        K,
        M * (kind == "top_logits"),
    )
    assert file.provenance["model_hash"] == "abc" and file.provenance["imported_from"] == "routing.jsonl"
    assert (trace.chosen == column(lines, "chosen")).all()
    assert (trace.weights == column(lines, "weights").astype(np.float32)).all()
    if kind == "logits":
        assert (trace.scores == column(lines, "logits")).all() and trace.logits is None
    if kind == "top_logits":
        top = column(lines, "top_logits")
        ids, logits = (np.array([line[name] for line in top]) for name in ("experts", "logits"))
        assert (np.take_along_axis(trace.scores, ids, axis=-1) == logits).all()
        assert np.isneginf(trace.scores).sum() == T * L * (E - M)
    if kind == "none":
        assert trace.scores is None and (trace.chosen_scores == trace.weights).all()
        with pytest.raises(UserError, match=r"policy 'rule_015' .* without scores"):
            file.check_policy(POLICIES["rule_015"])


def test_a_sigmoid_router_with_a_correction_bias(tmp_path):
    bias = np.random.default_rng(3).normal(size=(L, E)).astype(np.float32)
    lines = recorded(SIGMOID | {"correction_bias": bias.tolist()})
    assert imported(tmp_path, lines).code == 0
    file = open_trace(tmp_path / "out" / "trace.safetensors")
    trace = file.read()
    logits = column(lines, "logits").astype(np.float32)
    assert file.sigmoid and (trace.logits == logits).all() and "correction_bias" not in file.provenance
    assert np.allclose(trace.scores, 1 / (1 + np.exp(-logits)) + bias, atol=1e-6)
    file.check_policy(POLICIES["rule_015"])
    del lines[0]["correction_bias"]
    message = imported(tmp_path, lines).message
    assert "routing.jsonl:2: layer 0: logits by which an expert beats a chosen one" in message
    assert "give the correction_bias" in message


def test_the_best_m_of_whole_logits_are_those_of_top_logits(tmp_path):
    """The weakest chosen is among the best 7 anyway, so both files hold the same scores."""
    assert imported(tmp_path, recorded(HEADER), "--top-m", M).code == 0
    kept = open_trace(tmp_path / "out" / "trace.safetensors").read()
    assert imported(tmp_path, recorded(HEADER, "top_logits")).code == 0
    assert open_trace(tmp_path / "out" / "trace.safetensors").read().scores.tobytes() == kept.scores.tobytes()


def test_an_imported_trace_is_replayed(tmp_path):
    assert imported(tmp_path, recorded(HEADER, "none")).code == 0
    trace = open_trace(tmp_path / "out" / "trace.safetensors").read()
    kinds = [replay(trace, POLICIES[name], slots=8, demand=None).kind for name in ("fetch_belady", "fetch_lru")]
    assert 0 < kinds[0].sum() <= kinds[1].sum()


# ---- what is wrong ---------------------------------------------------------------------------------------------------
def header(**changes):
    return lambda lines: lines[0].update(changes)


def of_token(number: int, **changes):
    return lambda lines: lines[number].update(changes)


def within(number: int, name: str, layer: int, k: int, value):
    return lambda lines: lines[number][name][layer].__setitem__(k, value)


def lacks(number: int, name: str):
    return lambda lines: lines[number].pop(name)


ERRORS = {
    "no experts": (lacks(0, "experts"), ":1: no 'experts'; expected experts, layers, top_k, model, policy, score_rule"),
    "no policy": (lacks(0, "policy"), ":1: no 'policy'"),
    "experts in words": (header(experts="many"), ":1: experts is 'many'; expected a whole number from 1"),
    "no layer": (header(layers=0), ":1: layers is 0; expected a whole number from 1"),
    "K > E": (header(top_k=17), ":1: top_k 17 of 16 experts; expected K <= E"),
    "an unknown rule": (header(score_rule="sigmoids"), ":1: score_rule 'sigmoids'; expected a known one; did you mean"),
    "provenance that is no text": (header(seed=3), ":1: 'seed' is 3; expected text"),
    "a bias of a softmax": (header(correction_bias=[[0.0] * E] * L), ":1: correction_bias; expected none where"),
    "a bias of another shape": (
        header(score_rule="sigmoid", correction_bias=[[0.0] * E]), ":1: correction_bias is no [L][E] of numbers; exp"
    ),
    "fewer tokens than said": (header(tokens=21), ":21: the file ends after 20 tokens; expected 21; was it cut?"),
    "no tokens": (lambda lines: lines.__delitem__(slice(1, None)), ":2: the file ends after 0 tokens; expected 1"),
    "an unknown key": (of_token(5, weight=1), ":6: key 'weight'; expected a known key; did you mean 'weights'?"),
    "no weights": (lacks(5, "weights"), ":6: no 'weights'"),
    "a document by number": (of_token(5, document=3), ":6: document is 3; expected its id"),
    "a document in two pieces": (of_token(20, document="a"), ":21: document 'a' a second time; expected each document"),
    "a layer too few": (lambda lines: lines[5]["chosen"].pop(), ":6: chosen is no [L][K] of whole numbers; exp"),
    "lists of unequal length": (
        lambda lines: lines[5]["weights"][1].pop(), ":6: weights is no [L][K] of numbers; expected [2, 4]"
    ),
    "an id that is no number": (within(5, "chosen", 1, 2, 1.5), ":6: chosen is no [L][K] of whole numbers"),
    "a weight that is no number": (within(5, "weights", 1, 2, "x"), ":6: weights is no [L][K] of numbers"),
    "null": (within(5, "weights", 1, 2, None), ":6: weights is no [L][K] of numbers"),
    "an id of E": (within(5, "chosen", 1, 2, E), ":6: chosen with id 16; expected ids from 0 to 15"),
    "an id that 16 bits would wrap": (within(5, "chosen", 1, 2, 65536), ":6: chosen with id 65536"),
    "a negative id": (within(5, "chosen", 1, 2, -1), ":6: chosen with id -1"),
    "an expert twice": (
        lambda lines: lines[5]["chosen"][1].__setitem__(2, lines[5]["chosen"][1][0]), ":6: layer 1: chosen with an id"
    ),
    "a weight that is NaN": (within(5, "weights", 1, 2, float("nan")), ":6: layer 1: a weight that is negative"),
    "a weight beyond float32": (within(5, "weights", 1, 2, 1e300), ":6: layer 1: a weight that is negative"),
    "no weight at all": (of_token(5, weights=[[1.0] * K, [0.0] * K]), ":6: layer 1: weights that sum to zero"),
    "logits that are NaN": (within(5, "logits", 1, 2, float("nan")), ":6: layer 1: a score"),
    "logits on some lines": (lacks(5, "logits"), ":6: arrays chosen [2, 4], weights [2, 4]; expected those of"),
    "both kinds of logits": (of_token(5, top_logits={}), ":6: both logits and top_logits"),
    "logits of another layer": (
        lambda lines: lines[5]["logits"].reverse(), ":6: layer 0: logits by which an expert beats a chosen one"
    ),
    "weights of another temperature": (
        of_token(5, weights=[[0.97, 0.01, 0.01, 0.01]] * L), ":6: layer 0: weights that do not follow the logits"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_wrong_is_named_by_file_and_line(tmp_path, case):
    change, message = ERRORS[case]
    lines = recorded(dict(HEADER))
    change(lines)
    assert f"{tmp_path}/routing.jsonl{message}" in imported(tmp_path, lines).message
    assert not list(tmp_path.glob("out/*"))


TOPS = {
    "no list of logits": (lambda top: top.pop("logits"), ":6: top_logits; expected an object of experts and logits"),
    "fewer logits": (lambda top: top["logits"][1].pop(), ":6: top_logits.logits is no [L][M] of numbers"),
    "an id of E": (lambda top: top["experts"][1].__setitem__(0, E), ":6: top_logits.experts with id 16"),
    "an id twice": (
        lambda top: top["experts"][1].__setitem__(0, top["experts"][1][1]), ":6: layer 1: top_logits with an id twice"
    ),
    "NaN": (lambda top: top["logits"][1].__setitem__(0, float("nan")), ":6: layer 1: a logit that is NaN or infinite"),
    "another M": (
        lambda top: [row.pop() for rows in top.values() for row in rows], ":6: arrays chosen [2, 4], weights [2, 4]"
    ),
    "without the chosen": (
        lambda top: top["experts"].__setitem__(1, sorted(set(range(E)) - set(top["experts"][1]))[:M]),
        ":6: layer 1: a chosen expert that is not among the 7 best",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOPS)
def test_top_logits_that_are_wrong_are_named_by_file_and_line(tmp_path, case):
    change, message = TOPS[case]
    lines = recorded(dict(HEADER), "top_logits")
    change(lines[5]["top_logits"])
    assert f"{tmp_path}/routing.jsonl{message}" in imported(tmp_path, lines).message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ":1: no 'experts'"),
        (b"[1]\n", ":1: b'[1]\\n'; expected a JSON object"),
        (json.dumps(HEADER).encode() + b"\n{\"document\": ", ":2: Expecting value"),
        (json.dumps(HEADER).encode() + b"\n\n", ":2: Expecting value"),
        (b"\xff\xfe{}", ":1: 'utf-8' codec"),
    ],
)  # fmt: skip
def test_a_file_that_is_cut_or_no_jsonl_is_named(tmp_path, content, message):
    (tmp_path / "x.jsonl").write_bytes(content)
    ended = run_script("import_trace.py", "--jsonl", tmp_path / "x.jsonl", "--out", tmp_path / "x.safetensors")
    assert f"{tmp_path}/x.jsonl{message}" in ended.message
    ended = run_script("import_trace.py", "--jsonl", tmp_path / "y.jsonl", "--out", tmp_path / "x.safetensors")
    assert f"{tmp_path}/y.jsonl: No such file" in ended.message
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


# ---- the page --------------------------------------------------------------------------------------------------------
def test_the_example_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    writing, reading = blocks("python")
    assert "engine" not in writing  # safetensors alone
    exec(compile(writing, "docs/router_traces.md", "exec"), {})
    trace = open_trace(tmp_path / "trace.safetensors")
    assert (trace.tokens, trace.layers, trace.experts, trace.top_k) == (300, 2, 16, 4)
    assert isinstance(trace.read(), RouterTrace) and len(trace.documents) == 2
    trace.check_policy(POLICIES["rule_015"])
    exec(compile(reading, "docs/router_traces.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "(44, 2, 4) (44, 2, 16)"


def test_the_example_file_of_the_page_is_imported(tmp_path):
    (example,) = blocks("jsonl")
    (tmp_path / "routing.jsonl").write_text(example, encoding="utf-8")
    out = tmp_path / "trace.safetensors"
    ended = run_script("import_trace.py", "--jsonl", tmp_path / "routing.jsonl", "--out", out)
    assert ended.code == 0, ended.err
    assert open_trace(out).documents == [("a", 0, 2), ("b", 2, 1)] and open_trace(out).top_m == 3


def test_the_page_names_every_array_and_required_line():
    from engine.trace_schema import ARRAYS, REQUIRED, SCHEMA, SCORE_RULES

    for name in (*ARRAYS, *REQUIRED, SCHEMA, *SCORE_RULES, "experts", "documents"):
        assert f"`{name}`" in PAGE, name
