"""Which families of transformers' experts interface does the engine run? Each is built tiny, by one rule, and tried.

    python -m tests.families            # the table on standard output, under a minute
    python -m tests.families --write    # docs/families.md

A family is a folder of transformers whose modelling code is decorated with `use_experts_implementation`; what is tried
is every configuration of it that AutoModelForCausalLM takes, shrunk by SIZES, which knows keys and no family. Whatever
a fresh model has the same in all its entries is shaken (correction biases of zero, scales of one, router weights): they
would hide what a trained model shows. Then it is saved as save_pretrained does, and the folder is opened by the engine:
attach, S = E against stock in emulator and engine with its cache, a lossy policy that shows in both.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from engine.emulator import Emulator
from engine.errors import UserError
from engine.files import atomic
from engine.geometry import EXPERTS_KEYS, TOP_K_KEYS
from engine.hook import attach
from engine.log import count
from engine.offload_model import OpenModel
from engine.policies import load_policies
from engine.residency import Demand

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families.md"
POLICIES = load_policies(ROOT / "config" / "policies.tsv")
WORKS, NO_CAUSAL = "works", "refused: no causal language model"

# {size: what configurations call it}; a key that one lacks is not set
_NAMES = {
    1: "attn_layer_offset first_k_dense_replace indexer_kv_heads n_shared_experts num_dense_layers",
    2: "attn_layer_period linear_num_key_heads num_key_value_heads topk_group",
    4: "indexer_compress_ratio indexer_n_heads index_n_heads linear_num_heads linear_num_value_heads n_group n_groups "
    "num_attention_heads num_expert_group num_hidden_layers swa_num_attention_heads swa_num_key_value_heads",
    8: "mamba_n_heads mamba_num_heads qk_nope_head_dim qk_rope_head_dim",
    16: "hc_lowrank head_dim hidden_size_per_layer_input indexer_head_dim kv_lora_rank linear_head_dim "
    "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_d_state mamba_head_dim q_lora_rank "
    "ssm_state_size swa_head_dim v_head_dim " + " ".join(EXPERTS_KEYS),
    32: "intermediate_size moe_intermediate_size moe_shared_expert_intermediate_size shared_expert_intermediate_size "
    "shared_experts_intermediate_size dense_intermediate_size",
    64: "hidden_size index_head_dim indexer_budget ple_embed_dim rel_extent router_hidden_size",
    128: "unpadded_vocab_size vocab_size vocab_size_per_layer_input",
    256: "ngram_vocab_size_base",
    512: "max_position_embeddings",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()} | {
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "enable_moe_block": True,
    "initializer_range": 0.1,
    "per_layer_config": {},
}
TOP_K_NAMES = (*TOP_K_KEYS, "moe_topk", "num_experts_per_token")
LAYERS, VOCABULARY, SEED = SIZES["num_hidden_layers"], SIZES["vocab_size"], 20
PROMPT, DECODED = 12, 2
TOP_K = (4, 2, 1)  # the first that the family accepts
VARIANTS = {"expert_selection_fn": "sigmoid", "topk_method": "group_limited_greedy"}  # other ways to choose: rows too
OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types")  # a word a layer


@dataclass(frozen=True)
class Row:
    """A model type of a family and what came of it. rule: that attach found, - where it found none."""

    family: str
    model: str
    rule: str
    outcome: str


class Different(Exception):
    """The engine does not compute what the stock model does: no refusal, a fault."""


# ---- the families, and a tiny model of each --------------------------------------------------------------------------
def families() -> dict[str, list[type]]:
    """{folder of transformers.models: its configurations that AutoModelForCausalLM takes}, of text alone."""
    folder = Path(transformers.__file__).parent / "models"
    mark = "@use_experts_implementation"
    names = sorted({p.parent.name for p in folder.glob("*/modeling_*.py") if mark in p.read_text(encoding="utf-8")})
    classes = [c for c in map(CONFIG_MAPPING.__getitem__, CONFIG_MAPPING) if c in MODEL_FOR_CAUSAL_LM_MAPPING]
    classes = [c for c in classes if "text_config" not in c.sub_configs]
    return {name: [c for c in classes if c.__module__.split(".")[2] == name] for name in names}


def tiny_config(kind: type, top_k: int, **variant: str):
    own = kind().to_dict()
    sizes = SIZES | dict.fromkeys(TOP_K_NAMES, top_k)
    if "qk_rope_head_dim" in own:  # latent attention
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        if own.get("head_dim") == own["qk_rope_head_dim"]:
            sizes["head_dim"] = sizes["qk_rope_head_dim"]
    sizes = {key: value for key, value in sizes.items() if key in own or key in kind.attribute_map}
    for key in OF_LAYERS:
        if key in own:
            kinds = list(dict.fromkeys(own[key] or ()))
            if set(kinds) <= {"linear_attention"} and key == "layer_types":
                kinds.append("full_attention")
            sizes[key] = (kinds + kinds[-1:] * LAYERS)[:LAYERS]
    return kind(**sizes, **variant)


def tiny_model(kind: type, **variant: str):
    """Raises whatever the family raises of a configuration that it does not take."""
    for top_k in TOP_K:
        try:
            config = tiny_config(kind, top_k, **variant)
            torch.manual_seed(SEED)
            model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
            _shake(model)
            model(input_ids=torch.zeros(1, PROMPT, dtype=torch.long))
            return model
        except (AssertionError, StrictDataclassError, ValueError):  # some count other than the first
            if top_k == TOP_K[-1]:
                raise


def _shake(model) -> None:
    generator = torch.Generator().manual_seed(SEED)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.numel() > 1 and (tensor == tensor.view(-1)[0]).all():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)


# ---- what is tried ---------------------------------------------------------------------------------------------------
def steps(model, ids: torch.Tensor, instrument=None) -> torch.Tensor:
    """Logits [1, T, V]: a prompt, then tokens one by one with the model's own cache."""
    found, cache = [], None
    for part, phase in (
        (ids[:, :PROMPT], "prefill"),
        *((ids[:, t : t + 1], "decode") for t in range(PROMPT, ids.shape[1])),
    ):
        with instrument.phase(phase) if instrument else nullcontext():
            output = model(input_ids=part, cache=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, 1)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=1e-3, atol=1e-3)


