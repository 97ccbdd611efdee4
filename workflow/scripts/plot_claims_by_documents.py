"""Background admission against the same rule without it, against the number of documents: does the sign hold?

One panel a model and pair of bundles of P1.6 and P1.8. Documents are added in a fixed order that no result chose; the
grey band is the interval, the coloured bands are the preregistered regions. Right of the dotted line a change of sign
makes the claim inconclusive.

python workflow/scripts/plot_claims_by_documents.py --table results/tables/local/claims_by_documents.csv \
    --out-prefix claims_by_documents
"""

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from engine.errors import error
from evals.figures import COLOURS, MARKERS, REHEARSAL, figure_main, frame

CLAIMS = ("P1.6", "P1.8")
MEASURE = "perplexity_change"
WORDS = ("id", "part", "model", "measure", "of", "against", "slots", "instrument", "document", "rehearsal")
NUMBERS = ("number", "documents", "tokens", "estimate", "low", "high", "level", "no_effect", "slots_percent")
NUMBERS += ("region_low", "region_high", "sign_change_after")
REGION_COLOURS = {"P1.6": COLOURS["threshold"], "P1.8": COLOURS["lowbit"]}
NOTE = (
    "Losses of the two bundles are paired on the same tokens. Order of documents: sha256 of their names. A gap in the "
    "band: too few documents of a topic for an interval."
)


def read_points(path: str) -> pd.DataFrame:
    """claims_by_documents.csv, the lines of the figure alone. UserError: no table, a missing column, no numbers."""
    try:
        table = pd.read_csv(path, encoding="utf-8")
        missing = [name for name in (*WORDS, *NUMBERS) if name not in table]
        for name in NUMBERS if not missing else ():
            table[name] = pd.to_numeric(table[name])
    except (OSError, ValueError) as exc:  # pandas' own errors are ValueErrors
        raise error(f"{path}: {type(exc).__name__} {exc}", "claims_by_documents.csv", "delete it, run again") from None
    if missing:
        raise error(f"{path}: no column {', '.join(missing)}", "claims_by_documents.csv", "delete it and run again")
    return table[table["id"].isin(CLAIMS) & (table["measure"] == MEASURE)]


def draw(points: pd.DataFrame):
    models = points["model"].unique()
    pairs = list(points[["of", "against"]].drop_duplicates().itertuples(index=False))
    rows, columns = max(1, len(models)), max(1, len(pairs))
    title = "Perplexity with background admission against the same rule without, by number of documents"
    handles = [Patch(color=colour, alpha=0.25, label=f"region of {name}") for name, colour in REGION_COLOURS.items()]
    handles += [Line2D([], [], color="#000000", linewidth=1.4, label="estimate")]
    figure = frame(title, caption(points), handles, width=max(8.0, 1.0 + 4.2 * columns), height=1.7 + 2.4 * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes, model in zip(panels, models, strict=False):
        for ax, (one, other) in zip(axes, pairs, strict=True):
            own = points[(points["model"] == model) & (points["of"] == one) & (points["against"] == other)]
            draw_panel(ax, own, f"{model}: {one} against {other}")
        axes[0].set_ylabel("change of token perplexity (%)")
    for ax in panels[-1]:
        ax.set_xlabel("documents")
    if points.empty:
        panels[0, 0].set_title("no claim has a result")
    return figure, points[[*dict.fromkeys([*WORDS, *NUMBERS])]]


def draw_panel(ax, own: pd.DataFrame, title: str) -> None:
    if own.empty:
        ax.set_title(f"{title}\nno result")
        return
    regions = own.drop_duplicates("id").fillna({"region_low": -np.inf, "region_high": np.inf})
    regions = list(regions[["id", "region_low", "region_high"]].itertuples(index=False))
    line = own[own["id"] == own["id"].iloc[0]].sort_values("number")  # the same pair has the same line in both claims
    band, last = line.dropna(subset=["low", "high"]), line.iloc[-1]
    ax.fill_between(band["number"], band["low"], band["high"], color="#d5d5d5", zorder=1, linewidth=0)
    ax.plot(line["number"], line["estimate"], color="#000000", linewidth=1.4, zorder=3)
    bar = [[last["estimate"] - last["low"]], [last["high"] - last["estimate"]]]
    look = {"color": "#000000", "marker": MARKERS[last["instrument"]], "markersize": 4.5, "capsize": 2.5, "zorder": 4}
    ax.errorbar([last["number"]], [last["estimate"]], yerr=bar, linestyle="none", **look)
    ax.axvline(last["documents"] / 2, color="#555555", linestyle=":", linewidth=1)
    ax.axhline(0, color="#000000", linewidth=0.8, zorder=2)
    note = ""
    if pd.notna(last["sign_change_after"]):
        ax.axvline(last["sign_change_after"], color=COLOURS["substitute_all"], linewidth=1.2, zorder=2)
        note = f"\nsign changed after {last['sign_change_after']:g} documents"
    later = line[line["number"] >= last["documents"] / 4]  # the first documents alone would set the scale
    shown = pd.concat([later["estimate"], band[band["number"] >= last["documents"] / 4][["low", "high"]].stack()])
    finite = [end for _, *ends in regions for end in ends if np.isfinite(end)]
    low, high = min(0, shown.min(), *finite), max(0, shown.max(), *finite)
    ax.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    for name, *ends in regions:
        bottom, top = np.clip(ends, *ax.get_ylim())
        ax.axhspan(bottom, top, color=REGION_COLOURS[name], alpha=0.2, zorder=0.5, linewidth=0)
    ax.set_xlim(0, last["documents"] * 1.02)
    ax.set_title(f"{title}{note}")


def caption(points: pd.DataFrame) -> str:
    parts = []
    for model, own in points.groupby("model", sort=False):
        first, note = own.iloc[0], f" ({REHEARSAL})" if own["rehearsal"].any() else ""
        parts.append(
            f"Model {model}{note}. Slots {first['slots']}: {first['slots_percent']:g} % resident. "
            f"{first['documents']:,.0f} documents, {first['tokens']:,.0f} scored tokens."
        )
    if len(points):
        parts.append(
            f"Instrument: emulator (quality; no host is timed). Bands: {points['level'].iloc[0]:.0%} interval."
        )
    return "\n".join([*parts, NOTE])


if __name__ == "__main__":
    figure_main(draw, __doc__, read_points)
