"""From the records of experiment B to a table: every arm of every model, its mass, its loss, and how they compare.

level                        mass that every event paid in
substituted_mass             what was realised of it; pilot_mass: in the pilot
mass_ratio, ..._low, _high   of a heavy arm: its mass over that of its light partner
delta_percent, ...           loss against the exact model
light_percent, ...           of a heavy arm: loss against its light partner, where their masses are equal enough
next_best_percent, ...       of a random arm: loss against the arm of the same rule and level with the best stand-ins
g_mean to weighted_over_layer    what was substituted by what (evals/watch.py)

All texts together; losses are paired by position, documents resampled within topics. An arm with a failed text has a
reason and no numbers; where the pilot said no, all have.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from engine.errors import error, main_guard
from engine.files import atomic
from engine.policies import PAYING
from evals.checked_tables import TODO
from evals.experiment_b import DECIDES, HEAVY, LIGHT, RANDOM, SHARES, TOLERANCE, mass_ratio
from evals.quality_tables import difference, pool
from evals.records import Scored, is_rehearsal, load_arrays, load_scored, read_json
from evals.stats import Interval, percent_change
from evals.watch import SEEN

ENDS = ("", "_low", "_high")
OF_MECHANISM = ("events_with_substitution", "g_mean", "looked_at", *SEEN)
OF_POOL = ("slots_count", "documents", "tokens", "events", "demands", "hits", "in_place", "substitutions", "miss_rate")
COLUMNS = (
    *("model", "arm", "miss_rule", "standin", "level_name", "level", "instrument", "slots", "slots_percent", "experts"),
    *("rehearsal", "status", "reason", *OF_POOL, "substituted_share", "substituted_mass", "pilot_mass"),
    *(f"{name}{end}" for name in ("mass_ratio", "delta_percent", "light_percent", "next_best_percent") for end in ENDS),
    *("detectable_percent", "light_detectable_percent", "level_of_interval", "foreseen_power", *OF_MECHANISM),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", nargs="+", required=True, help="folders results/experiment_b/<model>")
    parser.add_argument("--level", type=float, default=0.95)
    parser.add_argument("--replicates", type=int, default=9999)
    parser.add_argument("--seed", type=int, default=20512)
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    options = {"level": a.level, "replicates": a.replicates, "seed": a.seed}
    rows = [row for folder in a.records for row in model_rows(Path(folder), options)]
    with atomic(a.out) as temporary:
        pd.DataFrame(rows, columns=COLUMNS).to_csv(temporary, index=False, float_format="%.8g")


def model_rows(folder: Path, options: dict) -> list[dict]:
    """A row an arm; rows of a model whose pilot said no have its reason."""
    pilot = read_json(folder / "pilot.json", "model", "status", "go", "reason", "experts", "slots", "slots_percent")
    names = [f"{rule}_{level}" for rule in PAYING for level in (*SHARES, RANDOM)]
    if not pilot["go"]:
        left = {"status": "not run" if pilot["status"] == "ok" else "failed", "reason": pilot["reason"]}
        return [describe(name, pilot) | left for name in names]
    scored = load_scored([str(folder / f"{name}.json") for name in names])
    if list(scored) != [pilot["model"]]:
        raise error(f"{folder}: records of {', '.join(scored)}", f"of {pilot['model']}", TODO)
    arms = scored[pilot["model"]]
    exact = Scored(arms[names[0]].record, load_arrays(folder / "exact.safetensors"))
    rows = []
    for name in names:
        row, one = describe(name, pilot), arms[name]
        failed = [cell for cell in one.record["cells"] if cell["status"] != "ok"]
        if failed:
            reason = f"{failed[0]['text']}: {failed[0]['reason']}"
            rows.append(row | {"status": "failed", "reason": reason})
        else:
            rows.append(row | {"status": "ok"} | numbers(name, one, exact, arms, options))
    return rows


def describe(name: str, pilot: dict) -> dict:
    """What an arm is, whatever became of it."""
    rule, _, level_name = name.rpartition("_")
    level = DECIDES if level_name == RANDOM else level_name
    return {
        "model": pilot["model"],
        "arm": name,
        "miss_rule": rule,
        "standin": "random" if level_name == RANDOM else "next_best",
        "level_name": level_name,
        "level": pilot.get("levels", {}).get(level),
        "instrument": "emulator",
        "slots": pilot["slots"],
        "slots_percent": pilot["slots_percent"],
        "slots_count": pilot["slots_count"],
        "experts": pilot["experts"],
        "rehearsal": is_rehearsal(pilot),
        "pilot_mass": pilot.get("realised", {}).get(level_name, {}).get(rule),
        "foreseen_power": pilot.get("power"),
    }


def numbers(name: str, one: Scored, exact: Scored, arms: dict[str, Scored], options: dict) -> dict:
    cells, seen = one.record["cells"], one.record["mechanism"]
    pooled = pool(cells)
    row = {key: pooled[key] for key in (*OF_POOL, "substituted_share", "substituted_mass")}
    row |= {key: seen[key] for key in OF_MECHANISM}
    loss = difference(one, exact, cells, options)
    row |= change("delta_percent", loss)
    row |= {"detectable_percent": percent_change(loss).detectable, "level_of_interval": loss.level}
    rule, _, level_name = name.rpartition("_")
    light = arms.get(f"{LIGHT}_{level_name}")
    if rule == HEAVY and whole(light):
        frame = masses(one).assign(light=masses(light)["mass"])
        ratio = mass_ratio(frame["mass"].to_numpy(), frame["light"].to_numpy(), frame["topic"], **options)
        row |= dict(zip((f"mass_ratio{end}" for end in ENDS), ratio, strict=True))
        if ratio[0] is not None and abs(ratio[0] - 1) <= TOLERANCE:
            against = difference(one, light, cells, options)
            row |= change("light_percent", against) | {"light_detectable_percent": percent_change(against).detectable}
    best = arms.get(f"{rule}_{DECIDES}")
    if level_name == RANDOM and whole(best):
        row |= change("next_best_percent", difference(one, best, cells, options))
    return row


def change(name: str, loss: Interval) -> dict:
    percent = percent_change(loss)
    return dict(zip((f"{name}{end}" for end in ENDS), (percent.estimate, percent.low, percent.high), strict=True))


def whole(arm: Scored | None) -> bool:
    return arm is not None and all(cell["status"] == "ok" for cell in arm.record["cells"])


def masses(one: Scored) -> pd.DataFrame:
    """topic and substituted mass, summed over events, of every cluster of documents; index (text, cluster)."""
    parts = []
    for cell in one.record["cells"]:
        clusters, tokens = zip(*one.record["clusters"][cell["text"]], strict=True)
        mass = np.array(cell["substituted_mass_by_document"]) * tokens
        parts.append(pd.DataFrame({"text": cell["text"], "cluster": clusters, "topic": cell["topic"], "mass": mass}))
    return pd.concat(parts).groupby(["text", "cluster"], sort=False).agg({"topic": "first", "mass": "sum"})


if __name__ == "__main__":
    main_guard(main)
