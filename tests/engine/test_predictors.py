"""Predictors: laws (no adapter is gate replay to the bit, a wide model's are the small one's), counts, refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine import kernels
from engine.errors import UserError
from engine.hook import attach, stock_handler
from engine.inflate import inflate
from engine.predictors import (
    PREDICTORS,
    TRAINED,
    chances,
    load_predictor,
    make_predictor,
    multiply_adds,
    names,
    of_arrays,
    pairs,
    parameters,
    save_predictor,
)
from engine.routers import log_distribution, logits_of, routers_of

D, E, K, LAYERS, RANK = 64, 16, 4, 4, 8
FACTS = {"model_hash": "these weights"}


def made_up(kind: str, layers: int = LAYERS, width: int = D, rank: int = RANK, seed: int = 3) -> dict:
    """Arrays of a predictor that was never trained."""
    generator, number = torch.Generator().manual_seed(seed), len(pairs(layers))
    if kind == "markov":
        following = torch.rand(layers - 1, E, E, generator=generator)
        return {"following": following / following.sum(-1, keepdim=True)}
    hidden, output = TRAINED[kind]
    rows = width if kind == "mlp" else rank
    return {
        hidden: 0.2 * torch.randn(number, rows, width, generator=generator),
        output: 0.2 * torch.randn(number, E, rows, generator=generator),
    }


@pytest.fixture
def attached(tiny_moe):
    """attached(family) -> attachment of a tiny model of four layers."""
    held = []

    def build(family="qwen3_moe", **configuration):
        configuration.setdefault("num_hidden_layers", LAYERS)
        held.append(attach(tiny_moe(family, **configuration)))
        return held[-1]

    yield build
    for attachment in held:
        attachment.detach()


def listen(attachment, ids):
    """What every layer's router was given, its logits and what it chose, of one pass."""
    calls = []

    def handler(call):
        calls.append((call.router_input.clone(), call.logits.clone(), call.index.clone()))
        return stock_handler(call)

    attachment.handler = handler
    with torch.inference_mode():
        attachment.model(ids)
    return calls


# ---- laws ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_law_an_adapter_of_zeros_is_gate_replay_to_the_bit(tokens, dtype, tiny_moe):
    with attach(tiny_moe("qwen3_moe", num_hidden_layers=LAYERS).to(dtype)) as attachment:
        arrays = made_up("spec_prefetch") | {"B": torch.zeros(len(pairs(LAYERS)), E, RANK)}
        adapter, replay = of_arrays("spec_prefetch", attachment, arrays), make_predictor("gate_replay", attachment)
        other = of_arrays("spec_prefetch", attachment, made_up("spec_prefetch"))
        x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(1)).to(dtype)
        for layer in range(LAYERS):
            assert torch.equal(adapter.predict(layer, x), replay.predict(layer, x))
        assert not torch.equal(other.predict(0, x), replay.predict(0, x))


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen3_moe", "qwen3_next"])
def test_law_gate_replay_is_the_next_routers_softmax_of_this_layers_input(family, attached, random_ids):
    attachment = attached(family, num_hidden_layers=2)
    (x, _, _), _ = listen(attachment, random_ids(20, seed=2))
    replay = make_predictor("gate_replay", attachment)
    wanted = log_distribution(logits_of(routers_of(attachment)[1], x), sigmoid=False).exp()
    assert torch.allclose(replay.predict(0, x)[:, 0], wanted, atol=1e-6)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_law_of_a_sigmoid_family_the_router_itself_ranks_what_is_replayed(family, attached, random_ids):
    """Fed the target layer's own input, the first K names are what it chose: correction bias and groups are counted."""
    attachment = attached(family)
    calls = listen(attachment, random_ids(60, seed=5))
    replay = make_predictor("gate_replay", attachment)
    for target in range(1, LAYERS):
        x, _, chosen = calls[target]
        ids, _ = names(replay.predict(target - 1, x)[:, 0], K)
        assert np.array_equal(np.sort(ids), chosen.sort(-1).values.numpy())


@pytest.mark.parametrize("kind", sorted(set(PREDICTORS) - {"oracle"}))
@pytest.mark.parametrize("tokens", [1, 5])
def test_law_rows_sum_to_one_and_to_zero_beyond_the_last_layer(kind, tokens, attached):
    predictor = of_arrays(kind, attached(), made_up(kind) if kind in TRAINED else None)
    previous = np.tile(np.arange(K), (tokens, LAYERS, 1))
    for layer in range(LAYERS):
        claims = predictor.over_text(layer, torch.randn(tokens, D), previous)
        assert claims.shape == (tokens, 2, E) and claims.dtype == torch.float32 and (claims >= 0).all()
        known = torch.tensor([float(layer + h < LAYERS) for h in (1, 2)])
        assert torch.allclose(claims.sum(-1), known.expand(tokens, 2), atol=1e-5)


