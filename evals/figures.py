"""What the figures share: the table they are drawn from, their colours and captions, and how a picture is saved.

Colour is the miss rule, marker shape the instrument (filled measured, open modelled), line pattern and shade tell
policies of one miss rule apart and `--` is a clairvoyant one; labels tell two of those apart. A figure is a script
`workflow/scripts/plot_<stem>.py` with a function `draw(table) -> (figure, points)`; `figure_main(draw, __doc__)` is its
command line, with another reader where the table is not that of quality. The same table gives the same bytes: no dates,
a fixed hash salt. Assumed: the rows stand in the order of the sheet of policies.
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator
from scipy.optimize import isotonic_regression

from engine.errors import main_guard
from engine.files import atomic
from engine.policies import BASELINE
from evals.checked_tables import add_columns, need_columns, read_words, refuse, to_flags, to_numbers

# Okabe and Ito's eight without yellow (too light for a line), then Tol's wine, olive, indigo and teal and a grey
COLOURS = {
    "buddy": "#999933",
    "cache_prior": "#882255",
    "cpu": "#56B4E9",
    "deferral": "#888888",
    "drop": "#CC79A7",
    "fetch": "#000000",
    "few_heavy": "#332288",
    "lowbit": "#E69F00",
    "many_light": "#44AA99",
    "mass_budget": "#009E73",
    "substitute_all": "#D55E00",
    "threshold": "#0072B2",
}
MARKERS = {"emulator": "o", "engine": "D", "simulator": "s"}
OPEN = (MARKERS["simulator"],)  # its times are modelled, also those on a measured host
PATTERNS = ("-", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 2)), (0, (1, 3)), (0, (3, 1, 3, 1, 1, 1)))
SHADES = (0.0, 0.32, -0.5, 0.5, -0.3, 0.2, -0.7)  # towards white or black, dealt with the patterns
CLAIRVOYANT = "--"
POOLED = "all"  # text of the rows over all texts
LOSS_LABEL = f"change of token perplexity against {BASELINE} (%)"
REHEARSAL = "rehearsal: a small embedded model"
STATUSES = ("ok", "failed", "absent")
FLAGS = ("lossless", "lossy_without_effect", "background_inert", "rehearsal")
LOSS = ("delta_percent", "delta_percent_low", "delta_percent_high", "detectable_percent")
NAMES = ("model", "policy", "miss_rule", "eviction", "instrument", "slots", "text", "topic", "status")
SIZES = ("slots_percent", "slots_count", "experts")
MEASURED = ("tokens", "documents", "miss_rate", "substituted_share", "substituted_mass")

STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 8,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "savefig.dpi": 160,
    "svg.fonttype": "none",  # words stay words
    "svg.hashsalt": "expertmiss",
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
}


# ---- the table -------------------------------------------------------------------------------------------------------
def read_table(path: str | Path) -> pd.DataFrame:
    """quality.csv, checked: a row a (model, policy, slots, text), flags as booleans, absent numbers NaN.

    UserError: not there, not a table, no rows, a missing column, a cell that is no number, an `ok` row without one.
    """
    what = "the table of quality"
    table = read_words(path, (*NAMES, *SIZES, "rehearsal"), what)
    ok = table["status"] == "ok"
    if ok.any():
        need_columns(path, table, (*MEASURED, "lossless"), what)
    add_columns(table, (*LOSS, *MEASURED, *FLAGS, "reason"))
    refuse(path, table, ~table["status"].isin(STATUSES), "status", f"one of {', '.join(STATUSES)}")
    refuse(path, table, table.duplicated(["model", "policy", "slots", "text"]), "text", "one row a cell")
    refuse(path, table, ~table["miss_rule"].isin(COLOURS), "miss_rule", f"one of {', '.join(COLOURS)}")
    refuse(path, table, ~table["instrument"].isin(MARKERS), "instrument", f"one of {', '.join(MARKERS)}")
    for name in FLAGS:
        to_flags(path, table, name)
    for name in (*SIZES, *MEASURED, *LOSS):
        to_numbers(path, table, name, needed=ok & (name not in LOSS) | (name in SIZES))
    table["lossless"] |= table["miss_rule"] == "fetch"  # cells without a result have no flags
    return table


def ok_rows(table: pd.DataFrame, text: str | None = None) -> pd.DataFrame:
    """The rows with a result; of one text, where named."""
    return table[(table["status"] == "ok") & ((table["text"] == text) if text else True)]


def without_result(table: pd.DataFrame) -> pd.DataFrame:
    """Rows model, policy, slots, text, status, reason of the cells that failed, were absent or lost their baseline."""
    lost = (table["status"] != "ok") | (~table["lossless"] & table["delta_percent"].isna())
    return table[lost][["model", "policy", "slots", "text", "status", "reason"]]


def pooled_grid(table: pd.DataFrame, model: str, policy: str) -> pd.DataFrame:
    """The pooled rows of a policy, a row for every slot budget in rising order; NaN where there is no result."""
    own = table[table["model"] == model]
    budgets = own.drop_duplicates("slots").sort_values("slots_percent", kind="stable")
    rows = ok_rows(own[own["policy"] == policy], POOLED).set_index("slots").reindex(budgets["slots"])
    rows["slots_percent"] = budgets["slots_percent"].to_numpy()
    return rows.reset_index()


# ---- words on the picture --------------------------------------------------------------------------------------------
def model_title(table: pd.DataFrame, model: str) -> str:
    own = table[table["model"] == model]
    return f"{model} ({REHEARSAL})" if own["rehearsal"].any() else model


def end_label(policy: str, rows: pd.DataFrame, column: str) -> str:
    """The policy and, where its line has gaps, the slot budgets without a result."""
    gaps = rows.loc[rows[column].isna(), "slots"]
    return f"{policy} (no result: {', '.join(gaps)})" if len(gaps) else policy


def slots_title(row: pd.Series) -> str:
    return f"{row['slots']}: {row['slots_percent']:g} % resident ({row['slots_count']:g} of {row['experts']:g} experts)"


def caption(table: pd.DataFrame, notes: str = "") -> str:
    """Model, slots, instrument, documents and tokens, what the bars are, and the cells that are missing."""
    parts = []
    for model in table["model"].unique():
        own = table[table["model"] == model]
        budgets = own.drop_duplicates("slots").sort_values("slots_percent", kind="stable")
        slots = "; ".join(slots_title(row) for _, row in budgets.iterrows())
        texts = ok_rows(own[own["text"] != POOLED]).drop_duplicates("text")
        parts.append(
            f"Model {model_title(table, model)}. Slots {slots}. {texts['documents'].sum():,.0f} documents, "
            f"{texts['tokens'].sum():,.0f} scored tokens: {', '.join(texts['text']) or 'no text'}."
        )
    instruments = ", ".join(table["instrument"].unique())
    level = f"{float(table['level'].iloc[0]):.0%} interval" if "level" in table else "interval"
    parts.append(
        f"Instrument: {instruments} (filled marker: quality measured; no host is timed). Loss is paired with "
        f"{BASELINE} on the same tokens; bars: {level} over documents."
    )
    parts.append(notes)
    lost = without_result(table)
    if len(lost):
        named = []
        for (_, policy), rows in lost.groupby(["model", "policy"], sort=False):
            whole = len(rows) == (table["policy"] == policy).sum()
            named += [policy] if whole else [" ".join((policy, r["slots"], r["text"])) for r in rows.to_dict("records")]
        more = f" and {len(named) - 6} more" if len(named) > 6 else ""
        parts.append(f"Without a result: {'; '.join(named[:6])}{more} (reasons: in the index).")
    return "\n".join(part for part in parts if part)


def frame(title: str, text: str, handles: list, width: float, height: float) -> Figure:
    """A figure with its title and legend above and its caption below, wrapped to its width. Sizes in inches."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)  # no window, and no state shared with other figures
    figure.suptitle(f"{title}\n ", x=0.01, ha="left", fontsize=10, fontweight="bold")  # the legend takes line two
    place = {"loc": "upper left", "bbox_to_anchor": (0.01, 1 - 19 / 72 / height), "borderaxespad": 0, "borderpad": 0}
    figure.legend(handles=handles, ncols=12, **place)
    lines = [line for part in text.split("\n") for line in textwrap.wrap(part, int(width * 18))]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7, color="#333333")
    return figure


