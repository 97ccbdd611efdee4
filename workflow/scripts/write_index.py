"""What a run found, as one file: pictures and tables with their sha256 and, of a whole run, the numbers in words.

python workflow/scripts/write_index.py --title Figures --table results/published/tables/quality.csv \
    --files results/plots/published/*.* --out results/figures
python workflow/scripts/write_index.py --title Results --table ... --files ... --gates ... --texts ... --out ...

Paths are relative to the index. Without --texts only the files and the cells without a result are listed. The line
`Status:` says `complete` or `partial`; publish.py reads it.
"""

import argparse
import ast
import os
import sys
from pathlib import Path

import pandas as pd

from engine.errors import error, main_guard
from engine.files import sha256, write_text
from engine.policies import BASELINE
from evals.experiment_tables import read_experiment_b, verdicts
from evals.figures import POOLED, model_title, ok_rows, read_table, slots_title, without_result
from evals.measured_tables import ENGINE, pooled, read_errors, read_measured, worst
from evals.records import read_json
from evals.task_sheet import METRICS
from evals.task_tables import read_tasks

RETRY = "make retry"
REPORT = "snakemake --cores 1 --report results/report.html"
ABOUT = {
    "agreement.csv": "Every (model, lossy policy, task, problem): the baseline's continuation forced, agreement, mass.",
    "answer.md": "For every host and model: the policy to use, exact or within a limit on the loss.",
    "bundles.md": "The pooled rows of every bundle as a table, by model and slots.",
    "claims.csv": "The ledger: every claim, its parts by model, number, interval, region, verdict.",
    "claims.md": "The ledger in words, with the rules that decide.",
    "claims_by_documents.csv": "Estimates of the claims against the number of documents.",
    "curves.csv": "Miss rates of every eviction over slot budgets, always fetching.",
    "differences.csv": "Share of events in which two bundles execute something else.",
    "documents.csv": "Loss and substituted mass of every document under every lossy policy, at one slot budget.",
    "experiment_b.csv": "Every arm of experiment B: mass, loss, heavy against light, what stood in for what.",
    "engine_simulator.csv": "Every measured (host, link, model, size, policy): the simulator's error, the bounds.",
    "measured.csv": "Every measured (host, link, model, size, policy, text): engine and simulator, times and losses.",
    "open_loop.csv": "Counts of lossy policies replayed over recorded routing, beside the emulator's.",
    "peers.csv": "Every (host, model, program): tokens a second in the same memory, ratio, perplexity.",
    "provenance.md": "Commit, versions, weights, texts with their licence, hosts, configuration.",
    "speed.csv": "Every (model, policy, slots, host, link, text): modelled time a token, speedup, loss.",
    "tasks.csv": "Every (model, policy, task, metric): scores of written answers, agreement, mass, truncations.",
    "quality.csv": "Every (model, policy, slots, text): perplexity, loss with interval, counts.",
    "recall.csv": "Every (model, predictor, horizon, layer, topic): recall with interval, difference to gate replay.",
    "standins.csv": "Pairs of policies that differ in one column of the stand-in alone: difference of their losses.",
    "sweep.csv": "Every policy of the sweep over the stream of changing topics: loss with interval, mass, counts.",
    "topic_changes.csv": "Every policy of the sweep by tokens since the change of topic: loss, hit rate, mass.",
}