@pytest.mark.parametrize("kind", ["gate_replay", "mlp", "spec_prefetch"])
def test_law_one_token_and_many_say_the_same(kind, attached):
    predictor = of_arrays(kind, attached("gpt_oss"), made_up(kind) if kind in TRAINED else None)  # with a bias
    x = torch.randn(7, D, generator=torch.Generator().manual_seed(9))
    for layer in range(LAYERS):
        alone = torch.cat([predictor.predict(layer, x[t : t + 1]) for t in range(7)])
        assert torch.allclose(alone, predictor.predict(layer, x), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [3, E, E + 2])
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_moe"])  # sigmoid, with a bias, without
@pytest.mark.parametrize("kind", sorted(set(PREDICTORS) - {"oracle", "random"}))
def test_law_names_of_a_decoded_token_are_those_of_its_probabilities(kind, family, number, dtype, tiny_moe):
    with attach(tiny_moe(family, num_hidden_layers=LAYERS).to(dtype)) as attachment:
        predictor = of_arrays(kind, attachment, made_up(kind) if kind in TRAINED else None)
        for layer in range(LAYERS):
            predictor.observe(layer, np.arange(K)[None])
        x = (3 * torch.randn(6, D, generator=torch.Generator().manual_seed(11))).to(dtype)
        for layer, token in np.ndindex(LAYERS, len(x)):
            claims = predictor.predict(layer, x[token : token + 1])[0].numpy()
            said = predictor.names(layer, x[token : token + 1], number)
            ids, wanted = names(claims, number, K)
            near = {"atol": 0.15 if dtype == torch.bfloat16 else 1e-4}  # fourth powers
            assert [array.dtype for array in said] == [np.int32, np.float64] and said[0].shape == (2, number)
            np.testing.assert_allclose(said[1], wanted, **near)
            own = np.where(said[0] >= 0, np.take_along_axis(claims, np.maximum(said[0], 0), -1), 0)
            np.testing.assert_allclose(chances(own, K), said[1], **near)
            assert np.array_equal(said[0] < 0, ids < 0)
            assert all(len({*row} - {-1}) == (row >= 0).sum() for row in said[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_golden_compiled_names_fall_and_ties_go_to_the_lower_id(dtype):
    """Rows of one target: 2, 5, 5, 1, 5; of the other: the bias alone decides."""
    weight = torch.tensor([[2.0, 0], [5, 0], [5, 0], [1, 0], [5, 0], *[[0, 0]] * 5]).to(dtype)
    bias = np.array([0] * 5 + [0, 0, 3, 0, 4], np.float32)
    ids, claims = np.full((3, 4), -1, np.int32), np.zeros((3, 4))
    kernels.foretell(weight, torch.tensor([[1.0, 7.0]]).to(dtype), bias, 5, ids, claims)
    assert ids.tolist() == [[1, 2, 4, 0], [4, 2, 0, 1], [-1] * 4]
    odds = np.exp([[5, 5, 5, 2], [4, 3, 0, 0]])
    np.testing.assert_allclose(claims[:2], odds / (odds.sum(-1) + np.exp([1, 0]))[:, None], rtol=1e-6)
    assert (claims[2] == 0).all()


@pytest.mark.parametrize("kind", ["gate_replay", "mlp", "spec_prefetch"])
def test_law_on_the_inflated_model_a_predictor_says_the_same(kind, tiny_moe, random_ids, tmp_path):
    tiny_moe("qwen3_moe", num_hidden_layers=LAYERS).save_pretrained(tmp_path / "own")
    inflate(tmp_path / "own", tmp_path / "wide", width=4 * D, dtype="float32")
    path = tmp_path / f"{kind}.safetensors"
    if kind in TRAINED:
        save_predictor(path, kind, made_up(kind), FACTS)
    said = []
    for name in ("own", "wide"):
        with attach(AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()) as attachment:
            calls = listen(attachment, random_ids(40, seed=4))
            assert calls[0][0].shape[1] == (D if name == "own" else 4 * D)
            predictor = make_predictor(kind, attachment, tmp_path)
            said.append([predictor.predict(layer, x) for layer, (x, _, _) in enumerate(calls)])
    for own, wide in zip(*said, strict=True):
        assert torch.allclose(own, wide, atol=1e-4)
    assert said[0][0].max() > 0.2  # far from telling nothing


def test_law_markov_in_decoding_says_what_it_says_over_the_text(attached):
    predictor = of_arrays("markov", attached(), made_up("markov"))
    chosen = np.argsort(np.random.default_rng(6).random((9, LAYERS, E)), axis=-1)[..., :K]
    previous = np.concatenate([np.full((1, LAYERS, K), -1), chosen[:-1]])
    x = torch.zeros(1, D)
    for _ in range(2):  # a second sequence knows nothing of the first
        predictor.reset()
        for token in range(9):
            for layer in range(LAYERS):
                claims = predictor.predict(layer, x)
                assert torch.equal(claims, predictor.over_text(layer, x, previous[token : token + 1]))
                assert (claims == 0).all() == (token == 0 or layer == LAYERS - 1)
                predictor.observe(layer, chosen[token : token + 1, layer])


def test_random_says_the_same_in_every_run(attached):
    attachment, x = attached(), torch.zeros(3, D)
    runs = [[predictor.predict(layer, x) for layer in (0, 1, 0)] for predictor in
            (make_predictor("random", attachment) for _ in range(2))]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert not torch.equal(runs[0][0], runs[0][2])


# ---- golden ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "layers", "width", "experts", "wanted"),
    [
        ("spec_prefetch", 11, 1280, 64, 1_634_304),  # as published
        ("spec_prefetch", 48, 2048, 128, 12_951_552),
        ("mlp", 11, 1280, 64, 32_686_080),
        ("mlp", 48, 2048, 128, 414_449_664),
        ("gate_replay", 48, 2048, 128, 0),
        ("markov", 3, 1280, 64, 2 * 64 * 64),
    ],
)
def test_golden_parameters(kind, layers, width, experts, wanted):
    assert parameters(kind, layers, width, experts, rank=64) == wanted


def test_golden_pairs_and_multiply_adds():
    assert pairs(4) == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)] and pairs(1) == [] and len(pairs(48)) == 93
    assert multiply_adds("spec_prefetch", 4, 100, 10, 2) == multiply_adds("gate_replay", 4, 100, 10, 2) == 5000
    assert multiply_adds("mlp", 4, 100, 10, 2) == 55_000 and multiply_adds("oracle", 4, 100, 10, 2) == 0


