"""How the probe measures: cells interleaved, warmed up, repeated; a median and its spread.

Interleaving spreads a disturbance over all cells instead of spoiling one. The spread is the interquartile range over
the median.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator

import numpy as np
import psutil

ORDER_SEED = 11


def sample(cells: dict[Hashable, Callable[[], float]], seconds: float, repeats: int) -> dict[Hashable, np.ndarray]:
    """Run every cell, first once unrecorded, then in rounds until `seconds` are over: at least `repeats` of them, or
    three where more would take twice the time.

    Every round has another order, so that no cell always follows the same one (a large copy leaves the caches empty).
    """
    for run in cells.values():
        run()
    found = {key: [] for key in cells}
    rng, keys, rounds = np.random.default_rng(ORDER_SEED), list(cells), 0
    start = time.perf_counter()
    while True:
        over = (time.perf_counter() - start) / seconds
        if over >= 1 and rounds >= (repeats if over < 2 else 3):
            return {key: np.array(values) for key, values in found.items()}
        for i in rng.permutation(len(keys)):
            found[keys[i]].append(cells[keys[i]]())
        rounds += 1


def other_cores() -> Callable[[], float]:
    """Starts to watch; called later, it says how many cores other processes kept busy in the mean since then."""

    def used() -> tuple[float, float]:
        machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
        return time.perf_counter(), machine.user + getattr(
            machine, "nice", 0.0
        ) + machine.system - own.user - own.system

    start, before = used()

    def mean() -> float:
        now, after = used()
        return max(0.0, (after - before) / (now - start))

    return mean


def median_spread(values: np.ndarray) -> tuple[float, float]:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return rounded(middle), rounded((high - low) / abs(middle))


def number(values: np.ndarray) -> dict:
    value, spread = median_spread(values)
    return {"value": value, "spread": spread}


def table(found: dict[tuple[int, int], np.ndarray], counts: tuple[int, ...]) -> dict:
    """found by (bytes, count), as a table of a profile."""
    rows = []
    for size in sorted({size for size, _ in found}):
        cells = [median_spread(found[size, count]) for count in counts]
        rows.append({"bytes": size, "seconds": [c[0] for c in cells], "spread": [c[1] for c in cells]})
    return {"counts": list(counts), "rows": rows}


def rounded(value: float) -> float:
    """Four significant digits: no clock is better."""
    return float(f"{value:.3e}")


def spreads(value: object) -> Iterator[float]:
    """Every spread in a part of a profile."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from np.atleast_1d(part).tolist() if name == "spread" else spreads(part)
    elif isinstance(value, list):
        for part in value:
            yield from spreads(part)
