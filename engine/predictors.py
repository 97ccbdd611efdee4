"""Which experts will the next layers choose? Anchor layer l speaks of layers l + 1 and l + 2 of the same token.

    gate_replay    softmax(W[l+h] x_l)           the router of layer l + h on the router input x_l of layer l; untrained
    spec_prefetch  softmax((W[l+h] + B A) x_l)   a low-rank adapter a pair (l, h); B = 0 is gate_replay
    mlp            softmax(V relu(U x_l))        two layers of its own a pair, hidden width D, no biases (ProMoE's kind)
    markov         mean of P[l+h][e]             over the K experts e that the previous token chose in layer l + h
    oracle         what is chosen in the end     needs a recorded trace (engine.predictions.from_trace), refused here
    random         numbers of a fixed seed       for tests of exactness

W is the attached model's own router, found as the one parameter of shape [E, D] of its module, with the bias beside it
where there is one. The softmax is the family's: of one whose scores are sigmoids the claim is the selection score that
W's router makes of the logits (correction bias, groups), negative ones as zero, over their sum.

    predictor = load_predictor("results/predictors/reference/spec_prefetch.safetensors", attachment)
    ids, claims = names(predictor.predict(layer, call.router_input), 16)         # [T, H, N]
    ids, claims = predictor.names(layer, call.router_input, 16)                  # [H, N] of one token, sooner

A trained predictor fits an inflated model too (engine/widening.py): the router's input is the small model's own there,
and zero in what is added, so zero columns are added to what multiplies it.

Axes: T tokens, D width, E experts, L layers, H horizons, P pairs (l, h) as `pairs` orders them, r rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn import functional

from engine import kernels
from engine.errors import error, nearest
from engine.files import atomic
from engine.hook import Attachment
from engine.policies import PREFETCH
from engine.predictions import HORIZONS
from engine.routers import Router, routers_of

PREDICTORS = PREFETCH  # what the sheet's column `prefetch` may say
TRAINED = {"markov": ("following",), "mlp": ("hidden", "output"), "spec_prefetch": ("A", "B")}  # kind: its arrays
SCHEMA = "predictor-1"
RANDOM_SEED = 3141
ODDS = float(np.exp(-1.0))  # of being chosen, of an expert whose claim is just that of the first that is not
_TRAIN = "train it again (workflow/scripts/train_predictors.py)"


def pairs(layers: int) -> list[tuple[int, int]]:
    """(anchor layer, horizon) of everything that is predicted, anchors in order."""
    return [(anchor, h) for anchor in range(layers) for h in range(1, HORIZONS + 1) if anchor + h < layers]


def parameters(kind: str, layers: int, width: int, experts: int, rank: int) -> int:
    """Trained numbers of a predictor."""
    number = len(pairs(layers))
    counts = {
        "markov": (layers - 1) * experts * experts,
        "mlp": number * width * (width + experts),
        "spec_prefetch": number * rank * (width + experts),
    }
    return counts.get(kind, 0)


def multiply_adds(kind: str, layers: int, width: int, experts: int, top_k: int) -> int:
    """Of one decoded token: the adapter is folded into the router's matrix and costs no more than that."""
    number = len(pairs(layers))
    costs = {
        "gate_replay": number * width * experts,
        "markov": (layers - 1) * top_k * experts,
        "mlp": number * width * (width + experts),
        "spec_prefetch": number * width * experts,
    }
    return costs.get(kind, 0)