def check(name: str, fine: bool) -> None:
    if not fine:
        raise Different(name)


def check_instrument(name: str, model, ids, stock, make, attachment) -> None:
    """make(policy, slots) -> emulator or engine. S = E is the stock model; with S = K a lossy policy shows."""
    demands = attachment.top_k * len(attachment.layers) * DECODED
    exact = make("speed_first", attachment.experts)
    check(f"{name}, S = E: not the stock model", close(steps(model, ids, exact), stock))
    hits = count(exact.log())["hits"]
    check(f"{name}, S = E: {hits} hits of {demands}", hits == demands)
    lossy = make("substitute_all", attachment.top_k)
    found = steps(model, ids, lossy)
    check(f"{name}, S = K: nothing was substituted", count(lossy.log())["substitutions"] > 0)
    check(f"{name}, S = K: logits that are not finite", bool(found.isfinite().all()))
    check(f"{name}, S = K: prefill is not exact", close(found[:, :PROMPT], stock[:, :PROMPT]))
    check(f"{name}, S = K: the same logits", not close(found[:, PROMPT:], stock[:, PROMPT:]))


def try_folder(folder: Path) -> str:
    """The score rule. Raises UserError where the model is refused, Different where it is wrong."""
    stock = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    ids = torch.randint(3, VOCABULARY, (1, PROMPT + DECODED), generator=torch.Generator().manual_seed(SEED))
    logits = steps(stock, ids)
    check("the stock model's steps are not its pass over the whole text", close(logits, stock(input_ids=ids).logits))
    with attach(stock) as attachment:
        warm = Demand(np.ones((len(attachment.layers), attachment.experts), np.int64), 1)

        def emulator(policy, slots):
            return Emulator(attachment, POLICIES[policy], slots=slots, demand=warm)

        check_instrument("emulator", stock, ids, logits, emulator, attachment)
    with OpenModel(folder, torch.float32) as opened:

        def engine(policy, slots):
            made = opened.engine(slots=slots, demand=warm)
            made.use(POLICIES[policy])
            return made

        check_instrument("engine", opened.model, ids, logits, engine, opened.attachment)
        return opened.attachment.rule_name


@torch.inference_mode()
def try_family(name: str, kinds: list[type]) -> list[Row]:
    rows = [] if kinds else [Row(name, "-", "-", NO_CAUSAL)]
    for kind in kinds:
        rows.append(Row(name, kind.model_type, *_try(kind)))
        for key, value in VARIANTS.items():
            if hasattr(kind(), key):
                rows.append(Row(name, f"{kind.model_type}, {key} {value}", *_try(kind, **{key: value})))
    return rows


def _try(kind: type, **variant: str) -> tuple[str, str]:
    """Score rule and outcome."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of configurations that are smaller than their families are
        tiny_model(kind, **variant).save_pretrained(folder)
        try:
            return try_folder(Path(folder)), WORKS
        except UserError as exc:
            return "-", f"refused: {str(exc).split('; expected')[0].split(' is refused: ')[-1]}"


# ---- the page --------------------------------------------------------------------------------------------------------
HEAD = "| family | `model_type` | score rule | outcome |\n|---|---|---|---|\n"


def page(rows: list[Row]) -> str:
    number = len({row.family for row in rows})
    works = len({row.family for row in rows if row.outcome == WORKS})
    return f"""# Which families of models work

transformers {transformers.__version__} sends the experts of these {number} families through one interface. Of each, a
tiny random model was saved as its files are, opened by the engine and compared with what transformers makes of it: with
all experts resident it must be the same model, in prefill and in decoding with its own cache, and a lossy policy must
show. **{works} work.** The others are refused by name when they are opened: `refused`, and why. `no causal language
model`: AutoModelForCausalLM knows none (most are models of pictures and text). The score rule is found by trying
([engine/score_rules.py](../engine/score_rules.py)); a family that is not in this table is tried in the same way when it
is opened.

Written by `python -m tests.families --write`; a test compares this table with what is found.

{HEAD}""" + "".join(f"| {r.family} | {r.model} | {r.rule} | {r.outcome} |\n" for r in rows)


def committed() -> list[Row]:
    lines = PAGE.read_text(encoding="utf-8").split(HEAD)[1].splitlines()
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} instead of printing it")
    write = parser.parse_args().write
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # models this small wait longer for a second one than they compute
    text = page([row for name, kinds in families().items() for row in try_family(name, kinds)])
    if not write:
        print(text, end="")
        return
    with atomic(PAGE) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
