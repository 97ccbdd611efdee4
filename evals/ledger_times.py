"""How much longer a token takes: times of the simulator, by document where they were recorded, otherwise by text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from evals.ledger_quantities import NS_PER_S, NotRun, Ratio, ratio
from evals.preregistration import Part
from evals.records import Scored


def token_time_change(part: Part, scored: Mapping[str, Scored], speed, slots: str) -> Ratio:
    """100 (time of `of` over time of `against` less 1). speed: a `Speed` of one model. NotRun."""
    timed = [[_timing(speed.texts, part, policy, slots, text) for text in part.texts] for policy in _both(part)]
    for one, other in zip(*timed, strict=True):
        if one["tokens"] != other["tokens"]:
            raise NotRun(f"{part.of} and {part.against} are timed on different tokens of {one['text']}")
    tokens = int(sum(row["tokens"] for row in timed[0]))
    topics = {cell["text"]: cell["topic"] for policy in scored.values() for cell in policy.record["cells"]}
    one, other = (_document_times(speed.documents, part, policy, slots) for policy in _both(part))
    if set(part.texts) <= set(topics) & set(one["text"]) and one["document"].equals(other["document"]):
        frame = pd.DataFrame({"document": one["document"], "stratum": one["text"].map(topics)})
        return replace(ratio(_changes(frame, one["time_s"], other["time_s"]), "percent"), tokens=tokens)
    seconds = [pd.Series([row["token_s_mean"] * row["tokens"] for row in rows]) for rows in timed]
    return by_text(_changes(pd.DataFrame({"document": list(part.texts)}), *seconds), tokens)


def by_text(frame: pd.DataFrame, tokens: int) -> Ratio:
    """Texts as the units: nothing finer was recorded. One stratum, as each has a topic of its own."""
    frame = frame.assign(size=frame["b"], stratum="all")
    return replace(ratio(frame, "percent"), tokens=tokens, units="texts")


def _both(part: Part) -> tuple[str, str]:
    return part.of, str(part.against)


def _timing(speed: pd.DataFrame, part: Part, policy: str, slots: str, text: str) -> pd.Series:
    rows = _on_host(speed, part, policy, slots)
    rows = rows[rows["text"] == text]
    if rows.empty:
        raise NotRun(f"no timing of {policy}, {slots}, {text} on {part.host}, {part.link}")
    row = rows.iloc[0]
    if row["status"] != "ok":
        raise NotRun(f"no timing of {policy}, {slots}, {text} on {part.host}, {part.link}: {row['reason']}")
    return row


def _document_times(speed: pd.DataFrame, part: Part, policy: str, slots: str) -> pd.DataFrame:
    """Rows text, document (named `<text>/<document>`), time_s of a policy over the part's texts, by name."""
    rows = _on_host(speed, part, policy, slots)
    rows = rows[rows["text"].isin(part.texts)]
    return rows.assign(document=rows["text"] + "/" + rows["document"]).sort_values("document", ignore_index=True)


def _on_host(speed: pd.DataFrame, part: Part, policy: str, slots: str) -> pd.DataFrame:
    keys = {"policy": policy, "slots": slots, "host": part.host, "link": part.link}
    return speed[np.logical_and.reduce([speed[name] == wanted for name, wanted in keys.items()])]


def _changes(frame: pd.DataFrame, one_s: pd.Series, other_s: pd.Series) -> pd.DataFrame:
    """a, b in whole nanoseconds: the change, and what it is a change of."""
    one, other = (np.rint(seconds.to_numpy(np.float64) * NS_PER_S) for seconds in (one_s, other_s))
    return frame.assign(a=one - other, b=other, size=other)
