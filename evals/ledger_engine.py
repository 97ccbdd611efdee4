"""Claims about measured hosts: their measures, from the documents that the engine timed and the emulator scored.

A part of instrument `engine` names no host: its row asks for several, or for every one. `on_hosts` makes a part of
every host of it; the row's verdict is then a conjunction over parts and hosts. What is ours: where a row does not ask
for every link, the one that decides is the one of the host that is not throttled, and the size is the inflated one
where it was measured, as only that is as large as the papers' experts. Speedup is over all tokens but the first of each
document, the loss over all of them, and so is what is identical, at every size.

    parts = on_hosts(row, speed.measured, throttled=False)
    quantity = ENGINE_MEASURES[part.measure](part, documents_of_a_model, "s25", rules)      # NotRun
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from engine.measured_run import OWN
from evals.ledger_quantities import NS_PER_S, NotRun, Ratio, ratio, running_order
from evals.ledger_statistics import Counted
from evals.preregistration import Part, Preregistration, Row

ENGINE, PEERS = "engine", "peers"  # instruments: policies of the engine, or other programs under its memory limit
HOSTS_NEEDED = 2  # of a claim about measured hosts: different fingerprints


# ---- rows ------------------------------------------------------------------------------------------------------------
def is_about_hosts(row: Row, measured: pd.DataFrame) -> bool:
    """Whether the engine has timed, on the row's texts, every policy that decides it, and no more is missing."""
    named = {name for part in row.parts for name in (part.of, part.against) if part.role == "primary"}
    own = all(part.instrument in (ENGINE, PEERS) and part.measure in ENGINE_MEASURES for part in row.parts)
    own = own and not any(set(part.texts).isdisjoint(measured["text"]) for part in row.parts)
    return own and named <= set(measured["policy"])


def lift(row: Row, measured: pd.DataFrame) -> Row:
    """The row with its parts on every measured host, once there are as many as it needs; before, how many there are.

    Its `not_run` says that none was measured. That ends to hold when one is; region and rule stay what they were.
    """
    if not is_about_hosts(row, measured):
        return row
    if row.every_host:
        return replace(row, not_run=None, parts=on_hosts(row, measured))
    number = measured["fingerprint"].nunique()
    if number < HOSTS_NEEDED:
        return replace(row, not_run=f"{number} measured host{'s' * (number > 1)}, the claim is about {HOSTS_NEEDED}")
    return replace(row, not_run=None, parts=on_hosts(row, measured, throttled=False))


def on_hosts(row: Row, measured: pd.DataFrame, *, throttled: bool | None = None) -> tuple[Part, ...]:
    """Every part on every host, over its links that are throttled, those that are not, or (None) all of them.

    A part that names a link stands on that alone; where no host has it, it is there once, with that as its `not_run`.
    """
    if throttled is not None:
        measured = measured[(measured["link_status"] == "throttled") == throttled]
    places = measured[["host", "link"]].drop_duplicates()
    parts = [
        replace(part, id=f"{part.id}_on_{host}_{link}", host=host, link=link)
        for host, link in places.itertuples(index=False, name=None)
        for part in row.parts
        if part.link in (None, link)
    ]
    nowhere = [part for part in row.parts if part.link and part.link not in set(places["link"])]
    parts += [replace(part, not_run=f"no host was measured over {part.link}") for part in nowhere]
    return tuple(parts)


def shown_without_verdict(row: Row, lifted: Row, measured: pd.DataFrame) -> tuple[Row | None, str]:
    """The row on whatever was measured and decides nothing, and why it does not; None where nothing is."""
    if not is_about_hosts(row, measured) or row.every_host:
        return None, ""
    parts = on_hosts(row, measured, throttled=True)
    if lifted.not_run:
        parts = (*on_hosts(row, measured, throttled=False), *parts)
    reason = lifted.not_run or "a throttled link decides nothing"
    return (replace(row, not_run=None, parts=parts) if parts else None), reason


# ---- measures --------------------------------------------------------------------------------------------------------
def _speedup(part: Part, measured: pd.DataFrame, slots: str, rules: Preregistration) -> Ratio:
    own, base = _both(part, measured, slots, rules)
    a, b = (np.rint(frame["time_s"].to_numpy(float) * NS_PER_S) for frame in (base, own))
    frame = pd.DataFrame({"document": own["document"], "stratum": own["topic"], "a": a, "b": b})
    return ratio(frame.assign(size=own["timed_tokens"]), "ratio")


