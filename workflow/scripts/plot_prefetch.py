"""What does prefetching gain where the output must be exact, and what keeps it from more? A panel a machine and model.

A machine is a host and a link. Rows are exact policies at the budget at which prefetching was tried: nothing prefetched
(the baseline, 1), predictors under the scheduler that works in pieces, the scheduler with parts of it taken away
(`window`: whole records; `always`: whole records of all that is named, whether they can be in time or not), and what
knows the future. Perfect prediction bounds every predictor under the same scheduler and link, perfect eviction what a
better choice of residents could save; the tick is the same policy with its fetches at the link's physical limit. At the
right: speedup with its interval, records prefetched a token, and the share of them that an event took.

python workflow/scripts/plot_prefetch.py --table results/tables/local/speed.csv --out-prefix prefetch
"""

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from engine.errors import error
from engine.policies import BASELINE, PREFETCH
from evals.figures import MARKERS, OPEN, clairvoyant, figure_main, frame
from evals.speed_figures import (
    Panel,
    bounds,
    caption,
    grid,
    interval,
    models_title,
    panel_title,
    panels,
    primary_slots,
    say,
    why_no_speedup,
    with_result,
)
from evals.speed_tables import AHEAD, SPEEDUP, read_speed

COLUMNS = ["model", "host", "host_status", "link", "link_kind", "link_status", "policy", "eviction", "prefetch"]
COLUMNS += ["schedule", "instrument", "slots", "slots_percent", "slots_count", "experts", "text", *SPEEDUP]
COLUMNS += ["limit_speedup", *AHEAD, "taken_share", "documents", "tokens", "rehearsal"]
PREDICTORS = tuple(name for name in PREFETCH if name not in ("oracle", "random"))
WANTED = {  # (eviction, prefetch, schedule) that the figure is about: what its row is called without a policy
    ("", "", ""): "none",
    **{("", predictor, "pieces"): predictor for predictor in PREDICTORS},
    ("", "spec_prefetch", "window"): "whole records",
    ("", "spec_prefetch", "always"): "whole records, no window",
    ("", "oracle", "pieces"): "perfect prediction",
    ("belady", "", ""): "perfect eviction",
}
GROUPS = ("nothing prefetched", "predictors, in pieces", "other schedules", "bounds")
COLOURS = dict(zip(GROUPS, ("#000000", "#0072B2", "#D55E00", "#666666"), strict=True))
WRITTEN = (42, 104, 140, 176)  # right edges of the columns of numbers, in points from the panel
HEADS = ("speedup", "interval", "fetched\nahead", "of these\ntaken")
GAP = 0.55  # rows between groups


class Row(NamedTuple):
    """One line of every panel. policy: None where the table has none of its kind."""

    label: str
    policy: str | None
    group: str
    place: float


def draw(table: pd.DataFrame):
    table = exact(table)
    if table.empty:
        raise error("a table of speed without an exact policy", f"rows of {BASELINE}", "delete it and run again")
    budgets = {model: budget(table, model) for model in table["model"].unique()}
    shown = table[table["slots"] == table["model"].map(budgets)]
    rows = roster(shown)
    high, wide = grid(shown)
    note = (
        f"Speedup: mean time a token of {BASELINE}, which prefetches nothing, over that of the policy, at "
        f"{', '.join(dict.fromkeys(budgets.values()))}. All rows compute the model's own output, bit for bit. Bars: "
        f"{interval(shown)}. Tick: the policy with its fetches at the link's physical limit. At the right also the "
        "records that were fetched ahead, a token, and the share of them that an event took. Grey, bounds, which know "
        f"the future: {bounds(shown)}."
    )
    figure = frame(
        f"What does prefetching gain, the output being exact? {models_title(shown)}",
        caption(shown, note),
        handles(shown),
        width=max(9.6, 2.4 + 4.8 * wide),
        height=1.8 + high * (0.75 + 0.165 * (rows[-1].place + 1)),
    )
    together = "row" if len(budgets) > 1 else False  # one machine's panels have one scale
    every = panels(figure, shown, sharex=together, sharey=True)
    points = pd.concat([draw_panel(panel, rows) for panel in every])
    for panel in every:
        panel.ax.set_xlim(limits(points[(points["host"] == panel.host) & (points["link"] == panel.link)]))
    return figure, points[COLUMNS]


