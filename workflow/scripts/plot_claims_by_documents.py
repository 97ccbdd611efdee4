"""Differences and correlations behind the claims of P1, against the number of documents: does the sign hold?

A panel a model and number: what background admission changes (P1.6 and P1.8, and after a change of topic), heavy
against light substitutions (P1.5), and the correlations of substituted mass with loss and agreement (P1.2, P1.3, P1.4,
P1.10). Documents are added in a fixed order that no result chose; the grey band is the interval, the coloured bands are
the preregistered regions. Right of the dotted line a change of sign makes the claim inconclusive.

python workflow/scripts/plot_claims_by_documents.py --table results/tables/local/claims_by_documents.csv \
    --out-prefix claims_by_documents
"""

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from engine.errors import error
from evals.figures import COLOURS, MARKERS, REHEARSAL, figure_main, frame

CHANGE = "perplexity_change"
CORRELATIONS = {  # measure: label of the axis
    "agreement_correlation": "r of mass and agreement",
    "correlation_over_documents": "r of mass and loss",
    "correlation_over_policies": "r of mass and loss",
    "rank_correlation_over_policies": "rho of mass and loss",
}
PARTS = {"P1.5": ("heavy_against_light",)}  # of a claim with many parts, those that decide
CLAIMS = ("P1.6", "P1.8", "P1.5", "P1.2", "P1.3", "P1.4", "P1.10")  # in the order of the panels
PANEL = ["measure", "of", "against", "within", "texts"]
WORDS = ("id", "part", "model", "measure", "of", "against", "slots", "instrument", "sampled", "document", "rehearsal")
NUMBERS = ("number", "documents", "tokens", "estimate", "low", "high", "level", "no_effect", "slots_percent")
NUMBERS += ("region_low", "region_high", "sign_change_after")
REGION_COLOURS = {"P1.6": COLOURS["threshold"], "P1.8": COLOURS["lowbit"]}
OTHER_REGION = COLOURS["mass_budget"]
COLUMNS = 4
NOTE = (
    "Losses are paired on the same tokens. Order of documents: sha256 of their names. Correlations: of substituted "
    "mass, over policies (P1.2, P1.4, P1.10) or over documents within texts (P1.3). A gap in a line or band: too few "
    "documents."
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
    for name in PANEL:  # tables of before some of them had none
        table[name] = table[name].astype(object).fillna("") if name in table else ""
    of_claims = table["id"].isin(CLAIMS) & table["measure"].isin([CHANGE, *CORRELATIONS])
    left_out = [part not in PARTS.get(name, (part,)) for name, part in zip(table["id"], table["part"], strict=True)]
    return table[of_claims & ~np.array(left_out, bool)]


def draw(points: pd.DataFrame):
    order = points["id"].map({name: number for number, name in enumerate(CLAIMS)})
    points = points.iloc[np.argsort(order, kind="stable")]
    models = sorted(points["model"].unique())
    panels = list(points[PANEL].drop_duplicates().itertuples(index=False))
    columns = max(1, min(COLUMNS, len(panels)))
    rows = max(1, -(-len(panels) // columns))  # of one model
    title = "Differences and correlations behind the claims, by number of documents"
    handles = [Patch(color=colour, alpha=0.25, label=f"region of {name}") for name, colour in REGION_COLOURS.items()]
    if set(points["id"]) - set(REGION_COLOURS):
        handles.append(Patch(color=OTHER_REGION, alpha=0.25, label="region of another claim"))
    handles += [Line2D([], [], color="#000000", linewidth=1.4, label="estimate")]
    height = 1.7 + 2.4 * rows * max(1, len(models))
    figure = frame(title, caption(points), handles, width=max(8.0, 1.0 + 3.5 * columns), height=height)
    grid = figure.subplots(rows * max(1, len(models)), columns, squeeze=False)
    for number, model in enumerate(models):
        own = points[points["model"] == model]
        places = grid[number * rows : (number + 1) * rows].ravel()
        for ax, key in zip(places, panels, strict=False):
            draw_panel(ax, own[(own[PANEL] == list(key)).all(axis=1)], model, key)
        for ax in places[len(panels) :]:
            ax.set_axis_off()
    if points.empty:
        grid[0, 0].set_title("no claim has a result")
    return figure, points[[*dict.fromkeys([*WORDS, *PANEL, *NUMBERS])]]


def draw_panel(ax, own: pd.DataFrame, model: str, key) -> None:
    title = f"{key.of} against {key.against}"
    if key.measure in CORRELATIONS:
        title = key.of + (f", {key.texts}" if key.measure == "agreement_correlation" else "")
    elif "change of topic" in key.within:
        title += "\nafter a change of topic, less later"
    if own.empty:
        ax.set_title(f"{model}\n{title}\nno result", fontsize=8)
        return
    claims = ", ".join(own["id"].unique())
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
    ax.axhline(last["no_effect"], color="#000000", linewidth=0.8, zorder=2)
    if pd.notna(last["sign_change_after"]):
        ax.axvline(last["sign_change_after"], color=COLOURS["substitute_all"], linewidth=1.2, zorder=2)
        title += f"\nsign changed after {last['sign_change_after']:g} {last['sampled']}"
    if key.measure in CORRELATIONS:
        ax.set_ylim(-1.05, 1.05)
    else:
        ax.set_ylim(*limits(line, band, [end for _, *ends in regions for end in ends if np.isfinite(end)]))
    for name, *ends in regions:
        bottom, top = np.clip(ends, *ax.get_ylim())
        ax.axhspan(bottom, top, color=REGION_COLOURS.get(name, OTHER_REGION), alpha=0.2, zorder=0.5, linewidth=0)
    ax.set_xlim(0, last["documents"] * 1.02)
    ax.set_xlabel(last["sampled"])
    ax.set_ylabel(CORRELATIONS.get(key.measure, "token perplexity (%)"))
    ax.set_title(f"{claims}: {model}\n{title}", fontsize=8)


def limits(line: pd.DataFrame, band: pd.DataFrame, ends: list[float]) -> tuple[float, float]:
    """Of the vertical axis: what the last three quarters of the documents show, the first alone would set the scale."""
    least = line["documents"].iloc[-1] / 4
    shown = [
        line[line["number"] >= least]["estimate"],
        *(band[band["number"] >= least][side] for side in ("low", "high")),
    ]
    values = pd.concat([*shown, pd.Series([0.0, *ends])])
    slack = 0.08 * (values.max() - values.min())
    return values.min() - slack, values.max() + slack


def caption(points: pd.DataFrame) -> str:
    parts = []
    for model, own in points.groupby("model"):
        first, note = own.iloc[0], f" ({REHEARSAL})" if own["rehearsal"].any() else ""
        parts.append(
            f"Model {model}{note}. Slots {first['slots']}: {first['slots_percent']:g} % resident. "
            f"{first['documents']:,.0f} {first['sampled']}, {first['tokens']:,.0f} scored tokens ({first['id']}); "
            "of the others as their axes say."
        )
    if len(points):
        parts.append(
            f"Instrument: emulator (quality; no host is timed). Bands: {points['level'].iloc[0]:.0%} interval."
        )
    return "\n".join([*parts, NOTE])


if __name__ == "__main__":
    figure_main(draw, __doc__, read_points)
