"""Loss against substituted mass over many policies, where the first choice is always fetched and where it is not.

A row a model; left, the policies whose counts show that no first choice was replaced, right, the others. A line joins
the rows of one threshold, from no background admission (small marker) to the readiest (large); of `mass_budget` it
joins the shares. A black edge marks random stand-ins, the control.

python workflow/scripts/plot_sweep_loss_by_mass.py --table results/tables/local/sweep.csv --out-prefix plot
"""

import pandas as pd
from matplotlib.lines import Line2D

from evals.checked_tables import add_columns, need_columns, refuse, to_flags, to_numbers
from evals.figures import (
    COLOURS,
    LOSS,
    LOSS_LABEL,
    MARKERS,
    POOLED,
    Look,
    caption,
    errors,
    figure_main,
    frame,
    label_ends,
    model_title,
    ok_rows,
    read_table,
    rule_handles,
    set_loss_scale,
)

ROW = ("tau", "share", "standin", "standin_weight", "standin_recency", "beta")
COLUMNS = ["model", "policy", "miss_rule", "tau", "share", "standin", "beta", "protects_first", "instrument", "slots"]
COLUMNS += ["slots_percent", "substituted_mass", *LOSS, "lossy_without_effect", "documents", "tokens", "rehearsal"]
PANELS = {True: "first choices always fetched", False: "first choices replaced"}
NOTE = (
    "Every policy runs once over documents of the texts in turn, from the warm start: the topic changes after every "
    "document. Rows that differ in weight or recency of the stand-in alone are left out. A cross marks a lossy policy "
    "that replaced nothing."
)


def read_sweep(path: str) -> pd.DataFrame:
    """sweep.csv: as quality.csv, with the columns of the sheet. UserError."""
    table = read_table(path)
    need_columns(path, table, ROW, "the table of the sweep")
    need_columns(path, table, ["protects_first"] if (table["status"] == "ok").any() else [], "the table of the sweep")
    add_columns(table, ["protects_first"])
    to_flags(path, table, "protects_first")
    infinite = table["tau"] == "inf"
    table.loc[infinite, "tau"] = ""
    for name in ("tau", "share", "beta"):
        to_numbers(path, table, name, needed=False)
    table.loc[infinite, "tau"] = float("inf")
    refuse(path, table, ~table["standin"].isin(["", "next_best", "random"]), "standin", "next_best or random")
    return table


def marker_area(beta: pd.Series) -> pd.Series:
    """Square points: the readier background admission, the larger; none is smallest."""
    return 14 + 12 / beta.fillna(float("inf"))


def line_of(row: pd.Series) -> str:
    """What the rows of one line share, in words."""
    words = f"tau {row['tau']:g}" if row["miss_rule"] == "threshold" else row["miss_rule"]
    return f"{words}, random" if row["standin"] == "random" else words


def draw(table: pd.DataFrame):
    ordinary = (table["standin_weight"] == "own") & (table["standin_recency"] == "True")
    shown = table[~table["lossless"] & ordinary]
    models = table["model"].unique()
    betas = sorted({beta for beta in shown["beta"].dropna()}, reverse=True)
    grey = {"color": "#555555", "marker": MARKERS["emulator"], "linestyle": "none"}
    sizes = [(float("inf"), "no background"), *((beta, f"beta {beta:g}") for beta in betas)]
    handles = [
        Line2D([], [], **grey, markersize=float(marker_area(pd.Series([beta])).iloc[0]) ** 0.5, label=words)
        for beta, words in sizes
    ]
    random = Line2D([], [], **grey, markeredgecolor="#000000", markersize=6, label="random stand-ins")
    figure = frame(
        f"Loss by substituted mass over a sweep of policies: {', '.join(model_title(table, m) for m in models)}",
        caption(shown if len(shown) else table, NOTE),
        [*rule_handles(shown), *handles, random],
        width=13.2,
        height=1.9 + 3.4 * len(models),
    )
    panels = figure.subplots(len(models), len(PANELS), squeeze=False)
    points = ok_rows(shown, POOLED).dropna(subset=["delta_percent"])
    for axes, model in zip(panels, models, strict=True):
        for ax, (protects, words) in zip(axes, PANELS.items(), strict=True):
            own = points[(points["model"] == model) & (points["protects_first"] == protects)]
            ax.set_title(f"{model}: {words}" if len(own) else f"{model}: {words}\nno result")
            ax.set_xlabel("substituted mass (share of an event's gate weight)")
            ax.set_ylabel(LOSS_LABEL)
            draw_panel(ax, own)
    return figure, points[COLUMNS]


def draw_panel(ax, own: pd.DataFrame) -> None:
    ax.axhline(0, color="#000000", linewidth=0.9)
    ends = []
    for words, rows in own.groupby(own.apply(line_of, axis=1) if len(own) else [], sort=False):
        rows = rows.sort_values("substituted_mass", kind="stable")
        rule, random = rows["miss_rule"].iloc[0], rows["standin"].iloc[0] == "random"
        look = Look(COLOURS[rule], MARKERS["emulator"], ":" if random else "-")
        x, y = rows["substituted_mass"], rows["delta_percent"]
        ax.plot(x, y, **(look.line | {"linewidth": 0.8}), zorder=2)
        ax.errorbar(x, y, errors(rows), color=look.colour, fmt="none", capsize=2, elinewidth=0.7, alpha=0.7)
        for flagged, part in rows.groupby("lossy_without_effect"):
            edge = {"edgecolors": "#000000"} if random and not flagged else {}
            ax.scatter(
                part["substituted_mass"],
                part["delta_percent"],
                s=marker_area(part["beta"]),
                color=look.colour,
                marker="x" if flagged else look.marker,
                linewidths=0.9,
                zorder=3,
                **edge,
            )
        ends.append((x.iloc[-1], y.iloc[-1], words, look))
    set_loss_scale(ax.yaxis, own)
    label_ends(ax, ends)


if __name__ == "__main__":
    figure_main(draw, __doc__, read_sweep, "sweep.csv")
