"""Speedup against loss as the engine measured them, beside what the simulator makes of the same tokens.

A row of panels a host and link, a column a model and size. Filled: the engine, the loss is that of its own decision
logs; open: the simulator with the host's own profile, at the loss of the engine's point, which a line joins it to. The
tick above a measured point is where the link's physical limit would put it. Exact policies stand at loss 0. What knows
the future (perfect eviction, perfect prediction) cannot run: these bounds are modelled alone, their dashed lines cross
the panel. Of policies that prefetch, SpecPrefetch alone.

python workflow/scripts/plot_measured_speedup.py --table results/tables/local/measured.csv --out-prefix measured_speedup
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from engine.policies import BASELINE
from evals.figures import (
    CLAIRVOYANT,
    LOSS_LABEL,
    MARKERS,
    POOLED,
    REHEARSAL,
    Look,
    clairvoyant,
    figure_main,
    frame,
    label_ends,
    looks,
    rule_handles,
    set_loss_scale,
)
from evals.measured_tables import ENGINE, LOSS, SIMULATOR, SPEEDUP, read_measured
from evals.speed_figures import NAMED_GAPS, bounds, change, interval, primary_slots, say, times

COLUMNS = ["model", "size", "host", "profile_quick", "link", "link_status", "policy", "miss_rule", "eviction"]
COLUMNS += ["prefetch", "schedule", "instrument", "slots", "slots_percent", "slots_count", "experts", "text", *SPEEDUP]
COLUMNS += ["limit_speedup", *LOSS[:3], "lossless", "effect", "documents", "tokens", "repeats", "rehearsal"]
BARS = (("xerr", LOSS[:3]), ("yerr", SPEEDUP))
LARGE, ROOM, REACH = 5.5, 1.12, 2.0  # points; factors beyond the extreme points: at least, and at most for their bars
TICKS = (  # of a scale whose ends are less than so many times apart
    (5, (0.3, 0.5, 0.7, 1, 1.5, 2, 3)),
    (200, (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)),
    (math.inf, tuple(10.0**k for k in range(-6, 6))),
)
NOTHING = "No host is measured yet.\n\nsnakemake --cores 1 results/measured/local"


@dataclass(frozen=True)
class Panel:
    """One model at one size on one host over one link, at the slot budget that decides. rows: of both instruments."""

    rows: pd.DataFrame
    host: str
    link: str
    title: str
    ax: Axes
    first: bool
    last: bool


def draw(table: pd.DataFrame):
    if table.empty:
        return nothing()
    shown = pd.concat([own[own["slots"] == primary_slots(table, model)] for model, own in table.groupby("model")])
    style = looks(shown)
    machines = list(shown.drop_duplicates(["host", "link"])[["host", "link"]].itertuples(index=False, name=None))
    labels = list(shown["label"].unique())
    figure = frame(
        f"Measured: how much faster than fetching every miss, at what loss? {titles(shown)}",
        caption(shown),
        [*rule_handles(shown), Line2D([], [], color="#555555", marker="_", linestyle="none", label="the link's limit")],
        width=max(9.6, 0.9 + 4.8 * len(labels)),
        height=2.2 + len(machines) * max(2.2, 0.5 + 0.145 * len(style)),
    )
    axes = figure.subplots(len(machines), len(labels), squeeze=False, sharex=True)
    panels = []
    for place, ((host, link), label_) in enumerate(itertools.product(machines, labels)):
        own = shown[(shown["host"] == host) & (shown["link"] == link)]
        title = f"{host}, {link} ({own['link_status'].iloc[0]} link): {label_}"
        own = own[(own["label"] == label_) & (own["text"] == POOLED)]
        row, column = divmod(place, len(labels))
        panels.append(Panel(own, host, link, title, axes[row, column], column == 0, row == len(machines) - 1))
    drawn = [draw_panel(panel, style) for panel in panels]
    points = pd.concat(drawn)
    set_scales(panels, points)
    for panel, own in zip(panels, drawn, strict=True):
        label(panel, own, style)
    return figure, points[COLUMNS]


def nothing():
    """The figure of no measured host."""
    figure = frame("Measured: how much faster than fetching every miss, at what loss?", "", [], width=9.6, height=2.4)
    ax = figure.subplots()
    ax.set_axis_off()
    ax.text(0.5, 0.5, NOTHING, ha="center", va="center", fontsize=9, color="#555555")
    return figure, pd.DataFrame(columns=COLUMNS)


# ---- a panel ---------------------------------------------------------------------------------------------------------
def draw_panel(panel: Panel, style: dict[str, Look]) -> pd.DataFrame:
    """A measured point a policy, the modelled one beside it, and the bounds. Returns the points drawn."""
    ok = panel.rows[panel.rows["status"] == "ok"]
    ok = ok.assign(limit_speedup=ok["speedup"] * ok["token_s_mean"] / ok["limit_token_s"])
    measured = ok[ok["instrument"] == ENGINE].dropna(subset=["speedup", "delta_percent"])
    beside = ok["policy"].isin(measured["policy"]) | clairvoyant(ok)
    modelled = ok[(ok["instrument"] == SIMULATOR) & beside].dropna(subset=["speedup"])
    loss = measured.set_index("policy")[list(LOSS[:1])]
    modelled = modelled.drop(columns=list(LOSS[:3])).join(loss, on="policy")
    modelled.loc[clairvoyant(modelled), LOSS[0]] = 0.0  # they fetch every miss
    modelled.loc[~clairvoyant(modelled), "limit_speedup"] = np.nan  # beside the tick of the measured point
    panel.ax.set_title(panel.title, fontsize=8)
    if measured.empty:
        say(panel.ax, why_nothing(panel.rows))
    points = pd.concat([measured, modelled]).reindex(columns=COLUMNS)
    base = {row["policy"]: row for row in measured.to_dict("records")}
    for row in points.to_dict("records"):
        look = replace(style[row["policy"]], marker=MARKERS[row["instrument"]])
        mark(panel.ax, row, look)
        if look.pattern == CLAIRVOYANT:
            panel.ax.axhline(row["speedup"], **(look.line | {"linewidth": 0.9}), zorder=1)
        elif row["instrument"] == SIMULATOR:
            ends = [base[row["policy"]]["speedup"], row["speedup"]]
            panel.ax.plot([row["delta_percent"]] * 2, ends, color=look.colour, linewidth=0.8, linestyle=":", zorder=2)
    return points


def mark(ax: Axes, row: dict, look: Look) -> None:
    x, y = row["delta_percent"], row["speedup"]
    marker = look.point | ({} if row["effect"] else {"marker": "x"})
    ax.plot(x, y, **marker, markersize=LARGE, markeredgewidth=1.4, zorder=4 if row["instrument"] == ENGINE else 3.5)
    for reach, columns in BARS:
        estimate, low, high = (row[name] for name in columns)
        if row["instrument"] == ENGINE and low < high:
            bars = {"color": look.colour, "fmt": "none", "elinewidth": 1, "capsize": 2, "zorder": 3}
            ax.errorbar(x, y, **{reach: np.clip([[estimate - low], [high - estimate]], 0, None)}, **bars)
    if np.isfinite(row["limit_speedup"]):
        ax.plot([x, x], [y, row["limit_speedup"]], color=look.colour, linewidth=0.6, zorder=2)
        ax.plot(x, row["limit_speedup"], marker="_", color=look.colour, markersize=8, markeredgewidth=1.2, zorder=2)


def why_nothing(rows: pd.DataFrame) -> str:
    reasons = [reason for reason in rows.loc[rows["instrument"] == ENGINE, "reason"] if reason]
    return reasons[0] if reasons else "not measured over all texts"


def set_scales(panels: list[Panel], points: pd.DataFrame) -> None:
    """One scale of loss; of every machine its own of speedup, on a logarithm: twice is as far as half."""
    for panel in panels:
        ax = panel.ax
        here = points[(points["host"] == panel.host) & (points["link"] == panel.link)]
        points_at = [1.0, *here[["speedup", "limit_speedup"]].to_numpy(float).ravel()]
        lowest, highest = np.nanmin(points_at), np.nanmax(points_at)
        ends = np.nan_to_num(here[[*SPEEDUP[1:]]].to_numpy(float).ravel(), nan=1.0)  # of few documents, they go far
        ends = np.append(np.clip(ends, lowest / REACH, highest * REACH), [lowest, highest])
        low, high = ends.min() / ROOM, max(ends.max() * ROOM, 1.3)
        ax.set_yscale("log")
        ax.set_ylim(low, high)
        ticks = next(ticks for reach, ticks in TICKS if high / low < reach)
        ax.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}\u00d7"))
        ax.tick_params(labelbottom=panel.last)
        if panel.first:
            ax.set_ylabel(f"speedup against\n{BASELINE}")
    axis = panels[0].ax.xaxis
    axis.set_label_text(LOSS_LABEL)
    set_loss_scale(axis, points.reindex(columns=[*LOSS[:3]]).astype(float), steps=(1,))
    text = axis.get_label_text()
    for panel in panels:
        panel.ax.set_xlabel(text if panel.last else "")


def label(panel: Panel, points: pd.DataFrame, style: dict[str, Look]) -> None:
    """At the right edge: measured speedup, the modelled one in brackets (of bounds alone), policy and loss."""
    edge = panel.ax.get_xlim()[1]
    modelled = points[points["instrument"] == SIMULATOR].set_index("policy")["speedup"]
    ends = []
    for row in points[points["instrument"] == ENGINE].to_dict("records"):
        beside = f" ({times(modelled[row['policy']])})" if row["policy"] in modelled else ""
        loss = "exact" if row["lossless"] else change(row["delta_percent"]) if row["effect"] else "no effect"
        words = f"{times(row['speedup'])}{beside}  {row['policy']}, {loss}"
        ends.append((row["delta_percent"], row["speedup"], words, style[row["policy"]]))
    for row in points[clairvoyant(points)].to_dict("records"):
        words = f"({times(row['speedup'])})  {row['policy']}, exact (bound)"
        ends.append((edge, row["speedup"], words, style[row["policy"]]))
    label_ends(panel.ax, ends)


# ---- words -----------------------------------------------------------------------------------------------------------
def titles(table: pd.DataFrame) -> str:
    names = ", ".join(table["model"].unique())
    return f"{names} ({REHEARSAL})" if table["rehearsal"].all() else names


def caption(table: pd.DataFrame) -> str:
    """Hosts, links, experts, slots, tokens, repeats; what is measured and what is modelled; what is missing."""
    parts = []
    for (host, label_), own in table.groupby(["host", "label"], sort=False):
        row = own.iloc[0]
        quick = ", probed quickly" if row["profile_quick"] else ""
        size = f"an expert: {bytes_in_words(row['expert_bytes'])} of {row['dtype']}"
        rehearsal = f", {REHEARSAL}" if row["rehearsal"] else ""
        parts.append(
            f"{host} (measured host{quick}), {label_} ({size}{rehearsal}), {row['slots']}: {row['slots_percent']:g} % "
            f"resident ({row['slots_count']:g} of {row['experts']:g} experts). {'; '.join(over(own))}."
        )
    parts.append(
        "Filled: engine, measured. Open: simulator, modelled on the host's profile from the same tokens, drawn at the "
        f"measured loss; in brackets. Speedup: mean time a token of {BASELINE} over that of the policy on the same "
        "tokens at the same slots. Loss: the decision logs of the timed runs, scored by the emulator, paired with "
        f"{BASELINE}. Bars: {interval(table)} over documents. Tick: fetches at the link's physical limit. Dashed, "
        f"bounds, which know the future and are modelled alone: {bounds(table)}."
    )
    return "\n".join([*parts, *missing(table)])


def over(own: pd.DataFrame) -> list[str]:
    """Tokens and runs over each link."""
    rows = own[(own["instrument"] == ENGINE) & (own["text"] == POOLED) & (own["status"] == "ok")]
    found = [
        f"{row['link']}: {row['documents']:g} documents, {row['tokens']:g} tokens, runs: {row['repeats']:g}"
        for row in rows.drop_duplicates("link").to_dict("records")
    ]
    return found or ["No result over all texts"]


def missing(table: pd.DataFrame) -> list[str]:
    """What was not measured, and why a host has no modelled points."""
    lost = table[(table["instrument"] == ENGINE) & (table["status"] != "ok")]
    lost = lost.drop_duplicates(["host", "link", "label", "policy"])
    lines = []
    if len(lost):
        named = [f"{row['policy']} on {row['host']}, {row['link']} ({row['label']})" for row in lost.to_dict("records")]
        more = f" and {len(named) - NAMED_GAPS} more" if len(named) > NAMED_GAPS else ""
        lines.append(f"Without a result: {'; '.join(named[:NAMED_GAPS])}{more} (reasons: in the table).")
    modelled = table[table["instrument"] == SIMULATOR]
    for (host, reason), own in modelled[modelled["status"] != "ok"].groupby(["host", "reason"], sort=False):
        names = own["policy"].unique()
        every = len(names) == modelled.loc[modelled["host"] == host, "policy"].nunique()
        which = "" if every else f" ({', '.join(names)})"
        lines.append(f"Not modelled on {host}{which}: {reason}.")
    return lines


def bytes_in_words(number: float) -> str:
    return f"{number / 2**20:.3g} MiB" if number >= 2**20 else f"{number / 2**10:.3g} KiB"


if __name__ == "__main__":
    figure_main(draw, __doc__, read_measured, "measured.csv")