# ---- lines, markers, labels ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Look:
    colour: str
    marker: str
    pattern: str | tuple

    @property
    def line(self) -> dict:
        return {"color": self.colour, "linestyle": self.pattern, "linewidth": 1.4}

    @property
    def ink(self) -> str:
        """The colour for words: dark enough to be read on white."""
        return shade(self.colour, -0.45) if np.dot(to_rgb(self.colour), (0.2, 0.7, 0.1)) > 0.5 else self.colour

    @property
    def face(self) -> str:
        """Inside of a marker: white (open) where times are modelled."""
        return "white" if self.marker in OPEN else self.colour

    @property
    def point(self) -> dict:
        return {"color": self.colour, "marker": self.marker, "markerfacecolor": self.face, "linestyle": "none"}


def clairvoyant(table: pd.DataFrame) -> pd.Series:
    """Rows of what knows the future, the bounds: perfect eviction (belady), perfect prediction (oracle)."""
    predicts = table["prefetch"] == "oracle" if "prefetch" in table else False
    return (table["eviction"] == "belady") | predicts


def looks(table: pd.DataFrame) -> dict[str, Look]:
    """The look of every policy of the table, in its order; patterns and shades are dealt within each miss rule."""
    result, dealt = {}, dict.fromkeys(COLOURS, 0)
    for row in table.assign(bound=clairvoyant(table)).drop_duplicates("policy").to_dict("records"):
        rule = row["miss_rule"]
        if row["bound"]:
            colour, pattern = COLOURS[rule], CLAIRVOYANT
        else:
            colour, pattern = (
                shade(COLOURS[rule], SHADES[dealt[rule] % len(SHADES)]),
                PATTERNS[dealt[rule] % len(PATTERNS)],
            )
            dealt[rule] += 1
        result[row["policy"]] = Look(colour, MARKERS[row["instrument"]], pattern)
    return result


