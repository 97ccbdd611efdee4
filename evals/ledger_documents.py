"""From records and losses to documents: what a policy cost each of them, and how much mass it substituted there.

The parts of a cluster (evals/corpora.py) are one document. Anything that is missing, failed, inert or not finite is
NotRun with its reason: no claim is decided by what is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from engine.errors import error
from evals.ledger_quantities import NotRun
from evals.records import Scored
from evals.stats import documents, paired_losses, segments

MASS = "substituted_mass_by_document"


def policy(name: str, scored: Mapping[str, Scored], where: str = "") -> Scored:
    if name not in scored:
        raise NotRun(f"{name} was not scored{where}")
    return scored[name]


def cell(scored: Scored, slots: str, text: str) -> dict:
    for one in scored.record["cells"]:
        if (one["slots"], one["text"]) == (slots, text):
            if one["status"] != "ok":
                raise NotRun(f"{scored.record['policy']}, {slots}, {text}: {one.get('reason', 'failed')}")
            return one
    raise NotRun(f"{scored.record['policy']} has no {slots}, {text}")


def share(scored: Scored, slots: str, texts: Sequence[str], count: str, of: str) -> float:
    cells = [cell(scored, slots, text) for text in texts]
    return sum(one[count] for one in cells) / sum(one[of] for one in cells)


def refuse_inert(policies: Iterable[Scored], slots: str, texts: Sequence[str]) -> None:
    for one in policies:
        cells, name = [cell(one, slots, text) for text in texts], one.record["policy"]
        if all(found["lossy_without_effect"] for found in cells):
            raise NotRun(f"{name} replaced nothing at {slots}")
        if any(found["background_inert"] for found in cells):
            raise NotRun(f"background admission of {name} is inert at {slots}")


def differences(one: Scored, other: Scored, slots: str, texts: Sequence[str]) -> pd.DataFrame:
    """A frame document, text, stratum, tokens, delta_sum of two policies on the same tokens, paired by position."""
    frames = [_by_document(one, slots, text, *_paired(one, other, slots, text)) for text in texts]
    return pd.concat(frames, ignore_index=True)


def first_and_later(one: Scored, other: Scored, slots: str, texts: Sequence[str], first: int) -> pd.DataFrame:
    """A frame document, stratum, first_sum, first_tokens, later_sum, later_tokens: differences within documents."""
    frames = []
    for text in texts:
        ids, delta = _paired(one, other, slots, text)
        lengths = [tokens for _, tokens in one.record["clusters"][text]]
        early = np.concatenate([np.arange(tokens) < first for tokens in lengths])  # [T]
        frame = _by_document(one, slots, text, ids, delta)[["document", "stratum"]]
        for side, mask in (("first", early), ("later", ~early)):
            sums = pd.DataFrame({"id": ids, "sum": delta * mask, "tokens": mask}).groupby("id", sort=False).sum()
            frame[f"{side}_sum"], frame[f"{side}_tokens"] = sums["sum"].to_numpy(), sums["tokens"].to_numpy(int)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def masses(scored: Scored, slots: str, texts: Sequence[str]) -> pd.DataFrame:
    """A frame document, text, stratum, tokens, mass_sum: mass times tokens, as every token has as many events."""
    frames = []
    for text in texts:
        one, clusters, name = cell(scored, slots, text), scored.record["clusters"][text], scored.record["policy"]
        if MASS not in one:
            raise NotRun(f"{name}, {slots}, {text}: no substituted mass by document")
        mass, tokens = np.asarray(one[MASS], float), np.array([number for _, number in clusters], float)
        if mass.shape != tokens.shape or not np.isfinite(mass).all():
            raise NotRun(f"{name}, {slots}, {text}: masses that are not finite, or not of its documents")
        frame = pd.DataFrame({"id": [n for n, _ in clusters], "tokens": tokens, "mass_sum": mass * tokens})
        frame = frame.groupby("id", sort=False).sum().reset_index()
        frames.append(frame.assign(document=f"{text}/" + frame["id"].astype(str), text=text, stratum=one["topic"]))
    return pd.concat(frames, ignore_index=True)


# ---- positions -------------------------------------------------------------------------------------------------------
def _paired(one: Scored, other: Scored, slots: str, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Document and difference of every position, both [T]. UserError: records of two runs."""
    key, clusters = f"{slots}/{text}", one.record["clusters"][text]
    for scored in (one, other):
        cell(scored, slots, text)
        if not np.isfinite(scored.losses.get(key, 0.0)).all():
            raise NotRun(f"{scored.record['policy']}, {slots}, {text}: losses that are not finite")
    if clusters != other.record["clusters"][text] or key not in one.losses or key not in other.losses:
        names = " and ".join(scored.record["policy"] for scored in (one, other))
        raise error(f"{key}: records and losses of {names} differ", "one run", "score both again")
    ids = np.repeat([name for name, _ in clusters], [number for _, number in clusters])
    return ids, paired_losses(one.losses[key], other.losses[key])


def _by_document(scored: Scored, slots: str, text: str, ids: np.ndarray, delta: np.ndarray) -> pd.DataFrame:
    frame = documents(segments(delta, ids)).rename(columns={"doc": "document"})
    topic = cell(scored, slots, text)["topic"]
    return frame.assign(document=f"{text}/" + frame["document"].astype(str), text=text, stratum=topic)
