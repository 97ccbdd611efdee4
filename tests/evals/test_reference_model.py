"""Laws of the training target: our passes equal transformers', runs repeat and resume, packing keeps its bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import UserError
from evals.reference_model import checkpoint, pack, train
from evals.reference_model import model as rm
from evals.reference_model.data import train_tokenizer
from evals.reference_model.export import hugging_face_config, hugging_face_tensors, training_parameters, write_folder
from evals.reference_model.optimiser import Rates, muon_update, schedule
from evals.reference_model.recipe import Recipe, Schedule
from evals.reference_model.recipe import load as load_recipe

TINY = rm.Shape(
    layers=2, width=32, experts=8, chosen=3, expert_width=16, heads=4, key_value_heads=2, head_width=16,
    vocabulary=64, norm_topk_prob=True, context=96,
)  # fmt: skip


def stock_model(shape: rm.Shape, parameters: dict[str, torch.Tensor], folder):
    import json

    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(hugging_face_config(shape, "float32")))
    save_file(hugging_face_tensors(shape, parameters), folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )


@pytest.mark.parametrize("normalise", [True, False])
def test_forward_and_backward_equal_stock_qwen3moe(tmp_path, normalise):
    from dataclasses import replace

    shape = replace(TINY, norm_topk_prob=normalise)
    parameters = rm.initial_parameters(shape, 3)
    for name in parameters:
        parameters[name] *= 1 if name.endswith("norm") else 5
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, shape.vocabulary, (2, shape.context + 1))
    tokens[:, 0] = 0
    stock = stock_model(shape, parameters, tmp_path)
    ids = torch.from_numpy(tokens)
    logits = stock(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    step = rm.Step(shape, parameters, 2, 0.0, "float32")
    assert step.losses(tokens).mean().item() == pytest.approx(loss.item(), abs=2e-5)
    ours, _ = step.loss_and_gradients(tokens)
    assert ours == pytest.approx(loss.item(), abs=2e-5)
    expected = {name: value.grad for name, value in stock.named_parameters()}
    i = "model.layers.1"
    pairs = {
        "embed": expected["model.embed_tokens.weight"],
        "1.router": expected[f"{i}.mlp.gate.weight"],
        "1.gate_up": expected[f"{i}.mlp.experts.gate_up_proj"],
        "0.down": expected["model.layers.0.mlp.experts.down_proj"],
        "0.o": expected["model.layers.0.self_attn.o_proj.weight"],
        "1.q_norm": expected[f"{i}.self_attn.q_norm.weight"],
        "0.k_norm": expected["model.layers.0.self_attn.k_norm.weight"],
        "0.moe_norm": expected["model.layers.0.post_attention_layernorm.weight"],
        "0.attention_norm": expected["model.layers.0.input_layernorm.weight"],
        "final_norm": expected["model.norm.weight"],
        "0.qkv": torch.cat([expected[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]),
    }
    for name, value in pairs.items():
        scale = value.abs().max()
        assert (step.gradients[name] - value).abs().max() < 1e-4 * scale, name


def test_attention_stays_inside_documents():
    """Law: out and gradients equal scaled_dot_product_attention under the mask of documents, blocks cut anywhere."""
    from evals.reference_model import attention_kernels as ak

    t, rng = 150, np.random.default_rng(0)
    tokens = rng.integers(1, 50, (2, t))
    tokens[0, [0, 70, 100, 101, 140]] = 0
    tokens[1, [5, 130]] = 0
    start = rm.document_starts(tokens)
    q, k, v = (rng.standard_normal((2, heads, t, 16), np.float32) for heads in (4, 2, 2))
    out, lse = np.empty((2, t, 64), np.float32), np.empty((2, 4, t), np.float32)
    dout, grads = rng.standard_normal(out.shape, np.float32), [np.empty_like(x) for x in (q, k, v)]
    ak.attention_forward(q, k, v, start, 0.25, out, lse)
    ak.attention_backward(q, k, v, start, 0.25, out, lse, dout, *grads)
    inputs = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    at = torch.arange(t)
    mask = (at[None, None] <= at[None, :, None]) & (at[None, None] >= torch.tensor(start)[:, :, None])
    wide = [inputs[0], *(x.repeat_interleave(2, 1) for x in inputs[1:])]
    stock = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask[:, None], scale=0.25)
    stock = stock.transpose(1, 2).reshape(out.shape)
    stock.backward(torch.tensor(dout))
    for ours, expected in zip([out, *grads], [stock.detach(), *(x.grad for x in inputs)], strict=True):
        assert np.abs(ours - expected.numpy()).max() < 1e-5


def tiny_run(threads=1, decay_shares=None, settle=(), **settings):
    recipe = Recipe(
        id="tiny", seed=5, shape=TINY, rates=Rates(), schedule=Schedule(3, 96 * 2 * 8, 96 * 2 * 4, *settle),
        shares={"a": 0.7, "b": 0.3}, join={}, balance=0.01, batch=2, licence="MIT",
        decay_shares=decay_shares,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    tokens = {
        topic: rng.integers(0, 64, 2000).astype(np.uint16) for topic in dict.fromkeys([*"ab", *(decay_shares or {})])
    }
    return train.Run(recipe, tokens, train.Settings(threads=threads, **settings), {}, None)


def weights_of(run):
    return torch.cat([value.flatten() for value in run.parameters.values()])


def test_same_seed_gives_the_same_steps():
    one, two = tiny_run(threads=2), tiny_run(threads=2)
    assert [one.advance() for _ in range(3)] == [two.advance() for _ in range(3)]
    assert torch.equal(weights_of(one), weights_of(two))


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    whole = tiny_run()
    assert train.train(whole, tmp_path / "whole") is True
    part = tiny_run(stop_step=7)
    assert train.train(part, tmp_path / "part") is False
    rest = tiny_run()
    rest.resume(checkpoint.latest(tmp_path / "part"))
    assert train.train(rest, tmp_path / "part") is True
    assert rest.optimiser.count == 12
    assert torch.equal(weights_of(whole), weights_of(rest))
    for name, value in whole.optimiser.first.items():
        assert torch.equal(value, rest.optimiser.first[name])


def test_checkpoint_cut_short_is_a_user_error(tmp_path):
    run = tiny_run()
    path = run.save(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="delete it"):
        tiny_run().resume(path)


def test_schedule_golden():
    factors = [schedule(step, 4, 8, 3) for step in range(11)]
    assert factors == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert schedule(1000, 4, None, 0) == 1.0


def test_muon_update_has_even_singular_values():
    """Law: singular values lie in Newton-Schulz's band around one, both orientations; a zero gradient moves nothing."""
    rng = np.random.default_rng(0)
    for rows, cols in ((8, 32), (32, 8)):
        gradient = rng.standard_normal((3, rows, cols), np.float32)
        gradient[2] = 0
        weight = np.zeros_like(gradient)
        f = np.float32
        muon_update(weight, gradient, np.zeros_like(weight), rows > cols, f(1), f(1), f(0.95), f(1))
        values = np.linalg.svd(weight[:2], compute_uv=False)
        assert values.min() > 0.6 and values.max() < 1.3
        assert (np.einsum("mij,mij->m", weight, gradient)[:2] < 0).all()
        assert not weight[2].any()


