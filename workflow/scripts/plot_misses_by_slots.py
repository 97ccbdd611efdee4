"""Miss rate against slots for every eviction, a panel a model: which choice of residents misses least?

Every miss is fetched, so that evictions alone differ. Dashed is the clairvoyant bound (belady): no rule that always
admits can miss less. Colours are the evictions' own here, not those of the miss rules.

python workflow/scripts/plot_misses_by_slots.py --table results/tables/local/curves.csv --out-prefix misses_by_slots
"""

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

from evals.figures import CLAIRVOYANT, MARKERS, POOLED, Look, figure_main, frame, label_ends
from evals.speed_figures import PRIMARY_PERCENT, models_title
from evals.speed_tables import read_curves

COLUMNS = ["model", "eviction", "slots_count", "slots_percent", "experts", "text", "tokens", "miss_rate_percent"]
COLUMNS += ["rehearsal"]
# Tol's muted colours, none of which is a miss rule's; patterns tell them apart in grey
COUNTED = MARKERS["emulator"]  # misses are counted, not modelled
LOOKS = {
    "belady": Look("#000000", COUNTED, CLAIRVOYANT),
    "fifo": Look("#CC6677", COUNTED, (0, (9, 2))),
    "lfu": Look("#44AA99", COUNTED, "-."),
    "lfu_decay": Look("#332288", COUNTED, "-"),
    "lru": Look("#AA4499", COUNTED, (0, (6, 1, 1, 1, 1, 1))),
    "random": Look("#777777", COUNTED, (0, (1, 3))),
}


def draw(table: pd.DataFrame):
    table = table[table["text"] == POOLED]
    models = table["model"].unique()
    tokens = "; ".join(
        f"{model}: {own['tokens'].max():,.0f} tokens, {own['experts'].max():g} experts a layer"
        for model, own in table.groupby("model", sort=False)
    )
    text = (
        f"Models and recorded routing, all texts together: {tokens}. Every miss is fetched, residents start warm from "
        "calibration demand. Misses are counted, no host is timed. Dashed: the clairvoyant bound. Numbers: the miss "
        f"rate at the budget nearest to {PRIMARY_PERCENT:g} %."
    )
    handles = [
        Line2D([], [], **LOOKS["belady"].line, label="clairvoyant bound"),
        Line2D([], [], **Look("#555555", COUNTED, "-").point, markersize=2.6, label="misses counted"),
    ]
    title, width = f"Misses by slots and eviction: {models_title(table)}", max(7.2, 0.6 + 4.7 * len(models))
    figure = frame(title, text, handles, width, 4.2)
    panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    drawn = [draw_panel(ax, table[table["model"] == model]) for ax, model in zip(panels, models, strict=True)]
    panels[0].set_ylabel("miss rate (% of the experts chosen)")
    return figure, pd.concat(drawn)[COLUMNS]


def draw_panel(ax, own: pd.DataFrame) -> pd.DataFrame:
    """A line an eviction through its slot budgets. Returns the points drawn."""
    points = own.assign(miss_rate_percent=100 * own["miss_rate"]).sort_values("slots_percent", kind="stable")
    inner = points[points["slots_count"] < points["experts"]]  # where all are resident every line ends at 0
    ends = []
    for eviction, line in points.groupby("eviction"):
        look = LOOKS[eviction]
        ax.plot(line["slots_percent"], line["miss_rate_percent"], **look.line)
        ax.plot(line["slots_percent"], line["miss_rate_percent"], **look.point, markersize=2.6)
        labelled = inner[inner["eviction"] == eviction]
        anchor = (labelled if len(labelled) else line).iloc[-1]
        near = line.loc[(line["slots_percent"] - PRIMARY_PERCENT).abs().idxmin()]
        words = f"{eviction}: {near['miss_rate_percent']:.1f} % at {near['slots_percent']:g} %"
        ends.append((anchor["slots_percent"], anchor["miss_rate_percent"], words, look))
    low, high = points["slots_percent"].min(), points["slots_percent"].max()
    ax.set_xscale("log", base=2)
    ax.set_xlim(low / 1.1, max(high, low * 1.5) * 1.1)
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(FixedLocator([100 / 2**k for k in range(8) if low <= 100 / 2**k <= high]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.set_title(own["model"].iloc[0])
    ax.set_xlabel("slots (% of a layer's experts that are resident)")
    label_ends(ax, ends)
    return points


if __name__ == "__main__":
    figure_main(draw, __doc__, read_curves, "curves.csv")
