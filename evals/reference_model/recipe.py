"""A recipe: one block of config/reference_models.yaml, checked, with every unknown key an error."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import yaml

from engine.errors import error, nearest
from evals.reference_model.model import Shape
from evals.reference_model.optimiser import Rates


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, stable, linear decay to zero; then, where wanted, `settle_tokens` at another load-balance weight.

    Settling lets experts be chosen as unevenly as the text wants them: a model trained evenly to the end misses more
    than the fitness gate allows. Its rates fall linearly from `settle_factor` to zero.
    """

    warmup: int
    stable_tokens: int
    decay_tokens: int
    settle_tokens: int = 0
    settle_factor: float = 0.0
    settle_balance: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """What is trained.

    `shares`: part of the windows by topic; `decay_shares`: the same from the first decay step on, also of topics that
    `shares` lacks (the tokenizer is trained on the topics of `shares` alone); `join`: topics of short texts, joined to
    runs of that length; `balance`: weight of the load-balance loss; `batch`: windows a step; `dense`: dtype of dense
    products.
    """

    id: str
    seed: int
    shape: Shape
    rates: Rates
    schedule: Schedule
    shares: dict[str, float]
    join: dict[str, int]
    balance: float
    batch: int
    licence: str
    dense: str = "float32"
    decay_shares: dict[str, float] | None = None

    @property
    def step_tokens(self) -> int:
        return self.batch * self.shape.context

    def topics(self) -> list[str]:
        """Those of `shares`, then those that the decay alone has."""
        return sorted(self.shares) + sorted(set(self.decay_shares or {}) - set(self.shares))

    def total_steps(self) -> int:
        return (self.schedule.stable_tokens + self.schedule.decay_tokens) // self.step_tokens

    def decay_start(self) -> int:
        return self.schedule.stable_tokens // self.step_tokens

    def settle_steps(self) -> int:
        return self.schedule.settle_tokens // self.step_tokens

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def refuse_unknown(kind: type, block: dict, where: str) -> None:
    known = {field.name for field in fields(kind)}
    for key in block:
        if key not in known:
            raise error(f"{where}: unknown key '{key}'", "a key of the recipe", nearest(key, known))


def build(kind: type, block: dict, where: str):
    refuse_unknown(kind, block, where)
    known = {field.name for field in fields(kind)}
    try:
        return kind(**block)
    except TypeError as exc:
        raise error(f"{where}: {exc}", f"all of {', '.join(sorted(known))}", "complete the block") from None


def load(path: str | Path, model_id: str) -> Recipe:
    """Read the block `model_id` of `path`."""
    blocks = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if model_id not in blocks:
        raise error(f"{path}: no model '{model_id}'", "one of its blocks", nearest(model_id, blocks))
    block, where = dict(blocks[model_id]), f"{path}, {model_id}"
    refuse_unknown(Recipe, block, where)
    for key in ("shares", "decay_shares"):
        total = sum((block.get(key) or {"": 1}).values())
        if abs(total - 1) > 1e-6:
            raise error(f"{where}: {key} sum to {total:g}", "1", "mend the recipe")
    for key, kind in (("shape", Shape), ("rates", Rates), ("schedule", Schedule)):
        block[key] = build(kind, block.get(key, {}), f"{where}, {key}")
    return build(Recipe, {"id": model_id, **block}, where)
