"""Train the predictors of a model on calibration text: how well do they foretell documents they were not trained on?

One stock pass records what every layer's router was given and what it made of it (`record`). Every fourth cluster of
documents of each text is held out (`hold_out`); over the others the adapter and the multilayer predictor are trained,
all pairs (l, h) at once,

    loss = sum over pairs of w_h KL(p_{l+h} || q_{l,h}),  w_1 = 2, w_2 = 1,  p the softmax of the router of layer l + h,

by AdamW with gradients clipped to a norm of 0.5. What is kept is the epoch with the lowest loss on the documents held
out. The adapter's learning rate is P2's, 1e-4, and so that some 15,000 tokens of calibration text have steps enough,
its steps are small; the multilayer predictor, a rival, has the rate that suited it best. Everything is on one thread,
so that the same seeds give the same bits.

    data = join([record(model, attachment, text, context=1024, bos=bos) for text in texts])
    trained = train("spec_prefetch", data, routers_of(attachment), attachment.sigmoid, rank=32, learning_rate=1e-4)

Memory holds router inputs and logits of all tokens: 4 T L (D + E) bytes, and twice 4 T P E for the pairs.

Axes: T tokens, L layers, D width, E experts, K chosen, P pairs, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import numpy as np
import torch

from engine.errors import error
from engine.hook import Attachment, Call
from engine.predictors import pairs
from engine.routers import Router, log_distribution, logits_of
from evals.corpora import cluster
from evals.perplexity import losses
from evals.quality import Text

WEIGHTS = {1: 2.0, 2: 1.0}  # of the horizons
LEARNING_RATE = 1e-4  # P2's, of the adapter
MLP_LEARNING_RATE = 1e-3
CLIP = 0.5
BATCH = {"mlp": 64, "spec_prefetch": 8}  # tokens a step
EPOCHS = {"mlp": 12, "spec_prefetch": 16}  # at most
HELD_OUT = 4  # one cluster of documents in so many, the second first
PATIENCE = 2  # epochs without a lower loss on the documents held out
SMOOTHING = 8.0  # of markov: events of the marginal that are added to every expert's own
INITIAL_SEED, ORDER_SEED = 2718, 1618  # first weights; order of the tokens
_SAME = 0.02  # a router's probabilities, here and as it gave them


# ---- recording -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Recorded:
    """Tokens in a row: inputs [T, L, D] and logits [T, L, E] float32 of the routers, chosen [T, L, K]."""

    inputs: np.ndarray
    logits: np.ndarray
    chosen: np.ndarray
    first: np.ndarray  # [T] bool, of a document
    held: np.ndarray  # [T] bool, of a document that is not trained on

    @property
    def previous(self) -> np.ndarray:
        return previous_of(self.chosen, self.first)


def previous_of(chosen: np.ndarray, first: np.ndarray) -> np.ndarray:
    """What the token before each chose [T, L, K], -1 before the first of a document."""
    return np.where(first[:, None, None], -1, np.roll(chosen, 1, axis=0))


def first_tokens(scored: Iterable[int]) -> np.ndarray:
    """[T] bool: where documents of so many tokens begin."""
    return np.concatenate([np.arange(tokens) == 0 for tokens in scored])


def hold_out(text: Text) -> np.ndarray:
    """[T] bool: the tokens of every HELD_OUT-th cluster of documents, the second first."""
    clusters = [cluster(document.id) for document in text.documents]
    number = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    return np.repeat([number[name] % HELD_OUT == 1 for name in clusters], text.scored)


def listen(attachment: Attachment, sink: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> None:
    """Let the stock experts run, and give `sink` of each pass: inputs [t, L, D], logits [t, L, E], chosen [t, L, K]."""
    kept: list[tuple[torch.Tensor, ...]] = []

    def handler(call: Call) -> torch.Tensor:
        kept.append((call.router_input.clone(), call.logits.clone(), call.index.clone()))  # its own are the model's
        if len(kept) == len(attachment.layers):
            sink(*(torch.stack(each, dim=1) for each in zip(*kept, strict=True)))
            kept.clear()
        return call.compute(call.index, call.weights)

    attachment.handler = handler


def record(model, attachment: Attachment, text: Text, *, context: int, bos: int | None, progress=None) -> Recorded:
    """One stock pass over a text."""
    parts: list[tuple[np.ndarray, ...]] = []

    def keep(inputs: torch.Tensor, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        parts.append((inputs.float().cpu().numpy(), logits.cpu().numpy(), chosen.to(torch.int16).cpu().numpy()))

    listen(attachment, keep)
    losses(model, text.documents, context=context, bos=bos, progress=progress)
    arrays = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Recorded(*arrays, first_tokens(text.scored), hold_out(text))


def join(texts: list[Recorded]) -> Recorded:
    names = (field.name for field in fields(Recorded))
    return Recorded(*(np.concatenate([getattr(text, name) for text in texts]) for name in names))


# ---- training --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Trained:
    """arrays by name; KL [P] on the documents held out, by pair, before the first epoch and of the epoch kept."""

    arrays: dict[str, torch.Tensor]
    epochs: int  # kept; so many were tried
    tried: int
    before: list[float]
    after: list[float]


def _adapter(arrays: dict[str, torch.Tensor], x: torch.Tensor, replayed: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(replayed, x @ arrays["A"].mT, arrays["B"].mT)


def _mlp(arrays: dict[str, torch.Tensor], x: torch.Tensor, replayed: torch.Tensor) -> torch.Tensor:
    return (x @ arrays["hidden"].mT).relu() @ arrays["output"].mT


LOGITS = {"mlp": _mlp, "spec_prefetch": _adapter}  # (arrays, x [P, t, D], gate replay's logits [P, t, E]) -> [P, t, E]


def first_weights(kind: str, number: int, width: int, experts: int, rank: int) -> dict[str, torch.Tensor]:
    """Normal over the root of how many are summed; B is zero: the adapter begins as gate replay."""
    generator = torch.Generator().manual_seed(INITIAL_SEED)
    if kind == "mlp":
        hidden, output = (torch.randn(number, n, width, generator=generator) for n in (width, experts))
        return {"hidden": hidden / math.sqrt(width), "output": output / math.sqrt(width)}
    if not 1 <= rank <= width:
        raise error(f"rank {rank}", f"from 1 to D = {width}", "choose another")
    A = torch.randn(number, rank, width, generator=generator) / math.sqrt(width)
    return {"A": A, "B": torch.zeros(number, experts, rank)}


def train(
    kind: str,
    data: Recorded,
    routers: list[Router],
    sigmoid: bool,
    *,
    rank: int,
    learning_rate: float,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Trained:
    """mlp or spec_prefetch. progress: called with the tokens of every step.

    UserError: a rank that cannot be, nothing held out or nothing left, a loss that is no number.
    """
    held = data.held
    if held.all() or not held.any():
        raise error(f"{held.sum()} of {len(held)} tokens held out", "some, not all", "give two documents of a text")
    torch.set_num_threads(1)
    batches = _Batches(data, routers, sigmoid)
    arrays = first_weights(kind, len(batches.pairs), data.inputs.shape[2], data.logits.shape[2], rank)
    arrays = {name: torch.nn.Parameter(array) for name, array in arrays.items()}
    optimiser = torch.optim.AdamW(arrays.values(), lr=learning_rate)
    tokens, unseen = torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))
    order = torch.Generator().manual_seed(ORDER_SEED)
    before = batches.unseen_kl(kind, arrays, unseen)
    best, kept, epochs = before, _copy(arrays), 0
    for epoch in range(1, EPOCHS[kind] + 1):
        for step in tokens[torch.randperm(len(tokens), generator=order)].split(BATCH[kind]):
            loss = (batches.kl(kind, arrays, step) * batches.weights).sum()
            optimiser.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(arrays.values(), CLIP)
            if not torch.isfinite(norm):
                raise error(
                    f"{kind}: a loss of {loss.item():g} in epoch {epoch}", "a number", "lower the learning rate"
                )
            optimiser.step()
            progress(len(step))
        after = batches.unseen_kl(kind, arrays, unseen)
        if (after * batches.weights).sum() < (best * batches.weights).sum():
            best, kept, epochs = after, _copy(arrays), epoch
        elif epoch - epochs >= PATIENCE:
            break
    return Trained(kept, epochs, epoch, before.tolist(), best.tolist())


class _Batches:
    """Inputs, gate replay's logits and what is to be foretold, by pair."""

    def __init__(self, data: Recorded, routers: list[Router], sigmoid: bool) -> None:
        self.pairs = pairs(len(routers))
        self.sigmoid = sigmoid
        self.weights = torch.tensor([WEIGHTS[horizon] for _, horizon in self.pairs])
        self._anchors = [anchor for anchor, _ in self.pairs]
        targets = [anchor + horizon for anchor, horizon in self.pairs]
        self._inputs = torch.from_numpy(data.inputs).transpose(0, 1)  # [L, T, D]
        logits = torch.from_numpy(data.logits).transpose(0, 1)  # [L, T, E]
        check_routers(self._inputs, logits, routers, sigmoid)
        self._wanted = log_distribution(logits, sigmoid)[targets]  # [P, T, E]
        replayed = (logits_of(routers[t], self._inputs[a]) for a, t in zip(self._anchors, targets, strict=True))
        self._replayed = torch.stack(list(replayed))  # [P, T, E]

    def kl(self, kind: str, arrays: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        """Mean over these tokens, by pair [P]."""
        x = self._inputs[:, tokens][self._anchors]  # [P, t, D]
        said = log_distribution(LOGITS[kind](arrays, x, self._replayed[:, tokens]), self.sigmoid)
        difference = torch.nn.functional.kl_div(said, self._wanted[:, tokens], log_target=True, reduction="none")
        return difference.sum(-1).mean(-1)

    @torch.no_grad()
    def unseen_kl(self, kind: str, arrays: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        """[P], of many tokens, in pieces that fit the processor's cache."""
        sums = [self.kl(kind, arrays, part) * len(part) for part in tokens.split(256)]
        return torch.stack(sums).sum(0) / len(tokens)


def check_routers(inputs: torch.Tensor, logits: torch.Tensor, routers: list[Router], sigmoid: bool) -> None:
    """UserError where a router does more than multiply. inputs [L, T, D], logits [L, T, E]."""
    for layer, router in enumerate(routers):
        own = log_distribution(logits_of(router, inputs[layer, :64]), sigmoid).exp()
        if (own - log_distribution(logits[layer, :64], sigmoid).exp()).abs().max() > _SAME:
            raise error(
                f"layer {layer}: a router whose logits are not its weight times its input",
                "a router that multiplies once",
                "this model's routing cannot be predicted: leave prefetching out",
            )


def _copy(arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: array.detach().clone() for name, array in arrays.items()}


# ---- counting --------------------------------------------------------------------------------------------------------
def count_following(data: Recorded) -> torch.Tensor:
    """markov's [L - 1, E, E]: what follows on each expert of the token before, rows that sum to one.

    An expert's own counts and, as if it had been chosen SMOOTHING times more, the share that each expert has of all.
    """
    previous, held, experts = data.previous, data.held, data.logits.shape[2]
    known = ~held & (previous[:, 0, 0] >= 0)
    following = []
    for layer in range(1, data.chosen.shape[1]):
        before, after = previous[known, layer].astype(np.int64), data.chosen[known, layer].astype(np.int64)  # [t, K]
        cells = (before[:, :, None] * experts + after[:, None, :]).ravel()
        counts = np.bincount(cells, minlength=experts * experts).reshape(experts, experts)
        share = np.bincount(data.chosen[~held, layer].ravel(), minlength=experts) / data.chosen[~held, layer].size
        smoothed = counts / before.shape[1] + SMOOTHING * share
        following.append(smoothed / smoothed.sum(-1, keepdims=True))
    return torch.from_numpy(np.array(following, np.float32).reshape(-1, experts, experts))