def test_batches_keep_shares_and_resume():
    run = tiny_run()
    first = [run.batches.next(2) for _ in range(30)]
    assert run.batches.dealt == {"a": 42, "b": 18}
    again = tiny_run()
    again.batches.dealt = {"a": 21, "b": 9}
    assert all(np.array_equal(again.batches.next(2), one) for one in first[15:])


def test_law_settling_begins_after_the_decay_with_its_own_rate_and_balance(tmp_path):
    run = tiny_run(settle=(96 * 2 * 4, 0.5, 0.001))
    found = []
    while run.optimiser.count < run.last_step():
        found.append((run.advance()["factor"], run.step.balance))
    assert [factor for factor, _ in found[:3]] == pytest.approx([1 / 3, 2 / 3, 1])
    assert [factor for factor, _ in found[8:]] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.4, 0.3, 0.2, 0.1])
    assert [balance for _, balance in found] == [0.01] * 12 + [0.001] * 4
    branch = tiny_run(settle=(96 * 2 * 4, 0.5, 0.001), decay_from=8, decay_steps=2)
    assert branch.last_step() == 10


LATE = {"a": 0.5, "0": 0.5}  # the new topic sorts first: it must not change the order of the others


def test_decay_shares_change_the_decay_alone(tmp_path):
    """Law: stable batches are the same; in the decay shares hold from its first step, a new topic does not catch up."""
    plain, late = tiny_run(), tiny_run(decay_shares=LATE)
    assert late.decay() == (8, 4)
    for _ in range(8):
        assert np.array_equal(plain.batches.next(2), late.batches.next(2))
    late.batches.begin_decay()
    before = dict(late.batches.dealt)
    for _ in range(4):
        late.batches.next(2)
    assert {t: late.batches.dealt[t] - before[t] for t in "ab0"} == {"a": 4, "b": 0, "0": 4}


@pytest.mark.parametrize("stop", [7, 8, 10])
def test_resumed_with_decay_shares_equals_uninterrupted(tmp_path, stop):
    whole, part = tiny_run(decay_shares=LATE), tiny_run(decay_shares=LATE, stop_step=stop)
    train.train(whole, tmp_path / "whole")
    train.train(part, tmp_path / "part")
    rest = tiny_run(decay_shares=LATE)
    rest.resume(checkpoint.latest(tmp_path / "part"))
    train.train(rest, tmp_path / "part")
    assert rest.batches.dealt == whole.batches.dealt and whole.batches.dealt["0"] == 4
    assert torch.equal(weights_of(whole), weights_of(rest))


