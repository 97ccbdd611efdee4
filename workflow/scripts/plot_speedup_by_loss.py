"""Speedup against loss, a panel a machine and model: how much faster than fetching every miss, at what perplexity?

A machine is a host and a link. Up is faster than the baseline at the same slots, right is worse. Large: the slot budget
that decides; small and faint: the same policy with other budgets. Exact policies stand at loss 0, and their lines
cross the panel. Dashed ones know the future: above belady a policy is faster than the best choice of residents could
make an exact one, above perfect prediction faster than any exact one that prefetches by the same scheduler. The tick
above a point is where the physical limit of the link would put it. Of policies that prefetch, SpecPrefetch alone.

python workflow/scripts/plot_speedup_by_loss.py --table results/tables/local/speed.csv --out-prefix speedup_by_loss
"""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from engine.policies import BASELINE
from evals.figures import (
    CLAIRVOYANT,
    LOSS_LABEL,
    MARKERS,
    POOLED,
    Look,
    figure_main,
    frame,
    label_ends,
    looks,
    rule_handles,
    set_loss_scale,
)
from evals.speed_figures import (
    Panel,
    bounds,
    caption,
    change,
    compared,
    delays,
    grid,
    interval,
    models_title,
    panel_title,
    panels,
    primary_slots,
    say,
    scored_ahead,
    times,
    why_no_speedup,
    with_result,
)
from evals.speed_tables import LOSS_INTERVAL, SPEEDUP, read_speed

COLUMNS = ["model", "host", "host_status", "link", "link_kind", "link_status", "policy", "miss_rule", "eviction"]
COLUMNS += ["prefetch", "schedule", "instrument", "slots", "slots_percent", "slots_count", "experts", "text", *SPEEDUP]
COLUMNS += ["limit_speedup", *LOSS_INTERVAL, "lossless", "effect", "delay_tokens", "loss_tokens", "documents", "tokens"]
COLUMNS += ["rehearsal"]
LARGE, SMALL, FAINT = 5.5, 2.6, 0.45  # points, points, opacity
GREY = "#555555"
TICKS = (  # of a scale whose ends are less than so many times apart
    (2.5, (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 1.7, 2)),
    (200, (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100)),
    (math.inf, tuple(10.0**k for k in range(-3, 6))),
)
DWARFS = 4  # a machine is drawn on its own scale where another's speedups reach so many times further


def draw(table: pd.DataFrame):
    table = compared(table)
    style = looks(table)
    high, wide = grid(table)
    note = (
        f"Speedup: mean time a token of {BASELINE}, which fetches every miss, over that of the policy at the same "
        f"slots. Loss is paired on the same tokens. Bars: {interval(table)}. Exact policies stand at 0, their lines "
        f"cross the panel. Dashed, bounds, which know the future: {bounds(table)}. Tick above a point: the same policy "
        "with its fetches at the link's physical limit. A cross marks a lossy policy without effect. Machines whose "
        "speedups are far apart have scales of their own." + delays(table) + scored_ahead(table)
    )
    figure = frame(
        f"How much faster than fetching every miss, at what loss? {models_title(table)}",
        caption(table, note + without_loss(table)),
        [*rule_handles(table), *budget_handles(table)],
        width=max(9.6, 0.9 + 4.35 * wide),
        height=2.1 + high * max(2.0 if high > 1 else 3.0, 0.5 + 0.145 * len(style)),
    )
    shown = panels(figure, table, sharex=True)
    drawn = [draw_panel(panel, primary_slots(table, panel.model), style) for panel in shown]
    points = pd.concat(drawn)
    set_scales(shown, points, speedup_limits(shown, points))
    for panel, own in zip(shown, drawn, strict=True):
        label(panel, own[own["slots"] == primary_slots(table, panel.model)], style)
    return figure, points[COLUMNS]


def draw_panel(panel: Panel, primary: str, style: dict[str, Look]) -> pd.DataFrame:
    """Every policy through its slot budgets. Returns the points drawn."""
    ax, reason = panel.ax, why_no_speedup(panel, primary)
    points = with_result(panel.rows).dropna(subset=["speedup", "delta_percent"])
    points = points.assign(limit_speedup=points["speedup"] * points["token_s_mean"] / points["limit_token_s"])
    if reason:
        say(ax, f"no speedup: {reason.removeprefix('no speedup: ')}")
    for policy, own in points.groupby("policy", sort=False):
        look, own = style[policy], own.sort_values("slots_percent")
        if not own["lossless"].all():
            ax.plot(own["delta_percent"], own["speedup"], **(look.line | {"linewidth": 0.9, "alpha": FAINT}))
        for row in own.to_dict("records"):
            large = row["slots"] == primary
            mark(ax, row, replace(look, marker=MARKERS[row["instrument"]]), large)
            if large and row["lossless"]:
                ax.axhline(row["speedup"], **(look.line | {"linewidth": 0.9}), zorder=1)
    ax.set_title(panel_title(panel), fontsize=8)
    return points