# ---- which rows ------------------------------------------------------------------------------------------------------
def exact(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of the baseline, of what prefetches without loss, and of bounds."""
    wanted = (table["policy"] == BASELINE) | (table["prefetch"] != "") | clairvoyant(table)
    return table[wanted & table["lossless"]]


def budget(table: pd.DataFrame, model: str) -> str:
    """The slot budget that decides, of those at which something is prefetched."""
    tried = table[(table["model"] == model) & (table["prefetch"] != "")]
    return primary_slots(tried if len(tried) else table, model)


def roster(table: pd.DataFrame) -> list[Row]:
    """The rows by group, of a group those that are wanted first; a kind without a policy has a row that says so."""
    kinds = {kind: [] for kind in WANTED}
    for row in table.drop_duplicates("policy").to_dict("records"):
        eviction = row["eviction"] if row["eviction"] == "belady" else ""
        kinds.setdefault((eviction, row["prefetch"], row["schedule"]), []).append(row["policy"])
    lines = [(group_of(kind), name(kind, policy), policy) for kind in kinds for policy in kinds[kind] or [None]]
    rows, place = [], -1 - GAP
    for group in GROUPS:
        place += GAP
        for label, policy in [(label, policy) for of, label, policy in lines if of == group]:
            place += 1
            rows.append(Row(label, policy, group, place))
    return rows


def group_of(kind: tuple[str, str, str]) -> str:
    eviction, prefetch, schedule = kind
    if eviction or prefetch == "oracle":
        return GROUPS[3]
    return GROUPS[0] if not prefetch else GROUPS[1] if schedule == "pieces" else GROUPS[2]


def name(kind: tuple[str, str, str], policy: str | None) -> str:
    """The policy, and what it is where its name need not say it."""
    what = WANTED.get(kind, f"{kind[1]}, {kind[2]}")
    return what if policy in (None, what) else f"{what} ({policy})"


# ---- a panel ---------------------------------------------------------------------------------------------------------
def draw_panel(panel: Panel, rows: list[Row]) -> pd.DataFrame:
    """A marker a policy with its interval, or `no row`, `no result`, `no speedup`. Returns the points drawn."""
    ax, found = panel.ax, with_result(panel.rows)
    found = found.assign(
        limit_speedup=found["speedup"] * found["token_s_mean"] / found["limit_token_s"],
        taken_share=found["taken_per_token"] / found["prefetched_per_token"].where(found["prefetched_per_token"] > 0),
    )
    by_policy = {row["policy"]: row for row in found.to_dict("records")}
    ax.axvline(1.0, color="#999999", linewidth=0.8, zorder=1)
    for row in rows:
        result = by_policy.get(row.policy)
        if result is None:
            put(ax, WRITTEN[0], row.place, "no result" if row.policy in set(panel.rows["policy"]) else "no row")
        else:
            mark(ax, row, result)
            for edge, word in zip(WRITTEN, numbers(result), strict=True):
                put(ax, edge, row.place, word)
    for edge, words in zip(WRITTEN, HEADS, strict=True):
        put(ax, edge, -1.0, words, "#555555")
    reason = why_no_speedup(panel, panel.rows["slots"].iloc[0]) if len(panel.rows) else "no row over all texts"
    if reason:
        say(ax, f"no speedup: {reason.removeprefix('no speedup: ')}")
    ax.set_yticks([row.place for row in rows], [row.label for row in rows])
    ax.set_ylim(rows[-1].place + 0.6, -0.6)
    ax.grid(axis="y", visible=False)
    ax.tick_params(labelleft=panel.first, left=False)
    ax.set_title(panel_title(panel), fontsize=8, pad=20)
    if panel.last:
        ax.set_xlabel(f"speedup against {BASELINE}")
    return found.dropna(subset=["speedup"])


def mark(ax: Axes, row: Row, result: dict) -> None:
    estimate, low, high = (result[column] for column in SPEEDUP)
    if not np.isfinite(estimate):
        return
    colour, marker = COLOURS[row.group], MARKERS[result["instrument"]]
    face = "white" if marker in OPEN else colour
    if np.isfinite(result["limit_speedup"]):
        ends = [estimate, result["limit_speedup"]]
        ax.plot(ends, [row.place] * 2, color=colour, linestyle=":", linewidth=0.9, zorder=2)
        tick = {"marker": "|", "markersize": 7, "markeredgewidth": 1.2}
        ax.plot(result["limit_speedup"], row.place, color=colour, **tick, zorder=2)
    if low < high:  # neither absent nor a point
        reach = np.clip([[estimate - low], [high - estimate]], 0, None)
        ax.errorbar(estimate, row.place, xerr=reach, color=colour, fmt="none", elinewidth=1, capsize=2, zorder=3)
    look = {"color": colour, "marker": marker, "markerfacecolor": face, "markeredgewidth": 1.4}
    ax.plot(estimate, row.place, **look, markersize=5, zorder=4)


def numbers(result: dict) -> list[str]:
    """Speedup, its interval, records prefetched a token, and the share of them that was taken; empty where absent."""
    speedup, low, high = (result[column] for column in SPEEDUP)
    brought, share = result[AHEAD[0]], result["taken_share"]
    return [
        "-" if pd.isna(speedup) else f"{speedup:.3f}\u00d7",
        f"{low:.3f} to {high:.3f}" if low < high else "",
        "" if pd.isna(brought) else f"{brought:.2f}",
        "" if pd.isna(share) else f"{100 * share:.0f} %",
    ]


def put(ax: Axes, edge: float, place: float, word: str, colour: str = "#000000") -> None:
    """A word at the right of a panel, right-aligned at an edge."""
    at = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points", "annotation_clip": False}
    ax.annotate(word, (1, place), (edge, 0), **at, ha="right", va="center", fontsize=7, color=colour)


def limits(points: pd.DataFrame) -> tuple[float, float]:
    """Of a machine: all that is drawn and the baseline, with room beside."""
    values = points[[*SPEEDUP, "limit_speedup"]].to_numpy().ravel()
    values = np.append(values[np.isfinite(values)], 1.0)
    room = 0.06 * max(np.ptp(values), 0.05)
    return values.min() - room, values.max() + room


def handles(table: pd.DataFrame) -> list[Line2D]:
    """Legend entries: a colour a group, a marker an instrument, the tick of the link's limit."""
    found = [Line2D([], [], color=colour, linewidth=3, label=group) for group, colour in COLOURS.items()]
    for instrument in table["instrument"].unique():
        marker = MARKERS[instrument]
        face, how = ("white", "modelled") if marker in OPEN else ("#555555", "measured")
        point = {"color": "#555555", "marker": marker, "markerfacecolor": face, "linestyle": "none"}
        found.append(Line2D([], [], **point, label=f"{instrument}, {how}"))
    tick = {"color": "#555555", "marker": "|", "markersize": 7, "linestyle": "none"}
    return [*found, Line2D([], [], **tick, label="at the link's physical limit")]


if __name__ == "__main__":
    figure_main(draw, __doc__, read_speed, "speed.csv")
