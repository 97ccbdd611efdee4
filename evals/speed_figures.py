"""What the figures of speed share: the budget they show, a panel a machine and model, and what the caption says.

A machine is a host and one of its links. One slot budget decides (PRIMARY_PERCENT); it is drawn large, others small.
Times of the simulator are modelled even on a host whose constants were measured, so its markers are open; the caption
names the profile.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engine.policies import BASELINE
from evals.figures import POOLED, REHEARSAL, clairvoyant, model_title, slots_title

PRIMARY_PERCENT = 25.0  # of a layer's experts; the nearest budget of the table is taken
NAMED_GAPS = 6  # cells without a result that a caption names one by one


@dataclass(frozen=True)
class Panel:
    """One model on one machine. rows: its pooled rows, with and without a result."""

    model: str
    host: str
    link: str
    profile: str
    rows: pd.DataFrame
    ax: Axes
    first: bool  # of its row of panels
    last: bool  # of its column of panels


def panels(figure: Figure, table: pd.DataFrame, **shared) -> list[Panel]:
    """A row of panels a machine, a column a model; of one model, machines two abreast."""
    machines = list(table.drop_duplicates(["host", "link"])[["host", "link"]].itertuples(index=False, name=None))
    cells = [(model, *machine) for machine in machines for model in table["model"].unique()]
    high, wide = grid(table)
    axes = figure.subplots(high, wide, squeeze=False, **shared)
    result = []
    for place, (model, host, link) in enumerate(cells):
        of = (table["model"] == model) & (table["host"] == host) & (table["link"] == link)
        own = table[of]
        how = profile(table[(table["host"] == host) & (table["link"] == link)].iloc[0])
        first, last = place % wide == 0, place + wide >= len(cells)
        ax = axes[place // wide, place % wide]
        result.append(Panel(model, host, link, how, own[own["text"] == POOLED], ax, first, last))
    for ax in axes.ravel()[len(cells) :]:
        ax.remove()
    return result


def grid(table: pd.DataFrame) -> tuple[int, int]:
    """Rows and columns of panels."""
    models, machines = table["model"].nunique(), len(table.drop_duplicates(["host", "link"]))
    wide = models if models > 1 else min(2, machines)
    return -(-models * machines // wide), wide


def compared(table: pd.DataFrame) -> pd.DataFrame:
    """Rows for figures that compare whole policies: of those that prefetch SpecPrefetch, in pieces, and the bound.

    Other predictors and schedules stand in the figure of prefetching alone (plot_prefetch.py).
    """
    spec = (table["prefetch"] == "spec_prefetch") & (table["schedule"] == "pieces")
    return table[(table["prefetch"] == "") | spec | clairvoyant(table)]


# ---- one budget ------------------------------------------------------------------------------------------------------
def primary_slots(table: pd.DataFrame, model: str) -> str:
    """The slot budget of a model that is nearest to PRIMARY_PERCENT, the smaller of two."""
    budgets = table[table["model"] == model].sort_values("slots_percent", kind="stable")
    return budgets.loc[(budgets["slots_percent"] - PRIMARY_PERCENT).abs().idxmin(), "slots"]


def with_result(rows: pd.DataFrame, slots: str | None = None) -> pd.DataFrame:
    return rows[(rows["status"] == "ok") & ((rows["slots"] == slots) if slots else True)]


# ---- words -----------------------------------------------------------------------------------------------------------
def models_title(table: pd.DataFrame) -> str:
    """The models; that they are rehearsals once where all are, else beside each that is."""
    names = table["model"].unique()
    if table["rehearsal"].all():
        return f"{', '.join(names)} ({REHEARSAL})"
    return ", ".join(model_title(table, model) for model in names)


def profile(row: pd.Series) -> str:
    """`measured profile`, or of host and link where they differ."""
    host, link = row["host_status"], row["link_status"]
    return f"{host} profile" if host == link else f"{host} host, {link} link"


def panel_title(panel: Panel) -> str:
    return f"{panel.host}, {panel.link} ({panel.profile}): {panel.model}"


def why_no_speedup(panel: Panel, slots: str) -> str:
    """The reason that no row of the budget has a speedup; empty where one has."""
    rows = with_result(panel.rows, slots)
    if rows["speedup"].notna().any():
        return ""
    reasons = [*rows["reason"], *panel.rows.loc[panel.rows["slots"] == slots, "reason"]]
    return next((reason for reason in reasons if reason), f"{BASELINE} has no result here")


def times(speedup: float) -> str:
    return f"{speedup:.2f}\u00d7" if speedup < 10 else f"{speedup:.3g}\u00d7"


def change(percent: float) -> str:
    """Three digits at most: +0.35, +8.4, +219."""
    size, percent = abs(percent), round(percent, 2) + 0.0  # never -0.00
    return f"{percent:+.{0 if size >= 99.5 else 1 if size >= 0.95 else 2}f} %"


def caption(table: pd.DataFrame, notes: str) -> str:
    """Models, slots, machines and where their times come from, experts, tokens, and the cells that are missing."""
    described = {}
    for model in table["model"].unique():
        described.setdefault(_describe(table[table["model"] == model]), []).append(model)
    parts = [f"Model {', '.join(models)}{description}" for description, models in described.items()]
    machines = table.drop_duplicates(["host", "link"])
    named = [f"{row['host']} over {row['link']} ({profile(row)})" for _, row in machines.iterrows()]
    instruments = table["instrument"].unique()
    how = "modelled times on these profiles, hence open markers" if "simulator" in instruments else "measured times"
    parts.append(f"Machines: {'; '.join(named)}. Instrument: {', '.join(instruments)} ({how}).")
    return "\n".join([*parts, *filter(None, [notes, gaps(table)])])


def _describe(own: pd.DataFrame) -> str:
    """The experts, slots and texts of one model, for behind its name."""
    budgets = own.drop_duplicates("slots").sort_values("slots_percent", kind="stable")
    slots = "; ".join(slots_title(row) for _, row in budgets.iterrows())
    pooled, experts = with_result(own[own["text"] == POOLED]), own.dropna(subset=["expert_bytes"])
    size = ""
    if len(experts):
        row = experts.iloc[0]
        size = f" (an expert: {row['expert_bytes'] / 2**20:.3g} MiB{' of ' + row['dtype'] if row['dtype'] else ''})"
    documents = "" if pooled["documents"].isna().all() else f"{pooled['documents'].max():,.0f} documents, "
    scored = f"{documents}{pooled['tokens'].max():,.0f} tokens, all texts together"
    return f"{size}. Slots {slots}. {scored if len(pooled) else 'No result over all texts'}."


def interval(table: pd.DataFrame) -> str:
    level = table["level"].dropna()
    return f"{level.iloc[0]:.0%} interval" if len(level) else "interval"


def delays(table: pd.DataFrame) -> str:
    """With which delays of background loads the quality was taken."""
    found = table["delay_tokens"].dropna()
    if found.empty:
        return ""
    low, high = found.min(), found.max()
    reach = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return f" Loss under background loads: with a delay (in tokens) of {reach}."


def bounds(table: pd.DataFrame) -> str:
    """What knows the future, by name and by the part that it bounds."""
    found = table[clairvoyant(table)].drop_duplicates("policy")
    named = [
        f"{row['policy']} (the fewest misses that fetching every miss allows)"
        if row["eviction"] == "belady"
        else f"{row['policy']} (perfect prediction, by the same scheduler over the same link)"
        for row in found.to_dict("records")
    ]
    return ", ".join(named) or "none in this table"


def scored_ahead(table: pd.DataFrame) -> str:
    """On how many tokens the loss of policies that prefetch was taken."""
    lossy = with_result(table[(table["text"] == POOLED) & (table["prefetch"] != "") & ~table["lossless"]])
    lossy = lossy.dropna(subset=["loss_tokens"])
    if lossy.empty:
        return ""
    low, high = lossy["loss_tokens"].min(), lossy["loss_tokens"].max()
    tokens = f"{high:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
    names = ", ".join(lossy["policy"].unique())
    return f" Loss of {names}: of the very decisions that were timed, on {tokens} tokens, the first of every document."


def gaps(table: pd.DataFrame) -> str:
    """The cells that failed, by policy, slots and machine; a policy that failed everywhere by its name."""
    lost = table[table["status"] != "ok"].drop_duplicates(["model", "policy", "slots", "host", "link"])
    named = []
    for (model, policy, host, link), rows in lost.groupby(["model", "policy", "host", "link"], sort=False):
        named.append(f"{policy} {', '.join(rows['slots'])} on {host}, {link} ({model})")
    more = f" and {len(named) - NAMED_GAPS} more" if len(named) > NAMED_GAPS else ""
    return f"Without a result: {'; '.join(named[:NAMED_GAPS])}{more} (reasons: in the table)." if named else ""


def say(ax: Axes, words: str) -> None:
    """A panel that has nothing to show says why."""
    text = "\n".join(textwrap.wrap(words, 38))
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", fontsize=7.5, color="#555555")