LOST = ("model", "policy", "slots", "text", "status", "reason")  # of a cell without a result
FURTHEST = {  # columns of engine_simulator.csv
    "median_ratio": "simulator over engine, median time a token",
    "p95_ratio": "simulator over engine, 95th percentile",
    "stall_over_link": "stall over bytes by the link's bandwidth",
    "token_over_bound": "time a token over bytes computed by memory bandwidth and bytes fetched by the link's",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--title", required=True)
    parser.add_argument("--table", required=True, help="quality.csv")
    parser.add_argument("--files", nargs="+", required=True, help="pictures and tables to list")
    parser.add_argument("--gates", nargs="*", default=[], help="results/gate/<model>.json")
    parser.add_argument("--texts", nargs="*", default=[], help="results/texts/<text>.json")
    parser.add_argument("--measured", help="measured.csv")
    parser.add_argument("--errors", help="engine_simulator.csv")
    parser.add_argument("--sweep", help="sweep.csv")
    parser.add_argument("--experiment-b", help="experiment_b.csv")
    parser.add_argument("--folders", nargs="*", default=[], help="folders of records to list too")
    parser.add_argument("--tasks", help="tasks.csv")
    parser.add_argument("--asked", nargs="*", default=[], help="results/tasks/<task>.json")
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    table = read_table(a.table)
    texts = [read_json(path, "status", "id") for path in a.texts]
    lost = without_result(table)
    if a.sweep:
        swept = without_result(read_table(a.sweep))
        lost = pd.concat([lost, swept.assign(policy=swept["policy"] + " (sweep)")])
    experiment = read_experiment_b(a.experiment_b) if a.experiment_b else None
    if experiment is not None:
        lost = pd.concat([lost, failed_arms(experiment)])
    tasks, asked = read_tasks(a.tasks) if a.tasks else None, [read_json(path, "status", "id") for path in a.asked]
    if tasks is not None:
        lost = pd.concat([lost, lost_answers(tasks)])
    files = [*a.files, *(path for folder in a.folders for path in sorted(Path(folder).glob("*.json")))]
    absent = [text for text in [*texts, *asked] if text["status"] != "ok"]
    lines = [f"# {a.title}", "", status_line(lost, absent), ""]
    lines += [f"Model: {model_title(table, model)}" for model in table["model"].unique()]
    if a.texts:
        lines += ["", f"As one page with captions and provenance: `{REPORT}`"]
        measured, errors = read_measured(a.measured), read_errors(a.errors)
        lines += ["", *headline(table), *measured_lines(measured, errors)]
        lines += experiment_lines(experiment) if experiment is not None else []
        lines += [*task_lines(asked, tasks), *text_lines(texts, table), *gate_lines(a.gates)]
    lines += [*([] if a.texts else [""]), *lost_lines(lost), *file_lines(files, Path(a.out).parent)]
    write_text(a.out, "\n".join(lines) + "\n")
    if len(lost) or absent:
        print(f"{a.out}: {lines[2]}; the reasons stand there, `{RETRY}` runs them again", file=sys.stderr)


def status_line(lost: pd.DataFrame, absent: list[dict]) -> str:
    if not len(lost) and not absent:
        return "Status: complete"
    return f"Status: partial (cells without a result: {len(lost)}, texts absent: {len(absent)})"


# ---- parts of the index ----------------------------------------------------------------------------------------------
def headline(table: pd.DataFrame) -> list[str]:
    """The pooled rows, a block for every model and slot budget."""
    lines = [
        "## Bundles over all texts",
        "",
        f"loss: change of token perplexity against {BASELINE} on the same tokens, in percent, with its interval over",
        "documents; seen: the smallest loss that could have been detected; substituted: share of the experts chosen;",
        "mass: share of an event's gate weight that was substituted; missed: share of the experts chosen.",
    ]
    budgets = table.drop_duplicates(["model", "slots"])
    width = max(len(policy) for policy in table["policy"])
    for budget in budgets.to_dict("records"):
        own = table[(table["model"] == budget["model"]) & (table["slots"] == budget["slots"])]
        pooled = {row["policy"]: row for row in ok_rows(own, POOLED).to_dict("records")}
        sizes = next(iter(pooled.values()), None)
        of = f", {sizes['documents']:,.0f} documents, {sizes['tokens']:,.0f} tokens" if sizes else ""
        lines += ["", f"### {budget['model']}, {slots_title(budget)}{of}", "", "```"]
        heads = ("substituted", "mass", "missed")
        lines.append(f"{'policy':{width}}  {'loss':31}  {'seen':>6}  " + "  ".join(f"{head:>11}" for head in heads))
        for policy in own["policy"].unique():
            lines.append(headline_row(policy, pooled.get(policy), width))
        lines.append("```")
    return [*lines, ""]


def headline_row(policy: str, row: dict | None, width: int) -> str:
    if row is None:
        return f"{policy:{width}}  no result (see below)"
    seen = ""
    if row["lossless"]:
        loss = "exact"
    elif row["lossy_without_effect"]:
        loss = "no effect: nothing replaced"
    elif pd.isna(row["delta_percent"]):
        loss = "no result: no baseline"
    elif pd.isna(row["delta_percent_low"]):
        loss = f"{row['delta_percent']:+.3f} (no interval)"
    else:
        loss = f"{row['delta_percent']:+.3f} ({row['delta_percent_low']:+.3f} to {row['delta_percent_high']:+.3f})"
        seen = f"{row['detectable_percent']:.3f}"
    shares = (row["substituted_share"], row["substituted_mass"], row["miss_rate"])
    inert = "  background inert" if row["background_inert"] else ""
    return f"{policy:{width}}  {loss:31}  {seen:>6}  " + "  ".join(f"{share:11.4f}" for share in shares) + inert


def measured_lines(measured: pd.DataFrame, errors: pd.DataFrame) -> list[str]:
    """Which hosts were measured, how far engine and simulator are apart, and how near the engine is to its bounds."""
    lines = ["## Measured hosts", ""]
    if measured.empty:
        return [*lines, "- none yet; `snakemake --cores 1 results/measured/local` measures this one", ""]
    engine = measured[measured["instrument"] == ENGINE]
    for (host, link, label, slots), own in engine.groupby(["host", "link", "label", "slots"], sort=False):
        done, policies = pooled(own), own["policy"].nunique()
        base = done[done["policy"] == BASELINE]
        line = f"- {host} over {link}, {label}, {slots}: {len(done)} of {policies} policies over all texts"
        if len(base):
            row = base.iloc[0]
            line += f"; {row['documents']:g} documents, {row['tokens']:g} tokens, {row['repeats']:g} runs; "
            line += f"{BASELINE} {1000 * row['token_s_mean']:.3g} ms a token, {row['stall_share']:.0%} of it stall"
        lines.append(line)
    scored = pooled(engine)
    events, differences = (int(scored[f"rescored_{name}"].sum()) for name in ("events", "differences"))
    lines.append(f"- decision logs of the timed runs, scored: {events:,} events, {differences:,} decided otherwise")
    if engine["other_cores"].notna().any():
        lines.append(f"- other work kept at most {engine['other_cores'].max():.2g} cores busy during a policy's runs")
    for column, words in FURTHEST.items():
        row = worst(errors, column)
        if row is not None:
            where = f"{row['policy']} over {row['link']} on {row['host']}, {row['model']} {row['size']}"
            lines.append(f"- {words}: furthest from 1 at {row[column]:.3f} ({where})")
    return [*lines, ""]


def experiment_lines(table: pd.DataFrame) -> list[str]:
    """Few heavy against many light substitutions, a line a model."""
    found = verdicts(table)
    return ["## Experiment B", "", *(f"- {model}: {words}" for model, words in found.items()), ""]


def failed_arms(table: pd.DataFrame) -> pd.DataFrame:
    """Arms of experiment B that failed, as cells without a result. What a pilot stopped is none."""
    failed = table[table["status"] == "failed"].rename(columns={"arm": "policy"}).assign(text="experiment B")
    return failed[["model", "policy", "slots", "text", "status", "reason"]]


def lost_answers(tasks: pd.DataFrame) -> pd.DataFrame:
    """Policies that failed at a task, once each, as cells without a result; an absent task is none of theirs."""
    failed = tasks[tasks["status"] == "failed"].drop_duplicates(["model", "policy", "task"])
    return failed.rename(columns={"task": "text", "text": "source"})[list(LOST)]


def task_lines(asked: list[dict], tasks: pd.DataFrame | None) -> list[str]:
    """Problems of every task; of every model what the baseline scores, and how far others agree with it."""
    lines = ["## Tasks", ""] if asked else []
    for task in asked:
        if task["status"] != "ok":
            reason = " ".join(str(task.get("reason", "no reason given")).split())
            lines.append(f"- {task['id']}: absent, {reason}; `{RETRY}` asks for it again")
            continue
        known = f"{task['left_out']} left out as learnt from" if task["left_out"] else "none left out as learnt from"
        lines.append(f"- {task['id']}: {len(task['rows'])} problems of the {task['found']} of {task['text']}, {known}")
    ok = tasks[tasks["status"] == "ok"] if asked else []
    for (model, task), own in ok.groupby(["model", "task"], sort=False) if asked else ():
        base, others = own[own["policy"] == BASELINE], own[own["policy"] != BASELINE]
        words = [f"{row['metric']} {row['value']:.3f}" for row in base[base["metric"].isin(METRICS)].to_dict("records")]
        line = f"- {model}, {task}: {BASELINE} scores {', '.join(words) or 'nothing'}"
        forced = others[others["metric"] == "forced_agreement"]["value"]
        if len(forced):
            line += f"; forced agreement of {len(forced)} lossy policies {forced.min():.3f} to {forced.max():.3f}"
        notes = [note for note in base["note"].unique() if "near zero" in note]
        lines.append(line + (f" ({notes[0]})" if notes else ""))
    return [*lines, ""] if lines else []


def text_lines(texts: list[dict], table: pd.DataFrame) -> list[str]:
    """Texts of the run; where it took the first documents alone, how many."""
    scored = ok_rows(table).groupby("text")["documents"].max()
    lines = ["## Texts", ""]
    for text in texts:
        what = f"{text['id']} ({text.get('role', '')}, {text.get('topic', '')})"
        if text["status"] == "ok":
            whole = len(text["documents"])
            part = "" if scored.get(text["id"], whole) == whole else f", the first {scored[text['id']]:.0f} scored"
            lines.append(f"- {what}: {whole} documents{part}, sha256 {text['sha256']}")
        else:
            reason = " ".join(str(text.get("reason", "no reason given")).split())
            lines.append(f"- {what}: absent, {reason}; `{RETRY}` asks for it again")
    return [*lines, ""]


def gate_lines(paths: list[str]) -> list[str]:
    lines = ["## Fitness to decide claims, on calibration text", ""] if paths else []
    for path in paths:
        record = read_json(path, "model", "fit", "checks", "events")
        failed = [check["name"] for check in record["checks"] if not check["passed"]]
        verdict = "fit" if record["fit"] else f"refused, it decides no claim: {'; '.join(failed)}"
        lines.append(f"- {record['model']}: {verdict} ({record['events']:,} events)")
    return [*lines, ""] if lines else []


def lost_lines(lost: pd.DataFrame) -> list[str]:
    if not len(lost):
        return []
    lines = ["## Cells without a result", "", f"Retry them with `{RETRY}`.", ""]
    for row in lost.to_dict("records"):
        reason = " ".join(row["reason"].split()) or "no baseline to pair with"
        lines.append(f"- {row['model']}, {row['policy']}, {row['slots']}, {row['text']}: {row['status']}, {reason}")
    return [*lines, ""]


def file_lines(paths: list[str], folder: Path) -> list[str]:
    lines = ["## Files", "", "| file | sha256 | shows |", "|---|---|---|"]
    for path in map(Path, paths):
        if not path.is_file():
            raise error(f"{path} does not exist", "a picture or a table", "make it first")
        name = Path(os.path.relpath(path, folder)).as_posix()
        lines.append(f"| [{name}]({name}) | {sha256(path)} | {about(path)} |")
    return lines


def about(path: Path) -> str:
    """One line: of a figure the first line of its script, of its csv that it holds the points."""
    if path.parent.name == "gate":
        return f"Is {path.stem} fit to decide claims? Its checks on calibration text."
    if path.parents[1].name == "experiment_b":
        what = "The pilot" if path.stem == "pilot" else f"Arm {path.stem}"
        return f"{what} of experiment B on {path.parent.name}."
    if path.name in ABOUT:
        return ABOUT[path.name]
    script = Path(__file__).with_name(f"plot_{path.stem}.py")
    if not script.is_file():
        raise error(f"{path}: nothing says what it shows", f"{script.name} or a line of ABOUT", "add it")
    line = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))).splitlines()[0]
    return f"The points of the figure: {line}" if path.suffix == ".csv" else line


if __name__ == "__main__":
    main_guard(main)
