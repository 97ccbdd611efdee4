"""Forced agreement with the baseline against substituted mass, a panel a task and model: does mass change words?

A point is a lossy policy, over all problems of the task. Bundles are large and named; the other policies are those of
the sweep. What the baseline says is forced upon each, so all of them answer at the same positions.

python workflow/scripts/plot_agreement_by_mass.py --table results/tables/local/tasks.csv --out-prefix agreement_by_mass
"""

import pandas as pd
from matplotlib.lines import Line2D

from engine.policies import BASELINE
from evals.figures import COLOURS, MARKERS, Look, figure_main, frame, label_ends, model_title, slots_title
from evals.task_tables import NO_EFFECT, read_tasks

MASS, AGREEMENT = "forced_mass", "forced_agreement"
RANDOM = "^"  # marker of policies whose stand-ins are drawn
NAMES = ["model", "task", "text", "policy", "miss_rule", "standin", "beta", "bundle", "slots", "slots_percent"]
NAMES += ["rehearsal"]
POINT = {"value": "forced_agreement_percent", "low": "percent_low", "high": "percent_high", "n": "problems"}


def points_of(table: pd.DataFrame) -> pd.DataFrame:
    """A row a (model, task, policy): mass, agreement in percent and its interval."""
    ok = table[(table["status"] == "ok") & (table["policy"] != BASELINE)]
    mass = ok[ok["metric"] == MASS].set_index(["model", "task", "policy"])["value"].rename("substituted_mass")
    points = ok[ok["metric"] == AGREEMENT].assign(lossy_without_effect=lambda rows: rows["note"] == NO_EFFECT)
    points = points.join(mass, on=["model", "task", "policy"]).rename(columns=POINT)
    for name in ("forced_agreement_percent", "percent_low", "percent_high"):
        points[name] *= 100
    return points[[*NAMES, "substituted_mass", *POINT.values(), "lossy_without_effect"]].reset_index(drop=True)


def draw(table: pd.DataFrame):
    forced = table[(table["metric"] == AGREEMENT) & (table["policy"] != BASELINE)]
    points = points_of(table)
    models = forced["model"].unique()
    tasks = [task for task in forced["task"].unique() if task in set(points["task"])]
    rows, columns = max(1, len(tasks)), max(1, len(models))
    rules = [rule for rule in COLOURS if rule in set(points["miss_rule"])]
    handles = [Line2D([], [], color=COLOURS[rule], linewidth=3, label=rule) for rule in rules]
    handles += [
        Line2D([], [], color="#555555", marker=marker, markersize=size, linestyle="none", label=words)
        for marker, size, words in (
            (MARKERS["emulator"], 6, "bundle"),
            (MARKERS["emulator"], 3.5, "sweep"),
            (RANDOM, 4.5, "random stand-in"),
        )
    ]
    figure = frame(
        f"Forced agreement by substituted mass: {', '.join(model_title(table, model) for model in models)}",
        caption(forced, points),
        handles,
        width=max(8.0, 6.2 * columns),
        height=2.2 + 3.1 * rows,
    )
    panels = figure.subplots(rows, columns, squeeze=False)
    for line, task in zip(panels, tasks, strict=False):
        for ax, model in zip(line, models, strict=False):
            draw_panel(ax, points[(points["task"] == task) & (points["model"] == model)])
            ax.set_title(f"{model}, {task}")
        line[0].set_ylabel(f"positions at which a policy\nsays what {BASELINE} says (%)")
    for ax in panels[-1]:
        ax.set_xlabel("substituted mass (share of an event's gate weight, mean over events)")
    return figure, points


def draw_panel(ax, points: pd.DataFrame) -> None:
    ends = []
    for row in points.sort_values("bundle", kind="stable").to_dict("records"):
        marker = RANDOM if row["standin"] == "random" else MARKERS["emulator"]
        marker = "x" if row["lossy_without_effect"] else marker
        look = Look(COLOURS[row["miss_rule"]], marker, "-")
        x, y = row["substituted_mass"], row["forced_agreement_percent"]
        if row["bundle"]:
            ax.plot([x, x], [row["percent_low"], row["percent_high"]], color=look.colour, linewidth=0.9)
            ends.append((x, y, row["policy"], look))
        edge = {"edgecolors": "#000000" if row["bundle"] else "none"} if marker != "x" else {}
        size = 36 if row["bundle"] else 20 if marker == RANDOM else 12
        ax.scatter(x, y, s=size, color=look.colour, marker=marker, linewidths=0.6, zorder=3, **edge)
    ax.set_xlim(left=0)
    ax.set_ylim(top=min(101, ax.get_ylim()[1]))
    label_ends(ax, ends)


def caption(forced: pd.DataFrame, points: pd.DataFrame) -> str:
    """What was asked, of whom, and what has no result."""
    parts = []
    for model in forced["model"].unique():
        own, found = forced[forced["model"] == model].iloc[0], points[points["model"] == model]
        asked = found.drop_duplicates("task")
        said = ", ".join(f"{row['problems']:.0f} of {row['task']}" for row in asked.to_dict("records"))
        slots = slots_title(own)
        parts.append(f"Model {model_title(forced, model)}. Slots {slots}. Problems: {said or 'none'}.")
    levels = forced["level"].dropna()
    parts.append(
        "Instrument: emulator. Every problem from the warm start, its prompt exact; the first token of a continuation "
        "is said by the prompt and left out. A cross marks a lossy policy that replaced nothing. Bars"
        + (f": {levels.iloc[0]:.0%} interval over problems." if len(levels) else " without an interval.")
    )
    lost = forced[forced["status"] != "ok"].drop_duplicates(["model", "task", "policy"])
    if len(lost):
        named = [f"{row['policy']} ({row['model']}, {row['task']})" for row in lost.head(6).to_dict("records")]
        more = f" and {len(lost) - 6} more" if len(lost) > 6 else ""
        parts.append(f"Without a result: {'; '.join(named)}{more} (reasons: in tasks.csv).")
    return "\n".join(parts)


if __name__ == "__main__":
    figure_main(draw, __doc__, read_tasks, "tasks.csv")
