"""What a measured host decodes. Golden: passages by hand. Agreement: their rows in a trace are their own events."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.errors import UserError
from engine.policies import as_row, load_policies, parse_row
from engine.trace import RouterTrace
from engine.trace_file import open_trace, save_trace
from evals.measured import passages
from evals.perplexity import TokenizedDocument
from evals.quality import Text
from evals.simulation import load_parts

POLICIES = load_policies(Path(__file__).parents[2] / "config" / "policies.tsv")
BOS = 0


def text(bos: int | None, *lengths: tuple[str, int]) -> Text:
    """Documents whose ids say where they come from: 100, 101, ... in the first, 200, ... in the second."""
    documents = tuple(
        TokenizedDocument(name, tuple(range(100 * i, 100 * i + length)), 1, 1)
        for i, (name, length) in enumerate(lengths, start=1)
    )
    scored = tuple(length if bos is not None else length - 1 for _, length in lengths)
    return Text("story", "prose", "0" * 64, documents, scored)


def test_golden_the_first_tokens_of_the_first_long_documents_of_different_clusters():
    found = passages(text(BOS, ("a/1", 3), ("b/1", 5), ("b/2", 9), ("c", 4)), BOS, documents=3, tokens=4)
    assert [(part.document, part.ids, part.rows) for part in found] == [
        ("b/1", (0, 200, 201, 202, 203), range(3, 7)),
        ("c", (0, 400, 401, 402, 403), range(17, 21)),
    ]


def test_golden_without_bos_the_first_token_is_context_alone():
    (found,) = passages(text(None, ("a", 3), ("b", 5)), None, documents=1, tokens=3)
    assert (found.ids, found.rows) == ((200, 201, 202, 203), range(2, 5))


def test_a_text_without_a_document_long_enough_is_refused_by_name():
    with pytest.raises(UserError, match="no document of story has 9 tokens; expected one at least; lower the tokens"):
        passages(text(BOS, ("a", 3)), BOS, documents=1, tokens=9)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    random = np.random.default_rng(3)
    scores = random.normal(size=(30, 2, 8)).astype(np.float32)
    chosen = np.argsort(-scores, axis=-1, kind="stable")[..., :2].astype(np.int16)
    picked = np.take_along_axis(scores, chosen.astype(np.int64), axis=-1)
    weights = np.exp(picked) / np.exp(picked).sum(axis=-1, keepdims=True)
    file = tmp_path_factory.mktemp("trace") / "story.safetensors"
    facts = {"model": "tiny", "text": "story", "policy": "stock", "score_rule": "softmax"}
    whole = RouterTrace(chosen, weights.astype(np.float32), picked, experts=8, scores=scores)
    save_trace(file, whole, [("a", 0, 10), ("b", 10, 20)], facts)
    return file


def test_agreement_parts_of_a_trace_are_its_rows_one_after_another(trace):
    whole = open_trace(trace).read()
    parts = load_parts(open_trace(trace), [range(3, 7), range(17, 21)])
    rows = [3, 4, 5, 6, 17, 18, 19, 20]
    assert parts.tokens == 8 and parts.text == "story"
    for name in ("chosen", "weights", "scores"):
        joined = np.concatenate([getattr(chunk, name) for chunk in parts.chunks(3)])
        assert (joined == getattr(whole, name)[rows]).all()


def test_a_trace_of_fewer_documents_is_refused(trace):
    with pytest.raises(UserError, match="30 tokens; expected 31 at least; record it of as many documents"):
        load_parts(open_trace(trace), [range(27, 31)])


@pytest.mark.parametrize("name", POLICIES)
def test_law_a_policy_as_a_row_is_read_as_the_same_policy(name):
    row = as_row(POLICIES[name])
    assert parse_row(row, "here") == POLICIES[name] and all(isinstance(cell, str) for cell in row.values())
