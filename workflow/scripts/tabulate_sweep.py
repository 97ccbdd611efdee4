"""From the records of the sweep to its tables: every policy, tokens since the change of topic, pairs of stand-ins.

sweep.csv           every (model, policy, text) and all texts pooled: the policy's columns, loss against the baseline
                    with interval, mass, counts, and by the counts whether every first choice was fetched
topic_changes.csv   (model, policy, tokens since the change): loss, loss against the same rule without background
                    admission, hit rate, mass
standins.csv        pairs of policies that differ in one column of the stand-in alone: paired difference, Holm by model
"""

import argparse
from collections.abc import Iterator

import numpy as np
import pandas as pd

from engine.errors import main_guard
from engine.files import atomic
from engine.policies import BASELINE, COLUMNS
from evals.jobs import Progress
from evals.quality_tables import difference, identity, model_rows
from evals.records import Scored, load_scored
from evals.stats import Interval, holm, percent_change

SINCE_CHANGE = (0, 16, 32, 64, 128, 192)  # first tokens of the bins; 128 is the half-life of the decayed counts
ORDINARY = {  # of a stand-in; a policy that has another cell is paired with the row that has this one
    "standin": {"standin": "next_best", "seed": None},
    "standin_weight": {"standin_weight": "own"},
    "standin_recency": {"standin_recency": True},
}
OF_ROW = ("tau", "share", "standin", "standin_weight", "standin_recency")
OF_CELL = ("slots", "slots_percent", "slots_count")
ENDS = ("", "_low", "_high")
WHO = ["model", "policy", "miss_rule", "eviction", "beta", "instrument", "experts", "rehearsal"]
TOPIC_COLUMNS = [*WHO, *OF_ROW, *OF_CELL, "from_token", "to_token", "documents", "tokens", "hit_rate"]
TOPIC_COLUMNS += ["substituted_mass", *(f"delta_percent{end}" for end in ENDS), "against"]
TOPIC_COLUMNS += [*(f"background_percent{end}" for end in ENDS), "level"]
STANDIN_COLUMNS = [*WHO, *OF_CELL, "column", "value", "base", "base_value", "status", "reason", "documents", "tokens"]
STANDIN_COLUMNS += ["substituted_mass", "base_substituted_mass", *(f"difference_percent{end}" for end in ENDS)]
STANDIN_COLUMNS += ["detectable_percent", "level", "p_value", "p_holm"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", nargs="+", required=True, help="results/sweep/<model>/<policy>.json")
    parser.add_argument("--level", type=float, default=0.95)
    parser.add_argument("--replicates", type=int, default=9999)
    parser.add_argument("--seed", type=int, default=20512)
    parser.add_argument("--out-sweep", required=True)
    parser.add_argument("--out-topics", required=True)
    parser.add_argument("--out-standins", required=True)
    a = parser.parse_args()
    scored = load_scored(a.records)
    options = {"level": a.level, "replicates": a.replicates, "seed": a.seed}
    progress = Progress("tabulate sweep", 2 * len(a.records), "policies")
    sweep, topics, standins = [], [], []
    for own in scored.values():
        sweep += sweep_rows(own, options)
        progress.advance(len(own))
        topics += topic_rows(own, options)
        standins += standin_rows(own, options)
        progress.advance(len(own))
    for path, table in (
        (a.out_sweep, pd.DataFrame(sweep)),
        (a.out_topics, pd.DataFrame(topics, columns=TOPIC_COLUMNS)),
        (a.out_standins, pd.DataFrame(standins, columns=STANDIN_COLUMNS)),
    ):
        with atomic(path) as temporary:
            table.to_csv(temporary, index=False, float_format="%.8g")


# ---- every policy ----------------------------------------------------------------------------------------------------
def sweep_rows(own: dict[str, Scored], options: dict) -> list[dict]:
    columns = [column for column in COLUMNS if column != "id"]
    rows = []
    for row in model_rows(own, options, progress=lambda: None):
        of_policy = own[row["policy"]].record["policy_row"]
        row |= {"protects_first": row["first_choices_changed"] == 0} if row["status"] == "ok" else {}
        rows.append({"model": row["model"], "policy": row["policy"], **{c: of_policy[c] for c in columns}} | row)
    return rows


# ---- after a change of topic -----------------------------------------------------------------------------------------
def topic_rows(own: dict[str, Scored], options: dict) -> Iterator[dict]:
    """Rows of the policies without a failed text, at every distance from the change that a token has."""
    for policy, one in own.items():
        cells = one.record["cells"]
        if not complete(one) or not complete(own[BASELINE]):
            continue
        places = {text: place_in_document(clusters) for text, clusters in one.record["clusters"].items()}
        longest = max(int(place.max()) + 1 for place in places.values())
        starts = [start for start in SINCE_CHANGE if start < longest]
        plain = counterpart(own, one, beta=None)
        for start, end in zip(starts, [*starts[1:], longest], strict=True):
            where = {text: (start <= place) & (place < end) for text, place in places.items()}
            loss = difference(one, own[BASELINE], cells, options, where)
            row = identity(one.record) | {name: one.record["policy_row"][name] for name in OF_ROW}
            row |= {name: cells[0][name] for name in OF_CELL}
            row |= {"from_token": start, "to_token": end - 1, "documents": loss.documents, "tokens": loss.tokens}
            row |= change("delta_percent", loss)
            if plain and plain != policy and complete(own[plain]):
                row |= {"against": plain} | change(
                    "background_percent", difference(one, own[plain], cells, options, where)
                )
            yield row | rates(one, cells, where) | {"level": options["level"]}


def place_in_document(clusters: list[tuple[str, int]]) -> np.ndarray:
    """Place [T] of every token in its document. clusters: of every document, as a record has them."""
    return np.concatenate([np.arange(tokens) for _, tokens in clusters])


def rates(one: Scored, cells: list[dict], where: dict[str, np.ndarray]) -> dict:
    """Hit rate and substituted mass of the tokens that count."""
    hits = demands = mass = tokens = 0
    for cell in cells:
        key, counted = f"{cell['slots']}/{cell['text']}", where[cell["text"]]
        hits += int(one.losses[f"{key}/hits"][counted].sum(dtype=np.int64))
        mass += float(one.losses[f"{key}/mass"][counted].sum(dtype=np.float64))
        demands += int(counted.sum()) * cell["demands"] // cell["tokens"]
        tokens += int(counted.sum())
    return {"hit_rate": hits / demands, "substituted_mass": mass / tokens}


# ---- stand-ins -------------------------------------------------------------------------------------------------------
def standin_rows(own: dict[str, Scored], options: dict) -> list[dict]:
    """A row a policy whose stand-in differs in one column from that of another, the ordinary one."""
    rows = []
    for policy, one in own.items():
        for column, cells in ORDINARY.items():
            base = counterpart(own, one, **cells)
            if base and base != policy:
                rows.append(standin_row(column, one, own[base], options))
    adjusted = holm({f"{row['policy']} {row['column']}": row["p_value"] for row in rows})
    return [row | {"p_holm": p} for row, p in zip(rows, adjusted.values(), strict=True)]


def standin_row(column: str, one: Scored, base: Scored, options: dict) -> dict:
    """Difference of a policy's losses from those of `base`, the row with the ordinary cell."""
    first = one.record["cells"][0]
    row = identity(one.record) | {name: first[name] for name in OF_CELL}
    row |= {"column": column, "value": one.record["policy_row"][column]}
    row |= {"base": base.record["policy"], "base_value": base.record["policy_row"][column]}
    broken = [scored for scored in (one, base) if not complete(scored)]
    if broken:
        reasons = (f"{s.record['policy']}: {c['reason']}" for s in broken for c in s.record["cells"] if "reason" in c)
        return row | {"status": "failed", "reason": next(reasons), "p_value": None}
    found = difference(one, base, one.record["cells"], options)
    masses = {f"{name}substituted_mass": mass(scored) for name, scored in (("", one), ("base_", base))}
    row |= {"status": "ok", "documents": found.documents, "tokens": found.tokens} | masses
    row |= change("difference_percent", found) | {"detectable_percent": percent_change(found).detectable}
    return row | {"level": found.level, "p_value": found.p_value}


def mass(one: Scored) -> float:
    cells = one.record["cells"]
    return sum(cell["substituted_mass"] * cell["events"] for cell in cells) / sum(cell["events"] for cell in cells)


# ---- shared ----------------------------------------------------------------------------------------------------------
def complete(one: Scored) -> bool:
    return all(cell["status"] == "ok" for cell in one.record["cells"])


def counterpart(own: dict[str, Scored], one: Scored, **cells) -> str | None:
    """The policy whose row is that of `one` but for these cells; the first of equal rows."""
    wanted = one.record["policy_row"] | cells | {"id": None}
    return next((policy for policy, s in own.items() if s.record["policy_row"] | {"id": None} == wanted), None)


def change(name: str, interval: Interval) -> dict[str, float | None]:
    """Estimate and ends in percent, as columns."""
    percent = percent_change(interval)
    ends = (percent.estimate, percent.low, percent.high)
    return {f"{name}{suffix}": end for suffix, end in zip(ENDS, ends, strict=True)}


if __name__ == "__main__":
    main_guard(main)
