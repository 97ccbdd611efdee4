"""Time a token, split into compute and waiting for experts, a panel a machine and model: where does the time go?

A machine is a host and a link; rows are the policies in the order of the sheet, at the slot budget that decides. A bar
is the mean: first compute, then the stall in the colour of the miss rule. The tick is the 95th percentile of a token,
the triangle the mean with all fetches at the link's physical limit. At the right the mean, its two parts and the
speedup against the baseline. Of policies that prefetch, SpecPrefetch and perfect prediction alone.

python workflow/scripts/plot_token_time.py --table results/tables/local/speed.csv --out-prefix token_time
"""

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from engine.policies import BASELINE
from evals.figures import CLAIRVOYANT, MARKERS, OPEN, Look, figure_main, frame, looks, rule_handles
from evals.speed_figures import (
    Panel,
    bounds,
    caption,
    compared,
    grid,
    interval,
    models_title,
    panel_title,
    panels,
    primary_slots,
    times,
    with_result,
)
from evals.speed_tables import SPEEDUP, TIMES, read_speed

MS = [name.replace("_s_", "_ms_") for name in TIMES]
COLUMNS = ["model", "host", "host_status", "link", "link_kind", "link_status", "policy", "miss_rule", "eviction"]
COLUMNS += ["prefetch", "schedule", "instrument", "slots", "slots_percent", "slots_count", "experts", "text", *MS]
COLUMNS += ["limit_token_ms", *SPEEDUP, "documents", "tokens", "rehearsal"]
COMPUTE = "#bbbbbb"
LIMIT = {"marker": 7, "color": "#000000", "markersize": 4, "linestyle": "none"}  # 7: a caret that points down
WRITTEN = (40, 74, 110, 148)  # right edges of the columns of numbers, in points from the panel
HEADS = ("compute", "+ stall", "= mean", "speedup")


def draw(table: pd.DataFrame):
    table = compared(table)
    style = looks(table)
    high, wide = grid(table)
    budgets = {model: primary_slots(table, model) for model in table["model"].unique()}
    shown = table[table["slots"] == table["model"].map(budgets)]
    note = (
        f"Bars: mean time a token at {', '.join(dict.fromkeys(budgets.values()))}, hatched where it is modelled. Tick: "
        f"95th percentile. Triangle: the mean with all fetches at the link's physical limit. Speedup: mean time of "
        f"{BASELINE} over that of the policy; its {interval(table)} is in the CSV beside the picture. Bounds, which "
        f"know the future: {bounds(table)}."
    )
    figure = frame(
        f"Time a token: {models_title(table)}",
        caption(shown, note),
        handles(shown),
        width=max(9.6, 1.0 + 4.4 * wide),
        height=1.6 + high * (0.6 + 0.17 * len(style)),
    )
    together = "row" if len(budgets) > 1 else False  # one machine's panels have one scale
    all_panels = panels(figure, shown, sharex=together, sharey=True)
    points = pd.concat([draw_panel(panel, style) for panel in all_panels])
    for panel in all_panels:
        here = points[(points["host"] == panel.host) & (points["link"] == panel.link)]
        reach = here[["token_ms_mean", "token_ms_p95"]].max().max()
        panel.ax.set_xlim(0, 1.06 * reach if reach > 0 else 1)
    return figure, points[COLUMNS]


def draw_panel(panel: Panel, style: dict[str, Look]) -> pd.DataFrame:
    """A bar a policy, or the words `no result`. Returns the rows drawn."""
    ax, rows = panel.ax, with_result(panel.rows)
    names = zip((*MS, "limit_token_ms"), (*TIMES, "limit_token_s"), strict=True)
    rows = rows.assign(**{ms: 1000 * rows[name] for ms, name in names})
    found = {row["policy"]: row for row in rows.to_dict("records")}
    for place, (policy, look) in enumerate(style.items()):
        if policy in found:
            bar(ax, place, found[policy], look)
        else:
            write(ax, place, ["no result"])
    write(ax, -0.95, HEADS, color="#555555")
    ax.set_yticks(range(len(style)), [named(policy, look) for policy, look in style.items()])
    ax.set_ylim(len(style) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.tick_params(labelleft=panel.first, left=False)
    ax.set_title(panel_title(panel), fontsize=8, pad=13)
    if panel.last:
        ax.set_xlabel("milliseconds a token")
    return rows


def named(policy: str, look: Look) -> str:
    return f"{policy} (bound)" if look.pattern == CLAIRVOYANT else policy


def bar(ax, place: int, row: dict, look: Look) -> None:
    compute, stall = row["compute_ms_mean"], row["stall_ms_mean"]
    ax.barh(place, compute, height=0.62, **fill(COMPUTE, row["instrument"]))
    ax.barh(place, stall, left=compute, height=0.62, **fill(look.colour, row["instrument"]))
    ax.plot(row["token_ms_p95"], place, marker="|", color="#000000", markersize=9, markeredgewidth=1.4)
    if pd.notna(row["limit_token_ms"]):
        ax.plot(row["limit_token_ms"], place - 0.31, **LIMIT)
    numbers = [milliseconds(row[name]) for name in ("compute_ms_mean", "stall_ms_mean", "token_ms_mean")]
    write(ax, place, [*numbers, "-" if pd.isna(row["speedup"]) else times(row["speedup"])])


def fill(colour: str, instrument: str) -> dict:
    """Full where the time was measured; hatched where it is modelled."""
    if MARKERS[instrument] in OPEN:
        return {"facecolor": "white", "edgecolor": colour, "hatch": "//////", "linewidth": 1.0}
    return {"facecolor": colour, "edgecolor": colour, "linewidth": 1.0}


def write(ax, place: float, words, color: str = "#000000") -> None:
    """Words in the columns at the right of a panel, right-aligned, the fewer of them from the last column on."""
    for edge, word in zip(WRITTEN[-len(words) :], words, strict=True):
        at = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points", "annotation_clip": False}
        ax.annotate(word, (1, place), (edge, 0), **at, ha="right", va="center", fontsize=7, color=color)


def milliseconds(number: float) -> str:
    """Three digits: 0.123, 1.23, 12.3, 123."""
    if number == 0:
        return "0"
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2 if number >= 0.9995 else 3}f}"


def handles(table: pd.DataFrame) -> list:
    """Legend entries: the two parts, the miss rules, the percentile and the link's limit."""
    instrument = table["instrument"].iloc[0]
    rules = [handle for handle in rule_handles(table) if handle.get_label() in set(table["miss_rule"])]
    tick = {"color": "#000000", "marker": "|", "markersize": 9, "markeredgewidth": 1.4, "linestyle": "none"}
    parts = [Patch(**fill(COMPUTE, instrument), label="compute"), Patch(alpha=0, label="stall, by miss rule:")]
    limit = Line2D([], [], **LIMIT, label="mean at the link's physical limit")
    return [*parts, *rules, Line2D([], [], **tick, label="95th percentile"), limit]


if __name__ == "__main__":
    figure_main(draw, __doc__, read_speed, "speed.csv")
