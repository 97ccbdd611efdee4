"""Which inputs lose: loss of every document against the gate weight that was substituted in it, a panel a text.

A row a model and bundle, those of P1.3: does mass say which document loses? A point is one document; its loss is paired
with the baseline on the same tokens. The title names the document that loses most.

python workflow/scripts/plot_loss_by_document.py --table results/tables/local/documents.csv --out-prefix plot
"""

import pandas as pd
from matplotlib.lines import Line2D

from evals.checked_tables import read_words, refuse, to_flags, to_numbers
from evals.figures import COLOURS, LOSS_LABEL, MARKERS, REHEARSAL, Look, figure_main, frame

BUNDLES = ("rule_015", "first_choice")
WORDS = ("model", "policy", "miss_rule", "instrument", "slots", "text", "topic", "document")
NUMBERS = ("slots_percent", "tokens", "substituted_mass", "delta_percent")
NOTE = (
    "Every panel has scales of its own: the question is asked within a text. A document has one loss and so no "
    "interval; the correlations of P1.3 have one, in the ledger."
)


def read_points(path: str) -> pd.DataFrame:
    """documents.csv, the bundles of the figure alone. UserError."""
    table = read_words(path, (*WORDS, *NUMBERS, "rehearsal"), "documents.csv", rows=False)
    refuse(path, table, ~table["miss_rule"].isin(COLOURS), "miss_rule", f"one of {', '.join(COLOURS)}")
    refuse(path, table, ~table["instrument"].isin(MARKERS), "instrument", f"one of {', '.join(MARKERS)}")
    to_flags(path, table, "rehearsal")
    for name in NUMBERS:
        to_numbers(path, table, name, needed=True)
    return table[table["policy"].isin(BUNDLES)]


def draw(table: pd.DataFrame):
    rows = list(table[["model", "policy"]].drop_duplicates().itertuples(index=False))
    texts = list(table["text"].unique())
    handles = [
        Line2D([], [], **Look(COLOURS[rule], MARKERS[how], "-").point, markersize=5, label=f"{rule} ({how}, measured)")
        for rule, how in table[["miss_rule", "instrument"]].drop_duplicates().itertuples(index=False)
    ]
    figure = frame(
        "Loss of every document against its substituted mass",
        caption(table),
        handles,
        width=max(8.0, 1.2 + 2.9 * len(texts)),
        height=1.8 + 2.3 * max(1, len(rows)),
    )
    panels = figure.subplots(max(1, len(rows)), max(1, len(texts)), squeeze=False)
    for axes, (model, policy) in zip(panels, rows, strict=False):
        for ax, text in zip(axes, texts, strict=True):
            own = table[(table["model"] == model) & (table["policy"] == policy) & (table["text"] == text)]
            draw_panel(ax, own, text)
        axes[0].set_ylabel(f"{model}, {policy}\nchange of token perplexity (%)")
    for ax in panels[-1]:
        ax.set_xlabel("substituted mass of the document")
    if table.empty:
        panels[0, 0].set_title("no document has a result")
    return figure, table[[*WORDS, *NUMBERS, "rehearsal"]]


def draw_panel(ax, own: pd.DataFrame, text: str) -> None:
    ax.axhline(0, color="#000000", linewidth=0.8, zorder=1)
    if own.empty:
        ax.set_title(f"{text}\nno result")
        return
    first, worst = own.iloc[0], own.loc[own["delta_percent"].idxmax()]
    look = Look(COLOURS[first["miss_rule"]], MARKERS[first["instrument"]], "-")
    ax.plot(own["substituted_mass"], own["delta_percent"], **look.point, markersize=4, alpha=0.8)
    ax.set_title(f"{text}\nloses most: {worst['document']}")
    ax.title.set_fontsize(8)


def caption(table: pd.DataFrame) -> str:
    parts = []
    for model, own in table.groupby("model", sort=False):
        first, note = own.iloc[0], f" ({REHEARSAL})" if own["rehearsal"].any() else ""
        one = own[own["policy"] == first["policy"]]
        parts.append(
            f"Model {model}{note}. Slots {first['slots']}: {first['slots_percent']:g} % resident. "
            f"{len(one)} documents, {one['tokens'].sum():,.0f} scored tokens."
        )
    parts.append(f"Instrument: emulator (quality; no host is timed). Loss: {LOSS_LABEL}.")
    return "\n".join([*parts, NOTE])


if __name__ == "__main__":
    figure_main(draw, __doc__, read_points, "documents.csv")
