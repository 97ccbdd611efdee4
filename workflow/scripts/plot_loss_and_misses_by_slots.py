"""Loss and miss rate against the slots a layer, a row of two panels a model: what does more fast memory buy?

Left the loss of every lossy policy over all texts together, right the share of chosen experts that were not resident,
with the clairvoyant bound (belady) dashed: no rule that always admits can miss less.

python workflow/scripts/plot_loss_and_misses_by_slots.py --table results/tables/local/quality.csv --out-prefix x
"""

import pandas as pd
from matplotlib.ticker import FormatStrFormatter
from matplotlib.transforms import ScaledTranslation

from evals.figures import (
    LOSS,
    LOSS_LABEL,
    POOLED,
    Look,
    caption,
    end_label,
    errors,
    figure_main,
    frame,
    label_ends,
    looks,
    model_title,
    ok_rows,
    pooled_grid,
    rule_handles,
    set_loss_scale,
)

COLUMNS = ["panel", "model", "policy", "miss_rule", "eviction", "instrument", "slots", "slots_percent", "text"]
COLUMNS += [*LOSS[:3], "miss_rate_percent", "lossy_without_effect", "documents", "tokens", "rehearsal"]
EXACT = Look("#000000", "o", "-")


def draw(table: pd.DataFrame):
    models, style = table["model"].unique(), looks(table)
    note = (
        "Policies that always fetch lose nothing. Dashed: the clairvoyant bound. A cross marks a lossy policy without "
        "effect. Points of one slot budget are set side by side."
    )
    figure = frame(
        f"Loss and misses by slots: {', '.join(model_title(table, model) for model in models)}",
        caption(table, note),
        rule_handles(table),
        width=11.5,
        height=1.8 + len(models) * max(3.8, 0.15 * len(style)),
    )
    drawn = []
    for panels, model in zip(figure.subplots(len(models), 2, squeeze=False), models, strict=True):
        own = table[table["model"] == model]
        exact = ok_rows(own[own["lossless"]], POOLED)["policy"].unique()
        lossy = own.loc[~own["lossless"], "policy"].unique()
        left, right = panels
        ends = []
        if len(exact):
            left.axhline(0, color=EXACT.colour, linewidth=0.9)
            ends.append((own["slots_percent"].max(), 0.0, f"fetch ({len(exact)} policies): exact", EXACT))
        loss, more = draw_lines(left, table, model, lossy, "delta_percent", style)
        misses, miss_ends = draw_lines(right, table, model, own["policy"].unique(), "miss_rate_percent", style)
        drawn += [loss.assign(panel="loss"), misses.assign(panel="misses")]
        for ax in panels:
            ax.set_xticks(sorted(own["slots_percent"].unique()))
            ax.xaxis.set_major_formatter(FormatStrFormatter("%g"))
            ax.set_xlabel("slots (% of a layer's experts that are resident)")
        left.set_title(f"{model}, all texts: loss")
        right.set_title(f"{model}, all texts: misses")
        left.set_ylabel(LOSS_LABEL)
        set_loss_scale(left.yaxis, loss)
        right.set_ylabel("miss rate (% of the experts chosen)")
        right.set_ylim(bottom=0)
        label_ends(left, [*ends, *more])
        label_ends(right, miss_ends)
    points = pd.concat(drawn)
    points.loc[points["panel"] == "loss", "miss_rate_percent"] = float("nan")
    points.loc[points["panel"] == "misses", list(LOSS[:3])] = float("nan")
    return figure, points[COLUMNS]


def draw_lines(ax, table: pd.DataFrame, model: str, policies, column: str, style: dict[str, Look]):
    """A line a policy, broken where a result is missing. Returns the points drawn and the ends for label_ends."""
    drawn, ends = [table.iloc[:0].assign(miss_rate_percent=0.0)], []
    step_points = min(3.0, 24 / max(1, len(policies)))  # typographic points between neighbours
    for place, policy in enumerate(policies):
        rows, look = pooled_grid(table, model, policy), style[policy]
        rows["miss_rate_percent"] = 100 * rows["miss_rate"]
        points = rows.dropna(subset=[column])
        aside = (place - (len(policies) - 1) / 2) * step_points / 72
        shift = ax.transData + ScaledTranslation(aside, 0, ax.figure.dpi_scale_trans)
        ax.plot(rows["slots_percent"], rows[column], **look.line, transform=shift)
        reach = [column, *LOSS[1:3]] if column == "delta_percent" else [column]
        corners = points.melt("slots_percent", reach)[["slots_percent", "value"]].dropna()
        ax.update_datalim(corners.to_numpy())  # a shifted line does not widen the axes by itself
        if column == "delta_percent":
            bars = {"color": look.colour, "fmt": "none", "capsize": 2, "elinewidth": 0.9, "transform": shift}
            ax.errorbar(points["slots_percent"], points[column], errors(points), **bars)
        for flagged, part in points.groupby("lossy_without_effect"):
            marker = look.point | ({"marker": "x"} if flagged else {})
            ax.plot(part["slots_percent"], part[column], **marker, markersize=5, transform=shift)
        if len(points):
            last = points.iloc[-1]
            ends.append((last["slots_percent"], last[column], end_label(policy, rows, column), look))
        drawn.append(points)
    ax.margins(x=0.09)
    ax.autoscale_view()
    return pd.concat(drawn), ends


if __name__ == "__main__":
    figure_main(draw, __doc__)
