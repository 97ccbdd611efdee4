"""Predictions as files: read back in chunks beside a trace, the oracle by hand, and every fault refused by place."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import UserError
from engine.predictions import Predictions, from_trace, save_predictions
from engine.trace_file import open_trace, save_trace
from engine.trace_schema import documents_of
from tests.engine.prediction_cases import made_up, write_predictions
from tests.engine.trace_cases import stacked

E, K, T, L, N = 16, 4, 90, 3, 6
FACTS = {"model": "made up", "model_hash": "m", "text": "t", "text_sha256": "s"}


@pytest.fixture
def trace(router_trace, tmp_path):
    whole = stacked([router_trace(seed, T=T, E=E, K=K) for seed in range(L)]).whole
    path = tmp_path / "trace.safetensors"
    facts = FACTS | {"policy": "exact", "score_rule": "softmax"}
    save_trace(path, whole, documents_of([("a", 50), ("b", T - 50)]), facts)
    return open_trace(path)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "predictions.safetensors"
    ids, claims = made_up(T, L, E, N)
    save_predictions(path, ids, claims, experts=E, provenance=FACTS | {"predictor": "random"})
    return path


@pytest.mark.parametrize("tokens", [1, 7, T, 1000])
def test_law_chunks_of_any_size_are_what_was_written(tokens, written):
    ids, claims = made_up(T, L, E, N)
    chunks = list(Predictions(written).chunks(tokens))
    assert np.array_equal(np.concatenate([i for i, _ in chunks]), ids)
    assert np.array_equal(np.concatenate([c for _, c in chunks]), claims)
    assert {(i.dtype, c.dtype) for i, c in chunks} == {(np.dtype("i4"), np.dtype("f8"))}
    assert all(len(i) <= tokens for i, _ in chunks)


def test_law_the_oracle_names_what_the_next_layers_choose(trace, tmp_path):
    chosen = trace.read().chosen
    (ids, claims), *rest = Predictions(write_predictions(tmp_path / "o", trace, N, "oracle")).chunks(T)
    assert not rest
    for horizon in (1, 2):
        for layer in range(L):
            said = ids[:, layer, horizon - 1]
            if layer + horizon >= L:
                assert (said == -1).all() and (claims[:, layer, horizon - 1] == 0).all()
            else:
                assert np.array_equal(np.sort(said[:, :K]), np.sort(chosen[:, layer + horizon]))
                assert (said[:, K:] == -1).all()


def test_golden_the_oracle_ranks_by_score_then_lower_id():
    chosen = np.array([[[0, 1], [5, 3], [2, 7]]])  # one token, three layers
    scores = np.array([[[1.0, 2.0], [0.5, 0.5], [0.1, 0.9]]], np.float32)
    ids, claims = from_trace(chosen, scores, 3)
    assert ids[0].tolist() == [[[3, 5, -1], [7, 2, -1]], [[7, 2, -1], [-1, -1, -1]], [[-1, -1, -1], [-1, -1, -1]]]
    assert claims[0, 0].tolist() == [[1, 1, 0], [1, 1, 0]]


def test_predictions_fit_the_trace_they_were_made_over(trace, tmp_path):
    Predictions(write_predictions(tmp_path / "p", trace, N)).check(trace)


@pytest.mark.parametrize(
    ("facts", "named"), [({"model_hash": "other"}, "model_hash other"), ({"text_sha256": "x"}, "text_sha256 x")]
)
def test_predictions_of_another_model_or_text_are_refused(facts, named, trace, tmp_path):
    predictions = Predictions(write_predictions(tmp_path / "p", trace, N, **facts))
    with pytest.raises(UserError, match=named):
        predictions.check(trace)


@pytest.mark.parametrize(("shape", "named"), [((T + 1, L, E), "tokens 91"), ((T, L + 1, E), "layers 4")])
def test_predictions_of_another_shape_are_refused(shape, named, trace, tmp_path):
    tokens, layers, experts = shape
    path = tmp_path / "p"
    save_predictions(path, *made_up(tokens, layers, experts, N), experts=experts, provenance=FACTS)
    with pytest.raises(UserError, match=named):
        Predictions(path).check(trace)


# ---- faults ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("array", "place", "value", "named"),
    [
        ("ids", (3, 0, 0, 1), E, "token 3, layer 0: an id outside -1 to 15"),
        ("ids", (3, 0, 0, 0), -1, "token 3, layer 0: an expert after none"),
        ("ids", (60, 2, 0, slice(None)), [0, 1, 2, 3, 4, 5], "token 60, layer 2: an expert of a layer that"),
        ("ids", (60, 1, 0, slice(None)), [0, 1, 0, 3, 4, 5], "token 60, layer 1: an expert twice"),
        ("claims", (89, 0, 1, 0), np.nan, "token 89, layer 0: a claim that is negative, NaN"),
        ("claims", (89, 0, 1, 5), -0.5, "token 89, layer 0: a claim that is negative, NaN"),
        ("claims", (89, 2, 1, 0), 1, "token 89, layer 2: a claim for no expert"),
        ("claims", (0, 0, 0, slice(None)), [0, 1, 0, 0, 0, 0], "token 0, layer 0: claims that rise"),
    ],
)
def test_what_the_arrays_have_wrong_is_named_by_place(array, place, value, named, written):
    arrays, facts = load_file(written), {"schema": "predictions-1", "experts": str(E)}
    arrays[array][place] = value
    save_file(arrays, written, metadata={"expertmiss": json.dumps(facts)})
    with pytest.raises(UserError, match=named):
        list(Predictions(written).chunks(40))


@pytest.mark.parametrize(
    ("arrays", "metadata", "named"),
    [
        ({"ids": np.zeros((2, 2, 2, 2), np.int16)}, {"schema": "predictions-1", "experts": "4"}, "ids I16 and claims"),
        ({}, {"schema": "predictions-1"}, "holds no predictions"),
        ({}, {"schema": "decision-log-1", "experts": "4"}, "holds no predictions"),
    ],
)
def test_a_file_of_something_else_is_refused(arrays, metadata, named, tmp_path):
    path = tmp_path / "p"
    save_file(arrays or {"x": np.zeros(1)}, path, metadata={"expertmiss": json.dumps(metadata)})
    with pytest.raises(UserError, match=named):
        Predictions(path)


@pytest.mark.parametrize("content", [b"", b"no safetensors file at all", None])
def test_no_whole_file_is_refused(content, tmp_path):
    path = tmp_path / "p"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="predict again"):
        Predictions(path)


def test_a_file_that_was_cut_is_refused(written):
    written.write_bytes(written.read_bytes()[:-10])
    with pytest.raises(UserError, match="predict again"):
        list(Predictions(written).chunks())