def mark(ax, row: dict, look: Look, large: bool) -> None:
    """One policy at one budget: large with its intervals and the link's limit, or small and faint."""
    x, y, effect = row["delta_percent"], row["speedup"], row["effect"]
    marker = look.point | ({} if effect else {"marker": "x"})
    if not large:
        ax.plot(x, y, **marker, markersize=SMALL, alpha=FAINT, zorder=2.5)
        return
    bars = {"color": look.colour, "fmt": "none", "elinewidth": 1, "capsize": 2, "zorder": 3}
    for reach, columns in (("xerr", LOSS_INTERVAL), ("yerr", SPEEDUP)):
        estimate, low, high = (row[name] for name in columns)
        if low < high:  # neither absent nor a point
            ax.errorbar(x, y, **{reach: np.clip([[estimate - low], [high - estimate]], 0, None)}, **bars)
    ax.plot(x, y, **marker, markersize=LARGE, markeredgewidth=1.4, zorder=4)
    if np.isfinite(row["limit_speedup"]):
        ax.plot([x, x], [y, row["limit_speedup"]], color=look.colour, linewidth=0.6, zorder=2)
        ax.plot(x, row["limit_speedup"], marker="_", color=look.colour, markersize=8, markeredgewidth=1.2, zorder=2)


def set_scales(shown: list[Panel], points: pd.DataFrame, limits: dict[tuple, tuple[float, float]]) -> None:
    """One scale of loss, and of every machine its limits of speedup, on a logarithm: twice is as far as half."""
    own_scales = len(set(limits.values())) > 1
    for panel in shown:
        ax, (low, high) = panel.ax, limits[panel.host, panel.link]
        ax.set_yscale("log")
        ax.set_ylim(low, high)
        ticks = next(ticks for reach, ticks in TICKS if high / low < reach)
        ax.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}\u00d7"))
        ax.tick_params(labelbottom=panel.last, labelleft=panel.first or own_scales)
        if panel.first:
            ax.set_ylabel(f"speedup against\n{BASELINE}")
    axis = shown[0].ax.xaxis
    axis.set_label_text(LOSS_LABEL)
    set_loss_scale(axis, points)
    text = axis.get_label_text()
    for panel in shown:
        panel.ax.set_xlabel(text if panel.last else "")


def speedup_limits(shown: list[Panel], points: pd.DataFrame) -> dict[tuple, tuple[float, float]]:
    """Lowest and highest speedup of every (host, link); one pair for all where none is dwarfed by another."""
    result = {}
    for machine in dict.fromkeys((panel.host, panel.link) for panel in shown):
        here = points[(points["host"] == machine[0]) & (points["link"] == machine[1])]
        values = here[[*SPEEDUP, "limit_speedup"]].to_numpy().ravel()
        values = np.append(values[np.isfinite(values) & (values > 0)], 1.0)
        result[machine] = values.min() / 1.12, max(values.max() * 1.12, 1.3)
    lows, highs = zip(*result.values(), strict=True)
    if max(highs) <= DWARFS * min(highs):
        return dict.fromkeys(result, (min(lows), max(highs)))
    return result


def label(panel: Panel, points: pd.DataFrame, style: dict[str, Look]) -> None:
    """Speedup, policy and loss at the right edge; exact policies are named at the end of their lines."""
    edge = panel.ax.get_xlim()[1]
    ends = []
    for row in points.to_dict("records"):
        look, loss = style[row["policy"]], change(row["delta_percent"])
        if row["lossless"]:
            loss = "exact (bound)" if look.pattern == CLAIRVOYANT else "exact"
        elif not row["effect"]:
            loss = "no effect"
        words = f"{times(row['speedup'])}  {row['policy']}, {loss}"
        ends.append((edge if row["lossless"] else row["delta_percent"], row["speedup"], words, look))
    label_ends(panel.ax, ends)


def budget_handles(table: pd.DataFrame) -> list[Line2D]:
    """Legend entries: large and small markers, and the tick of the link's limit."""
    first = table["model"].iloc[0]
    primary = primary_slots(table, first)
    others = [slots for slots in table.loc[table["model"] == first, "slots"].unique() if slots != primary]
    point = {"color": GREY, "marker": "s", "markerfacecolor": "white", "linestyle": "none"}
    handles = [Line2D([], [], **point, markersize=LARGE, markeredgewidth=1.4, label=f"{primary} (labelled)")]
    if others:
        handles.append(Line2D([], [], **point, markersize=SMALL, alpha=FAINT, label=", ".join(others)))
    tick = {"color": GREY, "marker": "_", "markersize": 8, "linestyle": "none"}
    return [*handles, Line2D([], [], **tick, label="at the link's physical limit")]


def without_loss(table: pd.DataFrame) -> str:
    """Names the policies that have a time and no loss somewhere: they cannot be drawn."""
    rows = with_result(table[table["text"] == POOLED])
    names = rows.loc[rows["delta_percent"].isna(), "policy"].unique()
    return f" Without a loss in some cell, hence not drawn there: {', '.join(names)}." if len(names) else ""


if __name__ == "__main__":
    figure_main(draw, __doc__, read_speed, "speed.csv")
