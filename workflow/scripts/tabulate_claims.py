"""The ledger: every claim with its paper's number, ours with an interval, the rule that decides, and the verdict.

Which region and rule decides stands in config/preregistration.yaml; whether that was committed first, git is asked
(evals/standing.py). A number that nothing measured yet is `not run`, with the reason.

python workflow/scripts/tabulate_claims.py --records results/quality/*/*/perplexity.json \
    --speed results/tables/local/speed.csv --sweep results/sweep/* --experiment-b results/experiment_b/* \
    --agreement results/tables/local/agreement.csv --recall results/predictions/*/recall.json \
    --out results/claims.csv --out-page results/claims.md \
    --out-documents results/tables/local/claims_by_documents.csv
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd

from engine.errors import main_guard
from engine.files import atomic, write_text
from evals.jobs import Progress
from evals.ledger import JUDGED_ROLES, Finding, Judged, conclude, find_row, judge, over_models
from evals.ledger_engine import lift, shown_without_verdict
from evals.ledger_evidence import Evidence, Speed, gather, load_pilots, read_agreement
from evals.ledger_page import ALL_MODELS, page
from evals.ledger_recall import load_recalls
from evals.measured_tables import read_documents as read_measured_documents
from evals.preregistration import Part, Preregistration, Row, load
from evals.records import Scored, is_rehearsal, load_folders, load_scored
from evals.speed import read_documents, read_speed
from evals.standing import EXPLORATORY, Standing, of_run

COLUMNS = [
    *("id", "model", "part", "role", "slots", "source", "claim", "paper_number", "paper_instrument", "paper_status"),
    *("known", "rule", "why", "measure", "of", "against", "within", "instrument", "host", "link", "texts", "sampled"),
    *("documents", "tokens", "estimate", "low", "high", "unit", "level", "detectable", "region_low", "region_high"),
    *("policies", "spearman", "left_out_low", "left_out_high"),
    *("p_value", "p_holm", "sign_change_after", "direction", "direction_verdict", "rule_says", "verdict", "reason"),
    *("standing", "standing_why", "rehearsal", "weights", "preregistration_sha256"),
]
GRID = 16  # points of the running estimate that have an interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preregistration", default="config/preregistration.yaml")
    parser.add_argument("--records", nargs="+", required=True, help="results/quality/<model>/<policy>/perplexity.json")
    parser.add_argument("--speed", help="speed.csv; without it every timing is `not run`")
    parser.add_argument("--speed-documents", help="seconds by document; without it texts are the units of times")
    parser.add_argument("--measured-documents", help="documents of measured hosts; without it none was measured")
    parser.add_argument("--peers-documents", help="the same of other programs; without it none was run")
    parser.add_argument("--sweep", nargs="*", default=[], help="results/sweep/<model>; without it no stream either")
    parser.add_argument("--experiment-b", nargs="*", default=[], help="results/experiment_b/<model>")
    parser.add_argument("--agreement", help="agreement.csv; without it there is no forced agreement")
    parser.add_argument("--recall", nargs="*", default=[], help="results/predictions/<model>/recall.json")
    parser.add_argument("--gates", nargs="*", default=[], help="results/gate/<model>.json: who is fit to decide claims")
    parser.add_argument("--out", required=True, help="claims.csv")
    parser.add_argument("--out-page", required=True, help="claims.md")
    parser.add_argument("--out-documents", required=True, help="the estimates against the number of documents")
    a = parser.parse_args()
    rules, scored = load(a.preregistration), load_scored(a.records)
    measured = read_measured_documents(a.measured_documents)
    peers = read_measured_documents(a.peers_documents)
    speed = Speed(read_speed(a.speed), read_documents(a.speed_documents), measured, peers)
    evidence = gather(
        scored,
        sweep=load_folders(a.sweep),
        experiment_b=load_folders(a.experiment_b),
        pilots=load_pilots(a.experiment_b),
        agreement=read_agreement(a.agreement),
        speed=speed,
        recalled=load_recalls(a.recall),
    )
    refused = refusals(a.gates)
    run, named = of_run(a.preregistration), dict.fromkeys([*rules.models, *scored])
    standings = {model: of_model(scored.get(model), rules, run) for model in named}
    standings[ALL_MODELS] = of_all(standings, rules)
    progress = Progress("ledger", len(rules.rows), "claims")
    claims, by_documents = [], []
    for declared in rules.rows.values():
        row = lift(declared, speed.of_hosts(declared))
        judged = judge(find_row(row, rules, evidence, refused=refused), rules)
        claims += [finish(line, rules, scored, standings) for line in row_lines(row, judged, rules)]
        shown = other_budgets(row, rules, evidence, refused)
        shown += without_verdict(declared, row, rules, evidence, speed, refused)
        claims += [finish(line, rules, scored, standings) for line in shown]
        by_documents += [point for one in judged for point in documents_lines(one.finding, rules, scored)]
        progress.advance()
    table = pd.DataFrame(claims, columns=COLUMNS)
    points = pd.DataFrame(by_documents, columns=DOCUMENT_COLUMNS)
    for path, frame in ((a.out, table), (a.out_documents, points)):
        with atomic(path) as temporary:
            frame.to_csv(temporary, index=False, float_format="%.8g", lineterminator="\n")
    write_text(a.out_page, page(table, rules))


def refusals(paths: list[str]) -> dict[str, str]:
    """Models that their gate refused, and by which checks."""
    records = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    return {
        record["model"]: f"{record['model']} is refused by its fitness gate: "
        + "; ".join(check["name"] for check in record["checks"] if not check["passed"])
        for record in records
        if not record["fit"]
    }


# ---- standing --------------------------------------------------------------------------------------------------------
def of_model(policies: dict[str, Scored] | None, rules: Preregistration, run: Standing) -> Standing:
    """The run's standing, unless the rules do not name the model, or say that its results were seen before."""
    if policies is None:
        return run
    one = next(iter(policies.values()))
    if one.record["model"] not in rules.models:
        return Standing(EXPLORATORY, f"{one.record['model']} is no model of the preregistration")
    seen = sorted({policy.weights for policy in policies.values()} & set(rules.seen_weights))
    if seen:
        return Standing(EXPLORATORY, f"results of weights {seen[0]} were there before the preregistration")
    return run