def names(
    probabilities: torch.Tensor | np.ndarray, number: int, top_k: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(ids [.., N] int32, claims [.., N] float64) of the largest of [.., E], falling, ties to the lower id.

    -1 with claim 0 where a row is zero, and after the last of E. Claims are the probabilities, or with top_k chances
    of being among the K that are chosen (`chances`).
    """
    p = (
        probabilities.cpu().numpy()
        if isinstance(probabilities, torch.Tensor)
        else np.asarray(probabilities, np.float32)
    )
    experts = p.shape[-1]
    kept = min(number, experts)
    # one integer orders by probability, then lower id: the bits of a float that is not negative rise with it
    keys = p.view(np.int32).astype(np.int64) << 16 | np.arange(0xFFFF, 0xFFFF - experts, -1)
    if kept < experts:
        keys = np.partition(keys, experts - kept, axis=-1)[..., experts - kept :]
    keys = np.sort(keys, axis=-1)[..., ::-1]
    ids = np.full((*p.shape[:-1], number), -1, np.int32)
    claims = np.zeros(ids.shape)
    claims[..., :kept] = (keys >> 16).astype(np.int32).view(np.float32)
    ids[..., :kept] = np.where(claims[..., :1] > 0, 0xFFFF - (keys & 0xFFFF), -1)
    return ids, claims if top_k is None else chances(claims, top_k)


def chances(claims: np.ndarray, top_k: int) -> np.ndarray:
    """claims [.., N] of names, falling, as chances to be chosen: odds that grow with the fourth power of the claim
    over that of the first name that is none of the K.

    Ours: the odds were fitted on calibration text over what was not resident, where exponents of 3 to 5 came out for
    gate replay, adapter and MLP. A claim keeps its place in the order; zero stays zero.
    """
    found = np.array(claims, np.float64)
    kernels.to_chances(found.reshape(-1, found.shape[-1]), top_k, ODDS)
    return found


# ---- predictors ------------------------------------------------------------------------------------------------------
class Predictor:
    """What engine and pipeline use. A kind overrides `_claims`, which is asked only where there is a layer to predict.

    markov alone has a state: `observe` every layer's choice after its predictions were asked for, `reset` before
    another sequence begins.
    """

    horizons = HORIZONS

    def __init__(self, kind: str, attachment: Attachment) -> None:
        self.kind = kind
        self.parameters = 0  # trained numbers
        self.layers, self.experts, self.top_k = len(attachment.layers), attachment.experts, attachment.top_k

    def predict(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """[T, H, E] float32 for layers layer + 1, ...: rows sum to one, and to zero where nothing is known.

        x [T, D]: what the router of `layer` was given.
        """
        targets = min(self.horizons, self.layers - 1 - layer)
        if targets < 1:
            return x.new_zeros((len(x), self.horizons, self.experts), dtype=torch.float32)
        claims = self._claims(layer, x, targets)
        return claims if targets == self.horizons else functional.pad(claims, (0, 0, 0, self.horizons - targets))

    def names(self, layer: int, x: torch.Tensor, number: int) -> tuple[np.ndarray, np.ndarray]:
        """`names` of `predict` for the one token that is decoded: (ids [H, N] int32, chances [H, N] float64)."""
        ids, claims = names(self.predict(layer, x), number, self.top_k)
        return ids[0], claims[0]

    def over_text(self, layer: int, x: torch.Tensor, previous: np.ndarray) -> torch.Tensor:
        """`predict` for consecutive tokens of a recorded text, whatever was observed.

        previous [T, L, K]: what the token before each chose, -1 before the first of a document.
        """
        return self.predict(layer, x)

    def observe(self, layer: int, chosen: torch.Tensor | np.ndarray) -> None:
        """chosen [T, K]: what the router of `layer` chose for these tokens."""

    def reset(self) -> None:
        """The next token begins another sequence."""

    def _claims(self, layer: int, x: torch.Tensor, targets: int) -> torch.Tensor:
        raise NotImplementedError


class _Random(Predictor):
    def __init__(self, attachment: Attachment) -> None:
        super().__init__("random", attachment)
        self._generator = torch.Generator().manual_seed(RANDOM_SEED)

    def _claims(self, layer: int, x: torch.Tensor, targets: int) -> torch.Tensor:
        claims = torch.rand((len(x), targets, self.experts), generator=self._generator)
        return (claims / claims.sum(-1, keepdim=True)).to(x.device)


class _Markov(Predictor):
    """following [L - 1, E, E]: of layer l + 1, what follows on each expert of the previous token."""

    def __init__(self, attachment: Attachment, arrays: dict[str, torch.Tensor]) -> None:
        super().__init__("markov", attachment)
        self._following = arrays["following"]
        self.reset()

    def reset(self) -> None:
        self._previous = np.full((1, self.layers, self.top_k), -1)

    def observe(self, layer: int, chosen: torch.Tensor | np.ndarray) -> None:
        self._previous[0, layer] = chosen[-1].cpu().numpy() if isinstance(chosen, torch.Tensor) else chosen[-1]

    def predict(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        if len(x) != 1:
            raise error(f"{len(x)} tokens at once", "one: each is predicted from the one before it", "ask one by one")
        return self.over_text(layer, x, self._previous)

    def over_text(self, layer: int, x: torch.Tensor, previous: np.ndarray) -> torch.Tensor:
        claims = torch.zeros((len(x), self.horizons, self.experts))
        for target in range(layer + 1, min(layer + 1 + self.horizons, self.layers)):
            ids = torch.from_numpy(previous[:, target].astype(np.int64))
            found = functional.embedding_bag(ids.clamp(min=0), self._following[target - 1], mode="mean")
            claims[:, target - layer - 1] = found * (ids[:, :1] >= 0)
        return claims.to(x.device)


class _FromInput(Predictor):
    """Predicts from logits that are made of x: `logits(layer, x)` [T, n E] of all n targets at once."""

    def __init__(self, kind: str, attachment: Attachment, logits: Callable) -> None:
        super().__init__(kind, attachment)
        self._logits = logits
        self._selection = None if attachment.plain else attachment.selection

    def _claims(self, layer: int, x: torch.Tensor, targets: int) -> torch.Tensor:
        logits = self._logits(layer, x).view(len(x), targets, self.experts)
        if self._selection is None:
            return logits.softmax(-1)
        scores = [self._selection(layer + 1 + i, part) for i, part in enumerate(logits.unbind(1))]
        scores = torch.stack(scores, 1).clamp(min=0)
        return scores / scores.sum(-1, keepdim=True).clamp(min=1e-30)


class _Folded(_FromInput):
    """Routers with their adapters (None: without), in the routers' dtype: all targets of an anchor in one product."""

    def __init__(self, kind: str, attachment: Attachment, arrays: dict[str, torch.Tensor] | None) -> None:
        super().__init__(kind, attachment, self._product)
        routers = routers_of(attachment)
        weights: list[list[torch.Tensor]] = [[] for _ in routers]
        biases: list[list[torch.Tensor]] = [[] for _ in routers]
        for number, (anchor, horizon) in enumerate(pairs(self.layers)):
            weight, bias = routers[anchor + horizon]
            if arrays is not None:
                added = arrays["B"][number] @ arrays["A"][number]
                weight = (weight.float() + added.to(weight.device)).to(weight.dtype)
            weights[anchor].append(weight)
            biases[anchor].append(weight.new_zeros(0) if bias is None else bias)
        self._weight = [torch.cat(each).contiguous() for each in weights[:-1]]  # [n E, D] of each anchor
        added = [torch.cat(each).float() for each in biases[:-1]]  # [n E] or empty
        on_cpu = not routers[0].weight.is_cuda and routers[0].weight.dtype in kernels.DTYPES
        self._compiled = on_cpu and self._selection is None
        self._bias = [bias.numpy() for bias in added] if self._compiled else added

    def names(self, layer: int, x: torch.Tensor, number: int) -> tuple[np.ndarray, np.ndarray]:
        if not self._compiled or x.dtype not in kernels.DTYPES:
            return super().names(layer, x, number)
        ids, claims = np.full((self.horizons, number), -1, np.int32), np.zeros((self.horizons, number))
        if layer + 1 < self.layers:
            kernels.foretell(self._weight[layer], x, self._bias[layer], self.experts, ids, claims)
        return ids, chances(claims, self.top_k)

    def _product(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        found = functional.linear(x.to(self._weight[layer].dtype), self._weight[layer]).float()
        return found + torch.as_tensor(self._bias[layer]) if len(self._bias[layer]) else found


def _mlp(arrays: dict[str, torch.Tensor], routers: list[Router]) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """hidden [P, D', D], output [P, E, D'], in the routers' dtype."""
    like = routers[0].weight
    hidden, output = (arrays[name].to(like) for name in TRAINED["mlp"])
    numbers = [[i for i, (a, _) in enumerate(pairs(len(routers))) if a == anchor] for anchor in range(len(routers))]

    def logits(layer: int, x: torch.Tensor) -> torch.Tensor:
        inner = (functional.linear(x.to(like), hidden[i]).relu() for i in numbers[layer])
        return torch.cat(
            [functional.linear(h, output[i]) for h, i in zip(inner, numbers[layer], strict=True)], -1
        ).float()

    return logits


# ---- files -----------------------------------------------------------------------------------------------------------
def save_predictor(path: str | Path, kind: str, arrays: dict[str, torch.Tensor], provenance: dict[str, str]) -> None:
    """A trained predictor. provenance: model_hash, and what it was trained on and how."""
    facts = {name: str(value) for name, value in provenance.items()} | {"schema": SCHEMA, "kind": kind}
    with atomic(path) as temporary:
        kept = {name: arrays[name].float().contiguous() for name in TRAINED[kind]}
        save_file(kept, temporary, metadata={"expertmiss": json.dumps(facts, sort_keys=True)})


def load_predictor(path: str | Path, attachment: Attachment, model_hash: str | None = None) -> Predictor:
    """A trained predictor on an attached model. UserError: no such file, or one of another model or shape.

    model_hash: of the attached model's weights (engine.safetensors_files.weights_hash); None is not compared.
    """
    facts, arrays = _read(Path(path))
    kind = facts["kind"]
    if model_hash is not None and facts.get("model_hash") != model_hash:
        found = f"{path}: a predictor of model {facts.get('model_hash', 'not named')}"
        raise error(found, f"one of {model_hash}", _TRAIN)
    routers = routers_of(attachment)
    layers, (experts, width) = len(routers), routers[0].weight.shape
    arrays = {name: _widen(name, array, width) for name, array in arrays.items()}
    number = len(pairs(layers))
    rank = arrays[TRAINED[kind][0]].shape[1]
    shapes = {
        "A": (number, rank, width),
        "B": (number, experts, rank),
        "following": (layers - 1, experts, experts),
        "hidden": (number, rank, width),
        "output": (number, experts, rank),
    }
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise error(f"{path}: {name} {list(array.shape)}", f"{list(shapes[name])} of the model", _TRAIN)
        if not array.isfinite().all():
            raise error(f"{path}: {name} with numbers that are not finite", "finite weights", _TRAIN)
    return of_arrays(kind, attachment, arrays)


def make_predictor(
    kind: str, attachment: Attachment, folder: str | Path | None = None, model_hash: str | None = None
) -> Predictor:
    """A predictor by name; a trained one from `folder`/<kind>.safetensors."""
    if kind not in PREDICTORS:
        raise error(f"predictor '{kind}'", "a known predictor", nearest(kind, PREDICTORS))
    if kind == "oracle":
        raise error("predictor 'oracle' beside a running model", "one that needs no future", "use the simulator")
    if kind not in TRAINED:
        return of_arrays(kind, attachment)
    if folder is None:
        raise error(f"predictor '{kind}' without a folder", "that of the trained predictors", "give it")
    return load_predictor(Path(folder) / f"{kind}.safetensors", attachment, model_hash)


def of_arrays(kind: str, attachment: Attachment, arrays: dict[str, torch.Tensor] | None = None) -> Predictor:
    """A predictor of these arrays, whose shapes fit: as `load_predictor`, before there is a file."""
    if kind == "random":
        return _Random(attachment)
    if kind == "markov":
        predictor: Predictor = _Markov(attachment, arrays)
    elif kind == "mlp":
        predictor = _FromInput(kind, attachment, _mlp(arrays, routers_of(attachment)))
    else:
        predictor = _Folded(kind, attachment, arrays)
    predictor.parameters = sum(array.numel() for array in (arrays or {}).values())
    return predictor


def _widen(name: str, array: torch.Tensor, width: int) -> torch.Tensor:
    """Zero columns for what an inflated model adds to the router's input; a wrong width is left for the check."""
    own = array.shape[-1]
    if name not in ("A", "hidden") or own >= width or width // own not in [4**n for n in range(1, 16)] or width % own:
        return array
    return functional.pad(array, (0, width - own))


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("expertmiss", "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (FileNotFoundError, SafetensorError, ValueError) as exc:
        raise error(f"{path}: {exc}", "a whole predictor", _TRAIN) from None
    kind = facts.get("kind") if isinstance(facts, dict) and facts.get("schema") == SCHEMA else None
    if kind not in TRAINED or set(arrays) != set(TRAINED[kind]) or any(a.ndim != 3 for a in arrays.values()):
        raise error(f"{path} is no predictor", f"a trained one of {', '.join(TRAINED)}", "check the path")
    return facts, arrays
