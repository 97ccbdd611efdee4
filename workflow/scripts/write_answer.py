"""Which policy to use: for every host and model, if the output must be exact and for three limits on the loss.

Speed and loss are those of the table of speed, over all texts; whether a policy had an effect, the table of quality
says. Policies that prefetch are in the table of speed alone. Where hosts were measured, their own speeds and losses
stand first. A policy is within a limit where the upper end of its loss interval is, and what is clairvoyant cannot be
used.

python workflow/scripts/write_answer.py --speed results/tables/local/speed.csv \
    --quality results/tables/local/quality.csv --preregistration config/preregistration.yaml --out results/answer.md
"""

import argparse

import pandas as pd

from engine.errors import main_guard
from engine.files import write_text
from engine.policies import BASELINE
from evals.figures import POOLED, REHEARSAL, clairvoyant, model_title, ok_rows, read_table
from evals.measured_tables import ENGINE, pooled, read_measured
from evals.preregistration import load
from evals.speed import LOSS, read_speed

LIMITS = (0.5, 1.0, 2.0)  # percent of token perplexity
UNTRAINED = ("gate_replay", "oracle", "random")  # predictors that learn nothing
NONE = "none of the policies"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speed", required=True, help="speed.csv")
    parser.add_argument("--quality", required=True, help="quality.csv")
    parser.add_argument("--preregistration", required=True, help="names the slot budget that stands first")
    parser.add_argument("--measured", help="measured.csv")
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    tables = read_speed(a.speed), read_table(a.quality), read_measured(a.measured)
    write_text(a.out, answer(*tables, load(a.preregistration).slots))


def answer(speed: pd.DataFrame, quality: pd.DataFrame, measured: pd.DataFrame, primary_slots: str) -> str:
    """The page: measured hosts, then a section for every slot budget (the primary one first) and host that is modelled,
    a table for every model."""
    levels = pd.to_numeric(quality["level"], errors="coerce").dropna() if "level" in quality else ()
    level = f"{levels.iloc[0]:.0%}" if len(levels) else "95%"
    lines = ["# Which policy to use", "", *how_to_read(level, speed, quality), "", *measured_section(measured)]
    pooled = speed[speed["text"] == POOLED]
    if pooled.empty:
        return "\n".join([*lines, "Not run: the table of speed has no rows over all texts.", ""])
    budgets = quality.drop_duplicates("slots").sort_values("slots_percent", kind="stable")
    ordered = sorted(budgets.to_dict("records"), key=lambda row: row["slots"] != primary_slots)
    for budget in ordered:
        own = pooled[pooled["slots"] == budget["slots"]]
        if own.empty:
            continue
        note = " (the budget that decides claims)" if budget["slots"] == primary_slots else ""
        lines += [f"## {budget['slots']}: {budget['slots_percent']:g} % of the experts resident{note}", ""]
        for _, rows in own.groupby(["host", "link"], sort=False):
            lines += host_lines(rows, quality, budget["slots"])
    return "\n".join(lines).rstrip() + "\n"


def how_to_read(level: str, speed: pd.DataFrame, quality: pd.DataFrame) -> list[str]:
    limits = ", ".join(f"{limit:g}" for limit in LIMITS)
    lines = [
        "Each table answers for one host, link and model: the fastest policy whose output is exactly the model's, and "
        f"the fastest of those that cost at most {limits} % of token perplexity. A policy counts as within a limit "
        f"only where the upper end of its {level} interval is, so a loss that is merely not known well does not pass; "
        "an exact policy passes every limit. Speeds under `Measured` are the engine's own; every other speed is "
        "modelled: the mean time a token over all texts, by the simulator on the host's constants. Speedup "
        f"is against {BASELINE} at the same budget on the same host, with its interval. Constants are measured by a "
        "probe, or `modelled`: taken from documents. The loss is that of the decisions that were timed, with "
        f"background loads as late as on that host. A policy that is not faster than {BASELINE} beyond doubt, or by "
        "less than two decimals show, does not replace it. Policies that know the future, and lossy ones that replaced "
        "nothing in this run, are not recommended. Intervals are over documents: they do not hold what a machine does "
        "from one run to the next.",
    ]
    trained = speed[~speed["prefetch"].isin(["", *UNTRAINED])]["policy"].unique()
    if len(trained):
        words = "need a predictor that was trained on the model's own routing (results/predictors/<model>)"
        beside = "the loss of lossy ones is taken on the first tokens of every document."
        lines += ["", f"Policies that prefetch by what was learnt ({', '.join(trained)}) {words}; {beside}"]
    if quality["rehearsal"].any():
        words = "their losses say how the method works, not what a large model loses."
        lines += ["", f"Models marked `{REHEARSAL}`: {words}"]
    return lines