def of_all(standings: dict[str, Standing], rules: Preregistration) -> Standing:
    """Over the models of the rules: as good as the weakest."""
    order = {"preregistered": 0, "unverifiable": 1, "exploratory": 2}
    return max((standings[model] for model in rules.models), key=lambda standing: order[standing.word])


# ---- lines of the table ----------------------------------------------------------------------------------------------
def row_lines(row: Row, judged: list[Judged], rules: Preregistration) -> list[dict]:
    """The verdict over the models, each model's, and every part on every model; one line a part where none was run."""
    own: dict[str, list[Judged]] = {}
    for one in judged:
        own.setdefault(one.finding.model, []).append(one)
    by_model = {model: conclude(ones) for model, ones in own.items()}
    word, reason = over_models(by_model, rules)
    lines = [{"row": row, "model": ALL_MODELS, "slots": rules.slots, "rule_says": word, "reason": reason}]
    if row.not_run:
        return lines + [part_line(one) | {"model": ALL_MODELS} for one in own[rules.models[0]]]
    for model, (word, reason) in by_model.items():
        lines.append({"row": row, "model": model, "slots": rules.slots, "rule_says": word, "reason": reason})
        lines += [part_line(one) for one in own[model]]
    return lines


def other_budgets(
    row: Row, rules: Preregistration, evidence: dict[str, Evidence], refused: dict[str, str]
) -> list[dict]:
    """The same numbers at the slot budgets that do not decide: shown, without a verdict."""
    budgets = {
        cell["slots"]
        for own in evidence.values()
        for policy in own.quality.values()
        for cell in policy.record["cells"]
        if cell["slots"] != rules.slots
    }
    lines = []
    for slots in sorted(budgets) if not row.not_run else []:
        for finding in find_row(row, rules, evidence, slots, refused):
            if finding.interval is not None:
                lines.append(part_line(Judged(finding)) | {"role": "shown"})
    return lines


def without_verdict(declared: Row, row: Row, rules: Preregistration, evidence, speed: Speed, refused) -> list[dict]:
    """What was measured of a claim about hosts and decides nothing, at the budget that decides: with the reason."""
    shown, reason = shown_without_verdict(declared, row, speed.measured)
    findings = find_row(shown, rules, evidence, refused=refused) if shown else []
    lines = [part_line(Judged(finding)) for finding in findings if finding.quantity is not None]
    return [line | {"row": declared, "role": "shown", "reason": reason} for line in lines]


