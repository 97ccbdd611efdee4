"""Arms of experiment B, and a made-up table of them for tests of figure and index."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

ARMS = [f"{rule}_{name}" for rule in ("few_heavy", "many_light") for name in ("low", "middle", "high", "random")]


def made_up(path: Path) -> Path:
    """Two models as tabulate_experiment_b.py writes them; the second was stopped by its pilot."""
    rows = []
    for model, status in (("reference", "ok"), ("reference_b", "not run")):
        for arm in ARMS:
            rule, _, name = arm.rpartition("_")
            mass = {"low": 0.02, "middle": 0.04, "high": 0.072, "random": 0.04}[name]
            loss = 20 * mass * (3 if rule == "few_heavy" else 1) * (2 if name == "random" else 1)
            row = {"model": model, "arm": arm, "miss_rule": rule, "level_name": name, "level": mass, "status": status}
            row |= {"standin": "random" if name == "random" else "next_best", "instrument": "emulator", "slots": "s25"}
            row |= {"slots_percent": 25, "slots_count": 64, "experts": 256, "rehearsal": True, "reason": ""}
            if status != "ok":
                rows.append(row | {"reason": "the foreseen power at the middle level is 0.41, below 0.8"})
                continue
            row |= {"documents": 83, "tokens": 26556, "substituted_mass": mass, "delta_percent": loss}
            row |= {"delta_percent_low": loss - 0.3, "delta_percent_high": loss + 0.3, "detectable_percent": 0.4}
            row |= {"standin_rank": 20 if name == "random" else 3, "difference_over_missing": 1.2 + 5 * mass}
            if rule == "few_heavy":
                row |= {
                    "mass_ratio": 1.0,
                    "light_percent": 0.7 * loss,
                    "light_percent_low": 0.5 * loss,
                    "light_percent_high": loss,
                }
            rows.append(row | {"level_of_interval": 0.95})
    pd.DataFrame(rows).to_csv(path, index=False)
    return path