@pytest.mark.parametrize("kind", sorted(TRAINED))
def test_a_predictor_holds_as_many_numbers_as_are_counted(kind, attached):
    assert of_arrays(kind, attached(), made_up(kind)).parameters == parameters(kind, LAYERS, D, E, RANK)


def test_golden_names_fall_and_ties_go_to_the_lower_id():
    rows = [[0.1, 0.3, 0.3, 0.0, 0.3], [0.0] * 5, [0.0, 0.0, 0.0, 1.0, 0.0]]
    ids, claims = names(np.array(rows, np.float32), 4)
    assert ids.tolist() == [[1, 2, 4, 0], [-1] * 4, [3, 0, 1, 2]]
    assert claims.tolist() == np.array([[0.3, 0.3, 0.3, 0.1], [0] * 4, [1, 0, 0, 0]], np.float32).tolist()
    assert (ids.dtype, claims.dtype) == (np.int32, np.float64)
    assert names(torch.tensor(rows), 7)[0][0].tolist() == [1, 2, 4, 0, 3, -1, -1]


def test_law_names_are_those_of_a_stable_sort():
    rows = np.random.default_rng(8).integers(1, 9, (50, 2, 256)).astype(np.float32) / 9  # many ties
    ids, claims = names(rows, 16)
    wanted = np.argsort(-rows, axis=-1, kind="stable")[..., :16]
    assert np.array_equal(ids, wanted) and np.array_equal(claims, np.take_along_axis(rows, wanted, -1))


# ---- bad input -------------------------------------------------------------------------------------------------------
@pytest.fixture
def saved(tmp_path):
    """saved(kind, **arrays) -> the file of a predictor."""

    def save(kind, **options):
        save_predictor(tmp_path / f"{kind}.safetensors", kind, made_up(kind, **options), FACTS)
        return tmp_path / f"{kind}.safetensors"

    return save


@pytest.mark.parametrize("kind", sorted(TRAINED))
def test_law_a_predictor_read_back_says_the_same(kind, saved, attached):
    attachment, x, previous = attached(), torch.randn(5, D), np.zeros((5, LAYERS, K), int)
    own, read = of_arrays(kind, attachment, made_up(kind)), load_predictor(saved(kind), attachment, "these weights")
    assert read.kind == kind and read.horizons == 2 and (read.layers, read.experts, read.top_k) == (LAYERS, E, K)
    for layer in range(LAYERS):
        assert torch.equal(own.over_text(layer, x, previous), read.over_text(layer, x, previous))