def _perplexity_change(part: Part, measured: pd.DataFrame, slots: str, rules: Preregistration) -> Ratio:
    own, base = _both(part, measured, slots, rules)
    if own["loss_nats"].isna().any() or base["loss_nats"].isna().any():
        raise NotRun(f"decision logs of {part.of} or {part.against} on {part.host} are not scored")
    frame = pd.DataFrame({"document": own["document"], "stratum": own["topic"], "b": own["tokens"]})
    return ratio(frame.assign(a=own["loss_nats"] - base["loss_nats"], size=own["tokens"]), "perplexity")


def _identical_share(part: Part, measured: pd.DataFrame, slots: str, rules: Preregistration) -> Counted:
    """Of all sizes at which the policy was measured; the table compares with the baseline."""
    if part.against != rules.baseline:
        raise NotRun(f"outputs are compared with those of {rules.baseline}, not of {part.against}")
    here = _here(part, measured, slots, rules)
    own = here[(here["policy"] == part.of) & here["text"].isin(part.texts)]
    for size in list(dict.fromkeys(own["size"])) or [""]:
        _refuse_missing(own[own["size"] == size], part, part.of, slots, f" at size {size}" if size else "")
    alone = own[own["compared"] == 0]
    if len(alone):
        row = alone.iloc[0]
        found = f"no run of {part.of} has its pair of {part.against}"
        raise NotRun(f"{found} at {slots} on {part.host}, {part.link}: {row['text']} at size {row['size']}")
    own = own.assign(document=own["text"] + "/" + own["document"])
    sums = own.groupby("document")[["compared", "identical"]].sum()
    sums = sums.iloc[running_order(sums.index)].cumsum()
    shares = 100 * (sums["identical"] / sums["compared"]).to_numpy(float)
    tokens = int(sums["compared"].iloc[-1])
    return Counted(list(sums.index), float(shares[-1]), tokens, "documents", (0.0, 100.0), estimates=shares)


ENGINE_MEASURES = {
    "identical_share": _identical_share,
    "perplexity_change": _perplexity_change,
    "speedup": _speedup,
}


def _here(part: Part, measured: pd.DataFrame, slots: str, rules: Preregistration) -> pd.DataFrame:
    """Documents of the part's host and link at a budget. NotRun: the budget that decides is another one there."""
    here = measured[(measured["host"] == part.host) & (measured["link"] == part.link) & (measured["slots"] == slots)]
    if (here["slots_percent"] != rules.slots_percent).any() and slots == rules.slots:
        raise NotRun(f"{slots} is another budget than {rules.slots_percent:g} % on {part.host}")
    return here


def _refuse_missing(own: pd.DataFrame, part: Part, policy: str, slots: str, where: str = "") -> None:
    missing = [text for text in part.texts if text not in set(own["text"])]
    if missing:
        raise NotRun(f"{policy} is not measured at {slots} on {part.host}, {part.link}{where}: {', '.join(missing)}")


def _both(part: Part, measured: pd.DataFrame, slots: str, rules: Preregistration) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Documents of both policies on the part's host and link, one name a row, in the same order. NotRun."""
    here = _here(part, measured, slots, rules)
    inflated = here[here["size"] != OWN]
    here = inflated if len(inflated) else here
    if here["size"].nunique() > 1:
        raise NotRun(f"{part.host} was measured at several sizes: {', '.join(here['size'].unique())}")
    frames = []
    for policy in (part.of, str(part.against)):
        own = here[(here["policy"] == policy) & here["text"].isin(part.texts)]
        _refuse_missing(own, part, policy, slots)
        if own["lossy_without_effect"].all():
            raise NotRun(f"{policy} replaced nothing at {slots} on {part.host}")
        if own["background_inert"].any():
            raise NotRun(f"background admission of {policy} is inert at {slots} on {part.host}")
        own = own.assign(document=own["text"] + "/" + own["document"])
        frames.append(own.sort_values("document", ignore_index=True))
    if not frames[0]["document"].equals(frames[1]["document"]) or not frames[0]["tokens"].equals(frames[1]["tokens"]):
        raise NotRun(f"{part.of} and {part.against} were measured on other documents of {part.host}")
    return frames[0], frames[1]
