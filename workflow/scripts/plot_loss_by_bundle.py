"""Loss of every bundle with its interval, by topic and over all texts: which difference is there, which could be seen?

Rows are the policies in the order of the sheet, grouped by slots; columns are the texts and, last, all of them
together with the numbers written out. A grey tick stands at the smallest loss that could have been detected.

python workflow/scripts/plot_loss_by_bundle.py --table results/tables/local/quality.csv --out-prefix loss_by_bundle
"""

import pandas as pd

from evals.figures import (
    LOSS,
    LOSS_LABEL,
    POOLED,
    Look,
    caption,
    errors,
    figure_main,
    frame,
    looks,
    model_title,
    ok_rows,
    rule_handles,
    set_loss_scale,
)

COLUMNS = ["model", "slots", "slots_percent", "policy", "miss_rule", "instrument", "text", "topic", *LOSS]
COLUMNS += ["lossless", "lossy_without_effect", "background_inert", "documents", "tokens", "rehearsal"]
NOTE = (
    "Grey tick: the smallest loss that could have been detected. exact: the model's own experts always run, so the "
    "loss is zero by construction. A cross marks a lossy policy without effect, which is not the same."
)


def signed(number: float) -> str:
    return f"{round(number, 2) + 0.0:+.2f}"  # never -0.00


def words(row: pd.Series | None) -> str:
    """A cell in words, for the right edge of the pooled column."""
    if row is None:
        return "no result"
    if row["lossless"]:
        return "exact"
    if row["lossy_without_effect"]:
        return "no effect: nothing was replaced"
    if pd.isna(row["delta_percent"]):
        return "no result: the baseline has none"
    if pd.isna(row["delta_percent_low"]):
        return f"{signed(row['delta_percent'])} (no interval)"
    return f"{signed(row['delta_percent'])} ({signed(row['delta_percent_low'])} to {signed(row['delta_percent_high'])})"


def draw_panel(ax, cells: list[pd.Series | None], looks_: list[Look], written: bool) -> list[int]:
    """One (model, slots, text), a cell a policy, None without a result. Returns the index of the rows plotted."""
    plotted = []
    for place, (row, look) in enumerate(zip(cells, looks_, strict=True)):
        note = ""
        if row is None or (not row["lossless"] and pd.isna(row["delta_percent"])):
            note = "no result"
        elif row["lossless"]:
            note = "exact"
            ax.plot(0, place, **look.point, markersize=4)
        elif row["lossy_without_effect"]:
            note = "no effect"
            ax.plot(0, place, **(look.point | {"marker": "x"}), markersize=6)
        else:
            reach = row["detectable_percent"]
            if pd.notna(reach):
                ax.plot(reach, place, marker="|", color="#999999", markersize=9, markeredgewidth=1.4, zorder=2)
            one = row.to_frame().T[list(LOSS)].astype(float)
            bars = {"xerr": errors(one), "capsize": 2.5, "elinewidth": 0.9, "zorder": 3}
            ax.errorbar(one["delta_percent"], [place], **bars, **look.point, markersize=4.5)
        if note != "no result":
            plotted.append(row.name)
        if written:
            ax.text(1.03, place, words(row), transform=ax.get_yaxis_transform(), fontsize=7, va="center")
        elif note:
            ax.annotate(note, (0, place), (6, 0), textcoords="offset points", fontsize=6.5, va="center")
    return plotted


def draw(table: pd.DataFrame):
    style = looks(table)
    models = table["model"].unique()
    texts = [*table.loc[table["text"] != POOLED, "text"].unique(), POOLED]
    budgets = table.drop_duplicates(["model", "slots"]).sort_values("slots_percent", kind="stable")
    budgets = pd.concat([budgets[budgets["model"] == model] for model in models])
    figure = frame(
        f"Loss by bundle: {', '.join(model_title(table, model) for model in models)}",
        caption(table, NOTE),
        rule_handles(table),
        width=3.6 + 2.0 * len(texts),
        height=1.8 + len(budgets) * (0.45 + 0.19 * len(style)),
    )
    panels = figure.subplots(len(budgets), len(texts), squeeze=False, sharex=True, sharey=True)
    plotted = []
    for axes, budget in zip(panels, budgets.to_dict("records"), strict=True):
        own = ok_rows(table[(table["model"] == budget["model"]) & (table["slots"] == budget["slots"])])
        for ax, text in zip(axes, texts, strict=True):
            rows = own[own["text"] == text]
            index = dict(zip(rows["policy"], rows.index, strict=True))
            cells = [table.loc[index[policy]] if policy in index else None for policy in style]
            plotted += draw_panel(ax, cells, list(style.values()), written=text == POOLED)
            ax.axvline(0, color="#000000", linewidth=0.8, zorder=0.5)
            ax.grid(axis="y", visible=False)
        resident = f"{budget['slots_count']:g} of {budget['experts']:g} experts"
        axes[0].set_ylabel(f"{budget['model']}, {budget['slots']}\n{budget['slots_percent']:g} % ({resident})")
    for ax, text in zip(panels[0], texts, strict=True):
        topics = ", ".join(table.loc[table["text"] == text, "topic"].unique())
        ax.set_title("all texts\n(estimate and interval, %, at the right)" if text == POOLED else f"{text}\n({topics})")
        ax.title.set_fontsize(8)
    panels[0, 0].set_yticks(range(len(style)), list(style))
    panels[0, 0].set_ylim(len(style) - 0.4, -0.6)
    bottom = panels[-1, len(texts) // 2]
    bottom.set_xlabel(LOSS_LABEL)
    set_loss_scale(bottom.xaxis, table.loc[plotted], steps=(1,))
    return figure, table.loc[plotted, COLUMNS]


if __name__ == "__main__":
    figure_main(draw, __doc__)