def shade(colour: str, towards: float) -> str:
    """A colour mixed with white (up to 1) or with black (down to -1)."""
    parts = np.array(to_rgb(colour))
    return to_hex(parts + towards * (1 - parts) if towards >= 0 else parts * (1 + towards))


def rule_handles(table: pd.DataFrame) -> list[Line2D]:
    """Legend entries: a colour for every miss rule, a marker for every instrument of the table."""
    rules = [rule for rule in table["miss_rule"].unique()]
    handles = [Line2D([], [], color=COLOURS[rule], linewidth=3, label=rule) for rule in rules]
    for instrument in table["instrument"].unique():
        look = Look("#555555", MARKERS[instrument], "-")
        how = "modelled" if look.marker in OPEN else "measured"
        handles.append(Line2D([], [], **look.point, label=f"{instrument}, {how}"))
    return handles


def errors(rows: pd.DataFrame) -> np.ndarray:
    """[2, rows] lengths of the error bars of delta_percent; NaN where there is no interval."""
    estimate = rows["delta_percent"].to_numpy()
    return np.stack([estimate - rows["delta_percent_low"], rows["delta_percent_high"] - estimate])


def set_loss_scale(axis, rows: pd.DataFrame, steps: tuple[int, ...] = (1, 3)) -> None:
    """Linear, or symmetric-logarithmic where the largest loss is far beyond the typical one; the label says which."""
    values = rows[[*LOSS[:3]]].to_numpy().ravel()
    values = values[(values != 0) & np.isfinite(values)]
    sizes = np.abs(values)
    if not len(sizes) or sizes.max() <= 8 * np.median(sizes):
        return
    decade = math.floor(math.log10(np.quantile(sizes, 0.25)))
    linear = 10.0**decade
    getattr(axis.axes, f"set_{axis.axis_name}scale")("symlog", linthresh=linear, linscale=0.6)
    low, high = min(values.min(), -linear / 2), max(values.max(), linear)
    low, high = low * (1.4 if low < -linear else 1), high * 1.4
    getattr(axis.axes, f"set_{axis.axis_name}lim")(low, high)
    ticks = [m * 10.0**k for k in range(decade, math.ceil(math.log10(sizes.max())) + 1) for m in steps]
    axis.set_major_locator(FixedLocator([t for t in (*(-tick for tick in ticks[::-1]), 0, *ticks) if low <= t <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_label_text(f"{axis.get_label_text()}\nlinear within {linear:g} %, logarithmic beyond")


def label_ends(ax: Axes, ends: list[tuple[float, float, str, Look]], x: float = 1.03) -> list[Text]:
    """Name lines at the right edge: ends are (x, y, words, look) in data units. Spread so that no two words overlap."""
    if not ends:
        return []
    figure = ax.figure
    figure.canvas.draw()  # the layout must stand before heights mean anything
    gap = 9.5 / 72 / (ax.get_window_extent().height / figure.dpi)  # of a line of words, in axes heights
    ends = sorted(ends, key=lambda end: (end[1], end[2]))
    wish = np.array([ax.transAxes.inverted().transform(ax.transData.transform(end[:2]))[1] for end in ends])
    steps = gap * np.arange(len(ends))
    y = np.clip(isotonic_regression(wish - steps).x, 0, max(0, 1 - steps[-1])) + steps
    labels = []
    for (at, height, words, look), place in zip(ends, y, strict=True):
        arrow = {"arrowstyle": "-", "color": look.colour, "linewidth": 0.5, "alpha": 0.5, "relpos": (0, 0.5)}
        labels.append(
            ax.annotate(
                words,
                (at, height),
                (x, place),
                textcoords="axes fraction",
                color=look.ink,
                fontsize=7.5,
                va="center",
                arrowprops=arrow,
                annotation_clip=False,
            )
        )
    return labels


# ---- the command line ------------------------------------------------------------------------------------------------
def save(figure: Figure, points: pd.DataFrame, prefix: str | Path) -> None:
    """`<prefix>.csv`, `.png` and `.svg`: what was plotted, and the picture twice."""
    with atomic(f"{prefix}.csv") as temporary:
        points.to_csv(temporary, index=False, float_format="%.8g", lineterminator="\n")
    for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        with atomic(f"{prefix}.{suffix}") as temporary:
            figure.savefig(temporary, metadata=metadata)


def figure_main(
    draw: Callable[[pd.DataFrame], tuple[Figure, pd.DataFrame]],
    about: str,
    read: Callable[[str], pd.DataFrame] = read_table,
    name: str = "quality.csv",
) -> None:
    """The command line of a figure; read: the reader of its table, whose file is called `name`."""

    def main() -> None:
        parser = argparse.ArgumentParser(description=about.splitlines()[0])
        parser.add_argument("--table", required=True, help=name)
        parser.add_argument("--out-prefix", required=True, help="path without suffix; .csv, .png and .svg are written")
        a = parser.parse_args()
        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # not the taste of whoever runs it
            matplotlib.rcParams.update(STYLE)
            save(*draw(read(a.table)), a.out_prefix)

    main_guard(main)