def part_line(one: Judged) -> dict:
    finding, found = one.finding, one.finding.interval
    line = {"row": finding.row, "part": finding.part, "role": finding.part.role, "model": finding.model}
    line |= {"slots": finding.slots, "rule_says": one.verdict or "", "reason": one.reason, "p_holm": one.p_holm}
    line |= {"direction_verdict": one.direction, "p_value": finding.p_value, "sign_change_after": finding.sign_change}
    if found is not None:
        line |= {
            "documents": len(finding.quantity.documents),
            "sampled": finding.quantity.units,
            "tokens": found.tokens,
            "estimate": found.estimate,
        }
        line |= {"low": found.low, "high": found.high, "detectable": found.detectable, "level": found.level}
        line |= {"reason": one.reason or found.reason, **finding.quantity.beside}
    return line


def finish(line: dict, rules: Preregistration, scored, standings: dict[str, Standing]) -> dict:
    """What the line takes from its row, its part, its model and the rules."""
    row, part = line.pop("row"), line.pop("part", None)
    standing, policies = standings[line["model"]], scored.get(line["model"])
    line |= {"id": row.id, "part": "", "source": row.source, "claim": row.claim, "known": row.paper["known"]}
    line |= {f"paper_{name}": row.paper[name] for name in ("number", "instrument", "status")}
    line |= {"rule": row.rule, "texts": " ".join(rules.texts), "preregistration_sha256": rules.sha256}
    line |= {"standing": standing.word, "standing_why": standing.why, "verdict": standing.of(line["rule_says"])}
    if policies is not None:
        one = next(iter(policies.values()))
        line |= {"rehearsal": is_rehearsal(one.record), "weights": one.weights}
    return line if part is None else line | part_facts(part, rules)


def part_facts(part: Part, rules: Preregistration) -> dict:
    facts = {name: getattr(part, name) for name in ("measure", "of", "against", "within", "instrument", "host", "link")}
    facts |= {"part": part.id, "texts": " ".join(part.texts), "unit": rules.measures[part.measure].unit}
    ends = {"region_low": part.low, "region_high": part.high}
    facts |= {name: end if math.isfinite(end) else None for name, end in ends.items()}
    return facts | {"why": part.why, "direction": part.direction}


# ---- the estimate against the number of documents --------------------------------------------------------------------
DOCUMENT_COLUMNS = [
    *("id", "part", "model", "measure", "of", "against", "within", "texts", "slots", "slots_percent", "instrument"),
    *("unit", "sampled"),
    *("document", "number", "documents", "tokens", "estimate", "low", "high", "level", "no_effect"),
    *("region_low", "region_high", "sign_change_after", "rehearsal"),
]


def documents_lines(finding: Finding, rules: Preregistration, scored) -> list[dict]:
    """The estimate after every document in the fixed order; at some of them, and the last, with its interval.

    The interval of a ratio is a search: it is there at the last alone.
    """
    quantity, part = finding.quantity, finding.part
    if quantity is None or part.role not in JUDGED_ROLES:
        return []
    no_effect = rules.measures[part.measure].no_effect
    estimates, _ = quantity.running(no_effect)
    total = len(estimates)
    grid = set(np.linspace(min(4, total), total, min(GRID, total)).round().astype(int).tolist())
    policies = scored[finding.model]
    facts = {"id": finding.row.id, "model": finding.model, "slots": finding.slots, "no_effect": no_effect}
    facts |= {"slots_percent": rules.slots_percent, "documents": total, "sign_change_after": finding.sign_change}
    facts |= part_facts(part, rules) | {"rehearsal": is_rehearsal(next(iter(policies.values())).record)}
    facts |= {"sampled": quantity.units, "tokens": finding.interval.tokens, "level": finding.interval.level}
    lines = []
    for number, estimate in enumerate(estimates, start=1):
        line = facts | {"number": number, "document": quantity.documents[number - 1], "estimate": estimate}
        if number in grid and (number == total or not quantity.searched):
            whole = finding.interval
            found = whole if number == total else quantity.first(number).interval(**rules.statistics)
            line |= {"low": found.low, "high": found.high}
        lines.append({name: line.get(name) for name in DOCUMENT_COLUMNS})
    return lines


if __name__ == "__main__":
    main_guard(main)
