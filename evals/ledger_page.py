"""The ledger in words: results/claims.md from the rows of results/claims.csv and the rules that made them."""

from __future__ import annotations

import pandas as pd

from evals.figures import REHEARSAL
from evals.preregistration import Preregistration

ALL_MODELS = "all models"
UNITS = {"percent": " %", "points": " points", "millions": " M", "ratio": "", "correlation": "", "count": ""}
ABOUT = (
    "Every claim of the two papers with the number we found and the rule that decides it. A region and a rule were "
    "written down for every claim before its result; `supported` means that our whole interval lies inside the region, "
    "`not supported` that it lies outside, `inconclusive` anything else. A claim is a conjunction of its primary parts."
)


def page(table: pd.DataFrame, rules: Preregistration) -> str:
    """The page. table: the columns that tabulate_claims.py writes."""
    table = table.astype(object).where(table.notna(), None)
    lines = ["# Claims", "", ABOUT, "", *_conditions(table, rules), *_summary(table), *_rules(rules)]
    for name in rules.rows:
        lines += _claim(table[table["id"] == name], name)
    return "\n".join(lines).rstrip() + "\n"


def _conditions(table: pd.DataFrame, rules: Preregistration) -> list[str]:
    lines = [
        f"Preregistration: config/preregistration.yaml, sha256 {rules.sha256}.",
        f"Decided at {rules.slots} ({rules.slots_percent:g} % resident), over {', '.join(rules.texts)}, pooled; "
        f"{rules.statistics['level']:.0%} intervals by bootstrap over documents.",
        "",
    ]
    for model, own in table.groupby("model", sort=False):
        first = own.iloc[0]
        note = f" ({REHEARSAL})" if own["rehearsal"].isin([True]).any() else ""
        lines.append(f"- {model}{note}: {first['standing']}, {first['standing_why']}")
    words = f"What was known before the rules were written: {rules.known_before}"
    return [*lines, "", words, ""]


def _summary(table: pd.DataFrame) -> list[str]:
    verdicts = table[table["part"] == ""]
    models = [model for model in verdicts["model"].unique() if model != ALL_MODELS]
    heads = ["id", "claim", "paper", ALL_MODELS, *models]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, own in verdicts.groupby("id", sort=False):
        words = dict(zip(own["model"], own.apply(_verdict, axis=1), strict=True))
        first = own.iloc[0]
        cells = [f"[{name}](#{_anchor(name)})", first["claim"], first["paper_number"], words[ALL_MODELS]]
        lines.append("| " + " | ".join([*cells, *(words.get(model, "") for model in models)]) + " |")
    return [*lines, ""]


def _rules(rules: Preregistration) -> list[str]:
    lines = ["## Rules", ""]
    lines += [f"- {name}: {words}" for name, words in rules.rules.items()]
    return [*lines, f"- running: {rules.running_rule}", ""]


def _claim(own: pd.DataFrame, name: str) -> list[str]:
    first = own.iloc[0]
    lines = [
        f"## {name}",
        "",
        f"{first['claim']}.",
        "",
        f"- {first['source']}: {first['paper_number']}; instrument: {first['paper_instrument']}; status: "
        f"{first['paper_status']}; known {first['known']}",
        f"- Rule: {first['rule']}",
    ]
    for row in own[own["part"] == ""].to_dict("records"):
        why = f" ({row['reason']})" if row["reason"] else ""
        lines.append(f"- {row['model']}: **{_verdict(row)}**{why}")
    parts = own[(own["part"] != "") & (own["role"] != "shown")]
    lines += [
        "",
        "| model | part | role | difference | region | ours | smallest effect seen | sign | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_part(row) for row in parts.to_dict("records")]
    regions = list(dict.fromkeys(f"{row['part']}: {row['why']}" for row in parts.to_dict("records")))
    lines += ["", "Regions: " + "; ".join(regions) + ".", ""]
    shown = own[own["role"] == "shown"]
    measured = shown[shown["instrument"].eq("engine") & shown["host"].notna()]
    for reason, rows in measured.groupby("reason", sort=False):
        lines += [
            f"Measured by the engine; no verdict, and none may be read out of it ({reason}):",
            "",
            "| model | slots | host | link | measure | ours |",
            "|---|---|---|---|---|---|",
            *(_measured(row) for row in rows.to_dict("records")),
            "",
        ]
    shown = shown.drop(measured.index)
    if len(shown):
        lines += [
            "At the other slot budgets, without a verdict:",
            "",
            "| model | slots | part | ours |",
            "|---|---|---|---|",
        ]
        lines += [f"| {r['model']} | {r['slots']} | {r['part']} | {_ours(r)} |" for r in shown.to_dict("records")]
        lines.append("")
    return lines


def _measured(row: dict) -> str:
    compared = f"{row['measure']}: {row['of']} against {row['against']}"
    return f"| {row['model']} | {row['slots']} | {row['host']} | {row['link']} | {compared} | {_ours(row)} |"


def _part(row: dict) -> str:
    compared = row["measure"] + f": {row['of']}" + (f" against {row['against']}" if row["against"] else "")
    if row["host"]:
        compared += f", {row['host']}, {row['link']}"
    compared += f", {row['instrument']}"
    if row["within"]:
        compared += f", in {row['within']}"
    seen = "" if row["detectable"] is None else f"{row['detectable']:.3g}{UNITS.get(row['unit'], '')}"
    sign = "" if row["direction"] is None else f"{row['direction']}: {row['direction_verdict'] or ''}"
    verdict = _verdict(row) if row["role"] != "reported" else "(reported)"
    why = f" ({row['reason']})" if row["reason"] else ""
    cells = (row["model"], row["part"], row["role"], compared, _region(row), _ours(row), seen, sign, f"{verdict}{why}")
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _verdict(row: dict | pd.Series) -> str:
    """The word that may be published and, where it is not the rule's own, what the rule says."""
    if row["verdict"] == row["rule_says"]:
        return row["verdict"]
    return f"{row['verdict']} (the rule says: {row['rule_says']})"


def _region(row: dict) -> str:
    low, high, unit = row["region_low"], row["region_high"], UNITS.get(row["unit"], "")
    if low is None:
        return f"at most {high:g}{unit}"
    return f"at least {low:g}{unit}" if high is None else f"{low:g} to {high:g}{unit}"


def _ours(row: dict) -> str:
    if row["estimate"] is None:
        return ""
    unit, size = UNITS.get(row["unit"], ""), f"{row['documents']:.0f} {row['sampled']}, {row['tokens']:,.0f} tokens"
    size = size if row["tokens"] else "counted"
    ends = "no interval" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
    return f"{row['estimate']:.3f}{unit} ({ends}; {size}{_over_policies(row)})"


def _over_policies(row: dict) -> str:
    """What stands beside a correlation over policies."""
    if row["policies"] is None:
        return ""
    left_out = f"{row['left_out_low']:.3f} to {row['left_out_high']:.3f} with one left out"
    return f"; {row['policies']:.0f} policies: Spearman {row['spearman']:.3f}, {left_out}"


def _anchor(name: str) -> str:
    return name.lower().replace(".", "")
