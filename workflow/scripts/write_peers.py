"""The target results/peers: every program that was run beside the engine on this machine, as one table in words.

python workflow/scripts/write_peers.py --table results/peers_tables/peers.csv --out results/peers
"""

import argparse

import numpy as np
import pandas as pd

from engine.errors import main_guard
from engine.files import write_text
from evals.figures import model_title
from evals.peers.sheet import LIMITED
from evals.peers.tables import AGAINST, EXACT, read_table

HEAD = ("program", "tokens/s", "times as fast", "perplexity", "change %", "peak GB", "MB read/token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", required=True)
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    table = read_table(a.table)
    parts = ["# What a user would run instead", ""]
    for (host, model, memory), own in table.groupby(["host", "model", "memory"], sort=False):
        room = f"{own['memory_bytes'].iloc[0] / 1e9:g} GB of memory" if memory == LIMITED else "all in memory"
        parts += [f"## {model_title(own, model)} on {host}, {room}", "", *lines(own), ""]
        ratio = f"`times as fast`: a token against {AGAINST[memory]}, on the tokens that both decoded"
        parts += [f"{ratio}; `change`: of perplexity against {EXACT[memory]}.", ""]
    parts += ["The picture: results/peers_tables/picture.png; all numbers: results/peers_tables/peers.csv.", ""]
    write_text(a.out, "\n".join(parts))


def lines(own: pd.DataFrame) -> list[str]:
    found = [row(HEAD), row(["---"] * len(HEAD))]
    for one in own.to_dict("records"):
        if one["status"] != "ok":
            found.append(row([one["peer"], f"{one['status']}: {one['reason']}", *[""] * (len(HEAD) - 2)]))
            continue
        cells = [one["peer"], number(one["tokens_per_s"], ".3g"), with_ends(one, "speedup", ".3g")]
        cells += [number(one["token_perplexity"], ".4g"), with_ends(one, "delta_percent", "+.2f")]
        cells += [number(one["peak_bytes"] / 1e9, ".2f"), number(one["read_bytes_per_token"] / 1e6, ".0f")]
        found.append(row(cells))
    return found


def with_ends(one: dict, name: str, how: str) -> str:
    found = number(one[name], how)
    if found and np.isfinite(one[f"{name}_low"]) and one[f"{name}_low"] < one[f"{name}_high"]:
        found += f" ({one[f'{name}_low']:{how}} to {one[f'{name}_high']:{how}})"
    return found


def number(value: float, how: str) -> str:
    return f"{value:{how}}" if np.isfinite(value) else ""


def row(cells) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main_guard(main)
