"""After a change of topic: loss, hit rate and substituted mass against the tokens since, with and without background.

A column a model and threshold. From above: loss against the baseline; the same rule with background admission against
without; chosen experts that were resident; substituted mass. Background admission at every beta of the sweep.

python workflow/scripts/plot_topic_changes.py --table results/tables/local/topic_changes.csv --out-prefix plot
"""

import math

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from engine.policies import BASELINE
from evals.checked_tables import read_words, refuse, to_flags, to_numbers
from evals.figures import COLOURS, MARKERS, PATTERNS, REHEARSAL, SHADES, Look, figure_main, frame, shade

WORDS = ("model", "policy", "miss_rule", "instrument", "slots", "standin", "standin_weight", "standin_recency")
ENDS = ("", "_low", "_high")
LOSS, BACKGROUND = (tuple(f"{name}{end}" for end in ENDS) for name in ("delta_percent", "background_percent"))
NUMBERS = ("slots_percent", "from_token", "to_token", "documents", "tokens", "hit_rate", "substituted_mass", "level")
THRESHOLDS = (0.15, math.inf)
QUANTITIES = {  # columns drawn: words at the axis
    LOSS: f"change of token perplexity (%)\nagainst {BASELINE}",
    BACKGROUND: "change of token perplexity (%)\nagainst the same rule without",
    ("hit_rate",): "hit rate (share of the\nchosen that was resident)",
    ("substituted_mass",): "substituted mass (share\nof an event's gate weight)",
}
NOTE = (
    "Documents of the texts follow each other in turn, each cut after its first tokens; the state of the slots is "
    "carried on. Every policy runs from the warm start. Tokens since the change: a token's place in its document."
)


def read_points(path: str) -> pd.DataFrame:
    """topic_changes.csv, checked. UserError."""
    names = (*NUMBERS, *LOSS, *BACKGROUND, "tau", "beta")
    table = read_words(path, (*WORDS, *names, "rehearsal"), "topic_changes.csv", rows=False)
    refuse(path, table, ~table["miss_rule"].isin(COLOURS), "miss_rule", f"one of {', '.join(COLOURS)}")
    to_flags(path, table, "rehearsal")
    infinite = table["tau"] == "inf"
    table.loc[infinite, "tau"] = ""
    for name in names:
        to_numbers(path, table, name, needed=name in NUMBERS)
    table.loc[infinite, "tau"] = math.inf
    return table


def draw(table: pd.DataFrame):
    plain = (
        (table["standin"] == "next_best") & (table["standin_weight"] == "own") & (table["standin_recency"] == "True")
    )
    shown = table[plain & (table["miss_rule"] == "threshold") & table["tau"].isin(THRESHOLDS)]
    baseline = table[table["policy"] == BASELINE]
    models, betas = table["model"].unique(), [math.nan, *sorted(shown["beta"].dropna().unique(), reverse=True)]
    style = [(beta, look_of(number)) for number, beta in enumerate(betas)]
    base = Look(COLOURS["fetch"], MARKERS["emulator"], "-")
    handles = [Line2D([], [], **stroke(base), markersize=4, label=f"{BASELINE} (hit rate)")]
    for beta, look in style:
        words = "no background" if math.isnan(beta) else f"beta {beta:g}"
        handles.append(Line2D([], [], **stroke(look), markersize=4, label=f"threshold, {words}"))
    figure = frame(
        f"Tokens since a change of topic: {', '.join(models)}",
        caption(table),
        handles,
        width=max(8.0, 1.2 + 3.1 * len(models) * len(THRESHOLDS)),
        height=1.8 + 2.1 * len(QUANTITIES),
    )
    columns = [(model, tau) for model in models for tau in THRESHOLDS]
    panels = figure.subplots(len(QUANTITIES), max(1, len(columns)), squeeze=False, sharex=True, sharey="row")
    bins = table.drop_duplicates("from_token").sort_values("from_token")
    place = {start: number for number, start in enumerate(bins["from_token"])}
    for axes, (quantity, words) in zip(panels, QUANTITIES.items(), strict=True):
        axes[0].set_ylabel(words)
        for ax, (model, tau) in zip(axes, columns, strict=False):
            if len(quantity) > 1:
                ax.axhline(0, color="#000000", linewidth=0.8)
            if quantity == ("hit_rate",):
                draw_line(ax, baseline[baseline["model"] == model], quantity, base, place)
            own = shown[(shown["model"] == model) & (shown["tau"] == tau)]
            for number, (beta, look) in enumerate(style):
                line = own[own["beta"].isna() if math.isnan(beta) else own["beta"] == beta]
                draw_line(ax, line, quantity, look, place, shift=0.06 * (number - len(betas) / 2))
    if table.empty:
        panels[0, 0].set_title("no policy has a result")
    for ax, (model, tau) in zip(panels[0], columns, strict=False):
        gap = "" if len(shown[(shown["model"] == model) & (shown["tau"] == tau)]) else "\nno result"
        ax.set_title(f"{model}, tau {tau:g}{gap}")
    for ax in panels[-1]:
        ax.set_xticks([*place.values()], [f"{b.from_token:g}-{b.to_token:g}" for b in bins.itertuples()])
        ax.set_xlabel("tokens since the change of topic")
    return figure, pd.concat([baseline, shown])[[*dict.fromkeys((*WORDS, "tau", "beta", *NUMBERS, *LOSS, *BACKGROUND))]]


def look_of(number: int) -> Look:
    """Of the numberth beta: all are of one miss rule, so shade and pattern tell them apart."""
    colour = shade(COLOURS["threshold"], SHADES[number % len(SHADES)])
    return Look(colour, MARKERS["emulator"], PATTERNS[number % len(PATTERNS)])


def stroke(look: Look) -> dict:
    """A line with its markers."""
    return {**look.point, **look.line}


def draw_line(ax, rows: pd.DataFrame, quantity: tuple[str, ...], look: Look, place: dict, shift: float = 0.0) -> None:
    """place: of a bin on the axis, by its first token; shift: aside, so that bars do not cover each other."""
    rows = rows.sort_values("from_token").dropna(subset=[quantity[0]])
    x, y = rows["from_token"].map(place) + shift, rows[quantity[0]]
    ax.plot(x, y, **stroke(look), markersize=3.5)
    if len(quantity) > 1:
        bars = np.stack([y - rows[quantity[1]], rows[quantity[2]] - y])
        ax.errorbar(x, y, bars, color=look.colour, fmt="none", capsize=2, elinewidth=0.8)


def caption(table: pd.DataFrame) -> str:
    parts = []
    for model, own in table.groupby("model", sort=False):
        first, note = own.iloc[0], f" ({REHEARSAL})" if own["rehearsal"].any() else ""
        bins = own.drop_duplicates("from_token")
        sizes = "; ".join(
            f"{r.from_token:g}-{r.to_token:g}: {r.documents:g}, {r.tokens:,.0f}" for r in bins.itertuples()
        )
        parts.append(
            f"Model {model}{note}. Slots {first['slots']}: {first['slots_percent']:g} % resident. "
            f"Documents and scored tokens by tokens since the change: {sizes}."
        )
    if len(table):
        parts.append(f"Instrument: emulator (quality; no host is timed). Bars: {table['level'].iloc[0]:.0%} interval.")
    return "\n".join([*parts, NOTE])


if __name__ == "__main__":
    figure_main(draw, __doc__, read_points, "topic_changes.csv")
