"""Loss against substituted mass, a panel a model: does more gate weight replaced by stand-ins cost more?

Every policy that substitutes is a line through its slot budgets over all texts together; the fewer slots, the smaller
the marker. Always fetching is the baseline at mass 0 and loss 0.

python workflow/scripts/plot_loss_by_mass.py --table results/tables/local/quality.csv --out-prefix loss_by_mass
"""

import pandas as pd
from matplotlib.lines import Line2D

from engine.policies import BASELINE, SUBSTITUTING
from evals.figures import (
    LOSS,
    LOSS_LABEL,
    Look,
    caption,
    end_label,
    errors,
    figure_main,
    frame,
    label_ends,
    looks,
    model_title,
    pooled_grid,
    rule_handles,
    set_loss_scale,
)

COLUMNS = ["model", "policy", "miss_rule", "instrument", "slots", "slots_percent", "text", "substituted_mass"]
COLUMNS += [*LOSS[:3], "lossy_without_effect", "documents", "tokens", "rehearsal"]
BASE = Look("#000000", "o", "-")


def marker_area(slots_percent: pd.Series) -> pd.Series:
    """Square points: proportional to the slots, within what the eye can tell."""
    return 5 + 0.4 * slots_percent


def draw(table: pd.DataFrame):
    shown = table[table["miss_rule"].isin(SUBSTITUTING)]
    models, policies, style = table["model"].unique(), shown["policy"].unique(), looks(table)
    budgets = table.drop_duplicates("slots").sort_values("slots_percent", kind="stable")
    sizes = [
        Line2D([], [], color="#555555", marker="o", linestyle="none", markersize=area**0.5, label=slots)
        for slots, area in zip(budgets["slots"], marker_area(budgets["slots_percent"]), strict=True)
    ]
    figure = frame(
        f"Loss by substituted mass: {', '.join(model_title(table, model) for model in models)}",
        caption(shown if len(shown) else table, "A cross marks a lossy policy that substituted nothing."),
        [*rule_handles(shown), *sizes],
        width=7.6 * len(models),
        height=max(5.2, 1.6 + 0.15 * len(policies)),
    )
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    drawn = []
    for ax, model in zip(panels, models, strict=True):
        ends = []
        ax.axhline(0, color=BASE.colour, linewidth=0.9)
        for policy in policies:
            rows = pooled_grid(table, model, policy)
            points = rows.dropna(subset=["delta_percent", "substituted_mass"])
            x, y, look = points["substituted_mass"], points["delta_percent"], style[policy]
            ax.plot(rows["substituted_mass"], rows["delta_percent"], **look.line)  # broken where a result is missing
            ax.errorbar(x, y, errors(points), color=look.colour, fmt="none", capsize=3, elinewidth=0.9)
            for flagged, part in points.groupby("lossy_without_effect"):
                ax.scatter(
                    part["substituted_mass"],
                    part["delta_percent"],
                    s=marker_area(part["slots_percent"]),
                    color=look.colour,
                    marker="x" if flagged else look.marker,
                    zorder=3,
                )
            if len(points):
                last = points.loc[x.idxmax()]
                words = end_label(policy, rows, "delta_percent")
                ends.append((last["substituted_mass"], last["delta_percent"], words, look))
            drawn.append(points)
        ax.update_datalim([(0, 0)])  # where the baseline stands
        ax.autoscale_view()
        ends.append((ax.get_xlim()[1], 0.0, f"{BASELINE} (0)", BASE))
        ax.set_title(f"{model}, all texts")
        ax.set_xlabel("substituted mass (share of an event's gate weight, mean over events)")
        ax.set_ylabel(LOSS_LABEL)
        set_loss_scale(ax.yaxis, pd.concat([table.iloc[:0], *drawn]).query("model == @model"))
        label_ends(ax, ends)
    return figure, pd.concat([table.iloc[:0], *drawn])[COLUMNS]


if __name__ == "__main__":
    figure_main(draw, __doc__)
