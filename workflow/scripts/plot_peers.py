"""Tokens a second of the engine and of what a user would run instead: same weights, same tokens, same memory.

A column a model and host, above it the programs under the memory limit, below those with everything in memory. The
scale is logarithmic; a bar ends at the mean rate, its words say how many times faster a token is than llama.cpp's in
the same memory, with the interval over documents, and the change of perplexity against the exact engine. A program
that could not run has its reason in place of a bar.

python workflow/scripts/plot_peers.py --table results/tables/local/peers.csv --out-prefix results/plots/local/peers
"""

import textwrap

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FormatStrFormatter

from evals.figures import REHEARSAL, figure_main, frame
from evals.peers.sheet import LIMITED
from evals.peers.tables import AGAINST, read_table

COLOURS = {
    "accelerate": "#CC79A7",
    "engine": "#0072B2",
    "llama_bench": "#E69F00",
    "llama_cpp": "#D55E00",
    "transformers": "#009E73",
}
NOTHING = "No host has run other programs yet.\n\nsnakemake --cores 1 results/peers"
POINTS = ["model", "host", "memory", "memory_bytes", "peer", "program", "tokens_per_s", "against", "speedup"]
POINTS += [
    "speedup_low",
    "speedup_high",
    "delta_percent",
    "delta_percent_low",
    "delta_percent_high",
    "status",
    "reason",
]


def draw(table: pd.DataFrame):
    title = "How many tokens a second, by what a user can run in the same memory?"
    if table.empty:
        figure = frame(title, "", [], width=9.6, height=2.4)
        ax = figure.subplots()
        ax.set_axis_off()
        ax.text(0.5, 0.5, NOTHING, ha="center", va="center", fontsize=9, color="#555555")
        return figure, pd.DataFrame(columns=POINTS)
    places = list(table.drop_duplicates(["host", "model"])[["host", "model"]].itertuples(index=False, name=None))
    sizes = table.groupby(["memory", "host", "model"]).size().groupby("memory").max()
    counts = {memory: int(sizes[memory]) for memory in AGAINST if memory in sizes}
    programs = [program for program in COLOURS if program in set(table["program"])]
    handles = [Patch(color=COLOURS[program], label=program) for program in programs]
    height = 2.0 + 0.3 * len(counts) + 0.23 * sum(counts.values())
    figure = frame(title, caption(table), handles, width=2.2 + 5.2 * len(places), height=height)
    shares = list(counts.values())
    axes = figure.subplots(len(counts), len(places), squeeze=False, sharex=True, height_ratios=shares)
    rates = table["tokens_per_s"].dropna()
    limits = (rates.min() / 2, rates.max() * 25) if len(rates) else (0.1, 100)
    for column, (host, model) in enumerate(places):
        own = table[(table["host"] == host) & (table["model"] == model)]
        for row, memory in enumerate(counts):
            panel(axes[row, column], own[own["memory"] == memory], f"{model} on {host}", limits)
    for ax in axes[-1]:
        ax.set_xlabel("tokens a second")
    return figure, table[POINTS]


def panel(ax: Axes, rows: pd.DataFrame, where: str, limits: tuple[float, float]) -> None:
    ax.set_xscale("log")
    ax.set_xlim(*limits)
    ax.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.set_yticks(np.arange(len(rows)), rows["peer"])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    memory = rows["memory_bytes"].dropna()
    room = f"{memory.iloc[0] / 1e9:g} GB of memory" if len(memory) else "all in memory"
    ax.set_title(f"{where}, {room}", fontsize=8)
    for place, row in enumerate(rows.to_dict("records")):
        if row["status"] != "ok":
            words = textwrap.shorten(f"{row['status']}: {row['reason']}", 62, placeholder=" ...")
            ax.text(limits[0] * 1.1, place, words, va="center", fontsize=6.5, color="#555555")
            continue
        ax.barh(place, row["tokens_per_s"] - limits[0], left=limits[0], height=0.62, color=COLOURS[row["program"]])
        ax.text(row["tokens_per_s"] * 1.1, place, words_of(row), va="center", fontsize=6.5)


def words_of(row: dict) -> str:
    """Rate, ratio with its interval, change of perplexity."""
    found = [f"{row['tokens_per_s']:.3g}"]
    if row["against"] == row["peer"]:
        found.append("= 1")
    elif np.isfinite(row["speedup"]):
        ends = f" ({row['speedup_low']:.3g} to {row['speedup_high']:.3g})" if np.isfinite(row["speedup_low"]) else ""
        found.append(f"{row['speedup']:.3g}x{ends}")
    if row["program"] == "engine" and row["delta_percent"]:
        found.append(f"{row['delta_percent']:+.2g} %")
    return "   ".join(found)


def caption(table: pd.DataFrame) -> str:
    ok = table[table["status"] == "ok"]
    parts = []
    for (host, model), own in ok.groupby(["host", "model"], sort=False):
        name = f"{model} ({REHEARSAL})" if own["rehearsal"].any() else model
        rates = own.dropna(subset=["tokens"])
        bytes_of_experts = own["experts_bytes"].iloc[0] / 1e9
        parts.append(
            f"Model {name}, {own['size'].iloc[0]}, {bytes_of_experts:.3g} GB of experts, on {host}; one run a program, "
            f"{rates['documents'].max():.0f} documents, {rates['tokens'].max():.0f} timed tokens (fewer where a "
            "program is slow: the sheet says)."
        )
    level = f"{ok['level'].iloc[0]:.0%}" if len(ok) else ""
    rows = ok.loc[ok["memory"] == LIMITED, "read_ahead_kb"].value_counts().sort_index()
    ahead = ", ".join(f"{kb:g} KB for {count}" for kb, count in rows.items())
    parts.append(
        f"Measured. Read-ahead of the disk under the limit, by rows: {ahead} (the table says which). Ratios: mean time "
        f"a token of {AGAINST[LIMITED]} (above) or {AGAINST['all']} (below) over the "
        f"program's, on the tokens that both decoded, {level} interval over documents, which knows nothing of how a "
        "machine differs from run to run. In per cent: perplexity against the engine that fetches every miss."
    )
    return "\n".join(parts)


if __name__ == "__main__":
    figure_main(draw, __doc__.splitlines()[0], read_table, "peers.csv")
