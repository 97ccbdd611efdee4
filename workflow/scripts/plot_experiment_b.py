"""Few heavy against many light substitutions of the same mass: their loss, whom they take as stand-in and how far off.

A row a model. Left, the loss against the exact model by realised mass; then the place of the stand-in among all experts
that are not chosen (1: the best), and how far its output is from the missing expert's, in lengths of that. A line joins
the three levels of a rule; a black edge marks random stand-ins, at the middle level.

python workflow/scripts/plot_experiment_b.py --table results/tables/local/experiment_b.csv --out-prefix experiment_b
"""

import textwrap

import pandas as pd
from matplotlib.lines import Line2D

from engine.policies import PAYING
from evals.experiment_tables import NUMBERS, WORDS, read_experiment_b, verdicts
from evals.figures import (
    COLOURS,
    MARKERS,
    Look,
    errors,
    figure_main,
    frame,
    label_ends,
    model_title,
    set_loss_scale,
    slots_title,
)

PANELS = {
    "delta_percent": "change of token perplexity against the exact model (%)",
    "standin_rank": "place of the stand-in among all not chosen",
    "difference_over_missing": "length of the difference of outputs\nover that of the missing expert's",
}
COLUMNS = [*WORDS[:-1], *NUMBERS, "rehearsal"]
NOTE = (
    "Residents are frozen, every other miss is computed where it lies, the first choice always runs. Every event pays "
    "the level into an account of its layer, from which few_heavy pays for misses of at least the mean weight, "
    "heaviest first, many_light for lighter ones, lightest first. Place and difference: means over a sample of the "
    "substitutions. Filled marker: measured by the emulator; no host is timed."
)


def draw(table: pd.DataFrame):
    models = table["model"].unique()
    grey = {"color": "#555555", "marker": MARKERS["emulator"], "linestyle": "none", "markersize": 5.5}
    handles = [Line2D([], [], color=COLOURS[rule], linewidth=3, label=rule) for rule in PAYING]
    handles.append(Line2D([], [], **grey, label="best stand-ins, at three levels"))
    handles.append(Line2D([], [], **grey, markeredgecolor="#000000", label="random stand-ins"))
    figure = frame(
        f"Few heavy and many light substitutions: {', '.join(model_title(table, model) for model in models)}",
        f"{captions(table)}\n{NOTE}",
        handles,
        width=13.2,
        height=1.9 + 3.3 * len(models),
    )
    panels = figure.subplots(len(models), len(PANELS), squeeze=False)
    points = table[table["status"] == "ok"].dropna(subset=["delta_percent"])
    for axes, model in zip(panels, models, strict=True):
        own = points[points["model"] == model]
        for ax, (column, words) in zip(axes, PANELS.items(), strict=True):
            ax.set_title(f"{model}" if len(own) else f"{model}\nno result")
            ax.set_xlabel("realised mass (share of an event's gate weight)")
            ax.set_ylabel(words)
            draw_panel(ax, own.dropna(subset=[column]), column)
    return figure, points[COLUMNS]


def draw_panel(ax, own: pd.DataFrame, column: str) -> None:
    """Both rules over their levels, in one number."""
    if column == "delta_percent":
        ax.axhline(0, color="#000000", linewidth=0.9)
    ends = []
    for (rule, standin), rows in own.groupby(["miss_rule", "standin"], sort=False):
        rows = rows.sort_values("substituted_mass", kind="stable")
        look, random = Look(COLOURS[rule], MARKERS["emulator"], "-"), standin == "random"
        x, y = rows["substituted_mass"], rows[column]
        if not random:
            ax.plot(x, y, **look.line, zorder=2)
        if column == "delta_percent":
            ax.errorbar(x, y, errors(rows), color=look.colour, fmt="none", capsize=3, elinewidth=0.9, zorder=2)
        edge = {"edgecolors": "#000000"} if random else {}
        ax.scatter(x, y, s=30, color=look.colour, marker=look.marker, linewidths=1.1, zorder=3, **edge)
        ends.append((x.iloc[-1], y.iloc[-1], f"{rule}, random" if random else rule, look))
    if column == "delta_percent":
        set_loss_scale(ax.yaxis, own)
    elif len(own):
        ax.set_ylim(0, 1.08 * own[column].max())
    label_ends(ax, ends)


def captions(table: pd.DataFrame) -> str:
    """Of every model its sizes and, at the middle level, heavy against light; or why there is nothing."""
    lines, found = [], verdicts(table)
    for model, own in table.groupby("model", sort=False):
        ok = own[own["status"] == "ok"]
        line = f"Model {model_title(table, model)}. Slots {slots_title(own.iloc[0])}."
        if len(ok):
            level = f"{ok['level_of_interval'].iloc[0]:.0%} interval"
            line += f" {ok['documents'].max():,.0f} documents, {ok['tokens'].max():,.0f} scored tokens; bars: {level}."
        line += f" {textwrap.shorten(found[model], 240, placeholder=' ...')}."
        lost = own.loc[own["status"] != "ok", "arm"]
        if len(ok) and len(lost):
            line += f" Without a result: {', '.join(lost)} (reasons: in the index)."
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    figure_main(draw, __doc__, read_experiment_b, "experiment_b.csv")