# ---- measured hosts --------------------------------------------------------------------------------------------------
def measured_section(measured: pd.DataFrame) -> list[str]:
    """A table for every host, link, model and size, of the engine's own times and the losses of its decisions."""
    engine = measured[measured["instrument"] == ENGINE] if len(measured) else measured
    lines = []
    for (host, link, label, slots), own in engine.groupby(["host", "link", "label", "slots"], sort=False):
        done = pooled(own).assign(background_inert=False).sort_values("token_s_mean", kind="stable")
        found = faster(done[done["effect"] & (done["lossless"] | done["delta_percent"].notna())])
        row = own.iloc[0]
        rehearsal = f" ({REHEARSAL})" if row["rehearsal"] else ""
        title = f"### {host} over {link} (link {row['link_status']}), {label}{rehearsal}, {slots}"
        lines += [title, "", *table_head("measured")]
        lines.append(line("exact output", found[found["lossless"]]))
        lines += [line(f"at most {limit:g} %", found[within(found, limit)]) for limit in LIMITS]
        failed = own[own["status"] != "ok"].drop_duplicates("policy").to_dict("records")
        lines += ["", *(f"- not measured: {lost['policy']}: {lost['reason']}" for lost in failed)]
        lines += [""] if failed else []
    head = "Times of the engine on these machines, on few tokens; losses of the very decisions that were timed."
    return ["## Measured", "", head, "", *lines] if lines else []


def table_head(how: str) -> list[str]:
    return [f"| wanted | policy | tokens a second ({how}) | speedup | loss |", "|---|---|---|---|---|"]


# ---- one host --------------------------------------------------------------------------------------------------------
def host_lines(rows: pd.DataFrame, quality: pd.DataFrame, slots: str) -> list[str]:
    first = rows.iloc[0]
    lines = [
        f"### {first['host']} over {first['link']} (host {first['host_status']}, link {first['link_status']})",
        "",
    ]
    for model, own in rows.groupby("model", sort=False):
        title = model_title(quality, model)
        lines += [f"{title}:", "", *table_head("modelled")]
        found = candidates(own, quality[(quality["model"] == model) & (quality["slots"] == slots)])
        quicker = faster(found)
        lines.append(line("exact output", quicker[quicker["lossless"]]))
        lines += [line(f"at most {limit:g} %", quicker[within(quicker, limit)]) for limit in LIMITS]
        lines += ["", *left_out(own, found)]
    return lines


def candidates(speed: pd.DataFrame, quality: pd.DataFrame) -> pd.DataFrame:
    """Policies with a time and a loss that can be used: of both tables, and those that prefetch; fastest first."""
    usable = ok_rows(quality, POOLED)
    usable = usable[~clairvoyant(usable) & ~usable["lossy_without_effect"]]
    timed = speed[speed["status"] == "ok"]
    ahead = timed[(timed["prefetch"] != "") & ~clairvoyant(timed)]
    ahead = ahead[ahead["lossless"] | (ahead["delta_percent"].fillna(0) != 0)].assign(background_inert=False)
    columns = ["policy", "token_s_mean", "speedup", "speedup_low", "speedup_high", *LOSS]
    scored = usable[["policy", "lossless", "background_inert"]].merge(timed[columns], on="policy")
    both = pd.concat([scored, ahead[list(scored)]], ignore_index=True)
    return both.sort_values("token_s_mean", kind="stable")


def faster(found: pd.DataFrame) -> pd.DataFrame:
    """The baseline, and what is faster beyond doubt, by more than two decimals hide; all where no interval is known."""
    slower = found["speedup_low"].round(2) <= 1
    return found[(found["policy"] == BASELINE) | ~slower]


def within(found: pd.DataFrame, limit: float) -> pd.Series:
    """Whose loss is at most the limit beyond doubt; without an interval it is not."""
    return found["lossless"] | (found["delta_percent_high"] <= limit)


def line(wanted: str, found: pd.DataFrame) -> str:
    if found.empty:
        return f"| {wanted} | {NONE} | | | |"
    row = found.iloc[0]
    inert = " (background inert)" if row["background_inert"] else ""
    return f"| {wanted} | {row['policy']}{inert} | {1 / row['token_s_mean']:.2f} | {speedup(row)} | {loss(row)} |"


def speedup(row: pd.Series) -> str:
    if pd.isna(row["speedup"]):
        return "no baseline"
    if pd.isna(row["speedup_low"]) or pd.isna(row["speedup_high"]):
        return f"{row['speedup']:.2f} (no interval)"
    return f"{row['speedup']:.2f} ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})"


def loss(row: pd.Series) -> str:
    if row["lossless"]:
        return "exact"
    return f"{row['delta_percent']:+.2f} % ({row['delta_percent_low']:+.2f} to {row['delta_percent_high']:+.2f})"


def left_out(speed: pd.DataFrame, found: pd.DataFrame) -> list[str]:
    """Policies that were to be timed and are no candidates, with the reason where one was recorded."""
    failed = speed[speed["status"] != "ok"]
    lines = [f"- not timed: {row['policy']}: {row['reason']}" for row in failed.to_dict("records")]
    others = [name for name in speed.loc[speed["status"] == "ok", "policy"] if name not in set(found["policy"])]
    if others:
        lines.append(f"- not to be used, or without a loss: {', '.join(others)}")
    return [*lines, ""] if lines else []


if __name__ == "__main__":
    main_guard(main)