def test_checkpoint_without_the_topics_of_the_decay_loads(tmp_path):
    """A recipe may gain decay shares while its run goes on; a branch of that run decays by them too."""
    old = tiny_run(stop_step=5)
    train.train(old, tmp_path / "run")
    path = checkpoint.latest(tmp_path / "run")
    run = tiny_run(decay_shares=LATE)
    run.resume(path)
    assert run.batches.dealt == old.batches.dealt | {"0": 0}
    branch = tiny_run(decay_shares=LATE, decay_from=5, decay_steps=2)
    branch.resume(path)
    assert train.train(branch, tmp_path / "branch") is True
    assert branch.batches.dealt["0"] == 2
    with pytest.raises(UserError, match="topics of another recipe"):
        tiny_run().resume(checkpoint.latest(tmp_path / "branch"))


def test_prepare_adds_topics_and_touches_nothing_else(tmp_path, monkeypatch):
    from evals import corpora
    from evals.reference_model import data

    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    rows = [(t, corpora.Document(f"{t}/{n}", " ".join(words[n % 12 :]) * 30)) for t in "abc" for n in range(9)]
    asked = []

    def documents(topics):
        asked.append(sorted(topics))
        return [row for row in rows if row[0] in topics]

    monkeypatch.setattr(corpora, "training_documents", documents)
    monkeypatch.setattr(data, "corpus_facts", lambda topics: [{"topic": topic} for topic in topics])
    first = data.prepare(tmp_path, 270, {"b": 500}, 1, "ab")
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "data.json"}
    more = data.prepare(tmp_path, 270, {"b": 500}, 1, "ab", "ac")
    assert asked == [["a", "b"], ["c"]] and set(more["topics"]) == set("abc") and set(first["topics"]) == set("ab")
    assert all((tmp_path / name).read_bytes() == content for name, content in kept.items())
    assert more["topics"]["a"] == first["topics"]["a"] and [row["topic"] for row in more["texts"]] == ["a", "b", "c"]
    assert data.prepare(tmp_path, 270, {}, 1, "ab", "c") == more
    with pytest.raises(UserError, match="no training text of topic 'd'"):
        data.prepare(tmp_path, 270, {}, 1, "ab", "d")


def test_shares_that_do_not_sum_to_one_are_refused(tmp_path):
    (tmp_path / "r.yaml").write_text("x:\n  decay_shares: {a: 0.5, b: 0.4}\n")
    with pytest.raises(UserError, match=r"decay_shares sum to 0\.9"):
        load_recipe(tmp_path / "r.yaml", "x")


@pytest.fixture
def tiny_folder(tmp_path):
    tokenizer = train_tokenizer({"a": ["one two three " * 20]}, 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    parameters = rm.initial_parameters(TINY, 3)
    write_folder(TINY, parameters, tmp_path / "tokenizer.json", tmp_path / "export")
    return tmp_path / "export", parameters


def test_packing_keeps_its_bound_and_is_deterministic(tiny_folder, tmp_path):
    folder, parameters = tiny_folder
    one, two = pack.pack(folder, tmp_path / "one"), pack.pack(folder, tmp_path / "two")
    assert one.read_bytes() == two.read_bytes()
    back = training_parameters(TINY, pack.unpack_tensors(one, "float32"))
    for name, weight in parameters.items():
        if weight.dim() < 2 or name.endswith("router"):
            assert torch.equal(back[name], weight.bfloat16().float())
        else:
            bound = weight.abs().amax(-1, keepdim=True) / 254
            assert ((back[name] - weight).abs() <= bound * 1.001).all(), name
    plain, other = pack.unpack(tmp_path / "one", tmp_path / "p1"), pack.unpack(tmp_path / "one", tmp_path / "p2")
    assert plain.read_bytes() == other.read_bytes()


def test_unpacked_folder_loads_in_stock_transformers(tiny_folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pack.pack(tiny_folder[0], tmp_path / "packed")
    pack.unpack(tmp_path / "packed", tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert model.dtype == torch.bfloat16 and model.config.num_experts == TINY.experts
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert tokenizer.decode(tokenizer("one two")["input_ids"]) == "one two"
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0


def test_cut_or_foreign_file_is_a_user_error(tiny_folder, tmp_path):
    packed = pack.pack(tiny_folder[0], tmp_path / "packed")
    whole = packed.read_bytes()
    for cut in (len(whole) - 1, 100, 4):
        packed.write_bytes(whole[:cut])
        with pytest.raises(UserError, match="whole safetensors"):
            pack.unpack(tmp_path / "packed", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
    with pytest.raises(UserError, match="metadata"):
        pack.unpack_tensors(tiny_folder[0] / "model.safetensors")


def test_unknown_recipe_key_names_the_known_ones(tmp_path):
    (tmp_path / "r.yaml").write_text("x:\n  sedd: 1\n")
    with pytest.raises(UserError, match=r"unknown key 'sedd'.*did you mean 'seed'"):
        load_recipe(tmp_path / "r.yaml", "x")