def test_a_predictor_of_another_model_is_refused(saved, attached):
    with pytest.raises(UserError, match="a predictor of model these weights; expected one of others"):
        load_predictor(saved("spec_prefetch"), attached(), "others")


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("spec_prefetch", {"width": D + 1}, r"A \[5, 8, 65\]; expected \[5, 8, 64\]"),
        ("spec_prefetch", {"width": D // 2}, r"A \[5, 8, 32\]; expected \[5, 8, 64\]"),  # not a power of four
        ("mlp", {"layers": 3}, r"hidden \[3, 64, 64\]; expected \[5, 64, 64\]"),
        ("markov", {"layers": 3}, r"following \[2, 16, 16\]; expected \[3, 16, 16\]"),
    ],
)
def test_a_predictor_of_another_shape_is_refused(kind, options, named, saved, attached):
    with pytest.raises(UserError, match=named):
        load_predictor(saved(kind, **options), attached())


def test_weights_that_are_no_numbers_are_refused(saved, attached):
    path = saved("mlp")
    arrays = load_file(path)
    arrays["output"][0, 0, 0] = torch.nan
    save_predictor(path, "mlp", arrays, FACTS)
    with pytest.raises(UserError, match="output with numbers that are not finite"):
        load_predictor(path, attached())


@pytest.mark.parametrize(
    ("arrays", "facts", "named"),
    [
        (None, None, "a whole predictor"),
        ("text", None, "a whole predictor"),
        ({"A": torch.zeros(1)}, {"schema": "predictor-1", "kind": "spec_prefetch"}, "is no predictor"),
        (made_up("markov"), {"schema": "predictor-1", "kind": "mlp"}, "is no predictor"),
        (made_up("markov"), {"schema": "decision-log-1", "kind": "markov"}, "is no predictor"),
        (made_up("markov"), {"schema": "predictor-1", "kind": "oracle"}, "is no predictor"),
    ],
)
def test_no_predictor_is_refused(arrays, facts, named, tmp_path, attached):
    path = tmp_path / "p.safetensors"
    if isinstance(arrays, str):
        path.write_text(arrays)
    elif arrays is not None:
        save_file(arrays, path, metadata={"expertmiss": json.dumps(facts)})
    with pytest.raises(UserError, match=named):
        load_predictor(path, attached())


@pytest.mark.parametrize(
    ("kind", "named"),
    [("spec_prefech", "did you mean 'spec_prefetch'"), ("oracle", "needs no future"), ("mlp", "without a folder")],
)
def test_a_predictor_that_cannot_be_made_is_refused_by_name(kind, named, attached):
    with pytest.raises(UserError, match=named):
        make_predictor(kind, attached())


@pytest.mark.parametrize("change", ["two", "none"])
def test_a_router_without_exactly_one_product_is_refused_by_name(change, attached):
    attachment = attached()
    router = attachment.routers[2]
    if change == "two":
        router.other = torch.nn.Parameter(torch.zeros(E, 3))
    else:
        router.weight = torch.nn.Parameter(torch.zeros(E, D, 1))
    with pytest.raises(UserError, match=r"layer 2: router Qwen3MoeTopKRouter with .*weight \[16, 64"):
        make_predictor("gate_replay", attachment)


def test_many_tokens_of_markov_have_no_order_in_decoding(attached):
    with pytest.raises(UserError, match="5 tokens at once"):
        of_arrays("markov", attached(), made_up("markov")).predict(0, torch.zeros(5, D))


# ---- chances ---------------------------------------------------------------------------------------------------------
def test_golden_chances_are_odds_of_the_claim_over_the_first_that_is_none_of_the_k():
    claims = np.array([[0.4, 0.2, 0.1, 0.05, 0.0]])
    found = chances(claims, 2)  # the bar is 0.1
    odds = np.exp(-1) * np.array([4.0, 2.0, 1.0, 0.5, 0.0]) ** 4
    np.testing.assert_allclose(found[0], odds / (1 + odds), rtol=1e-12)


@pytest.mark.parametrize("number", [3, 8, 20])
def test_law_chances_keep_the_order_and_zero(number):
    rng = np.random.default_rng(number)
    p = rng.dirichlet(np.full(16, 0.3), size=50).astype(np.float32)
    p[7] = 0
    ids, plain = names(p, number)
    same, found = names(p, number, 4)
    assert (ids == same).all() and (np.diff(found, axis=-1) <= 0).all()
    assert ((0 <= found) & (found <= 1)).all() and ((found == 0) == (plain == 0)).all()
