"""Tables of the measured hosts: measured.csv, engine beside simulator, and engine_simulator.csv, how far they agree.

A row of the first is one (host, link, model, size, policy, slots, text or `all`, instrument). Instrument `engine` is
measured: runs of the engine, with the losses that the emulator gave their decision logs. Instrument `simulator` is
modelled: the same tokens replayed with the host's own profile, frozen before the runs; it has no losses of its own.
What knows the future cannot run: its rows, the bounds, are the simulator's alone.
Speedup joins on (host, link, model, size, slots, text) within an instrument. Means, medians and percentiles are over
all tokens but the first of each document.

python workflow/scripts/tabulate_measured.py --hosts results/measured/my_box --traces results/traces/reference \
    --out measured.csv --out-documents measured_documents.csv --out-errors engine_simulator.csv
"""

import argparse
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from engine.errors import main_guard
from engine.files import atomic
from engine.policies import BASELINE
from evals.jobs import Progress
from evals.measured_series import COUNTS, MASSES, Absent, MeasuredHost, MeasuredSize, Series, add_up, identical
from evals.measured_tables import COLUMNS, DOCUMENT_COLUMNS, ENGINE, ERROR_COLUMNS, PREFETCH, SIMULATOR
from evals.quality import paired_interval
from evals.records import is_rehearsal
from evals.speedup import speedup
from evals.stats import percent_change

ALL = "all"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", nargs="*", default=[], help="results/measured/<host>")
    parser.add_argument("--traces", nargs="*", default=[], type=Path, help="results/traces/<model>")
    parser.add_argument("--predictions", nargs="*", default=[], type=Path, help="results/predictions/<model>")
    parser.add_argument("--level", type=float, default=0.95)
    parser.add_argument("--replicates", type=int, default=9999)
    parser.add_argument("--seed", type=int, default=20512)
    parser.add_argument("--out", required=True, help="measured.csv")
    parser.add_argument("--out-documents", required=True, help="seconds and losses by document")
    parser.add_argument("--out-errors", required=True, help="engine_simulator.csv")
    a = parser.parse_args()
    options = {"level": a.level, "replicates": a.replicates, "seed": a.seed}
    traces = {path.name: path for path in a.traces}
    predictions = {path.name: path for path in a.predictions}
    sizes = [size for folder in a.hosts for size in MeasuredHost.open(folder, traces, predictions).sizes]
    progress = Progress("tabulate measured hosts", sum(len(OneSize.cells(size)) for size in sizes), "cells")
    rows, documents, errors = [], [], []
    for size in sizes:
        one = OneSize(size, options, progress)
        rows += one.rows()
        documents += one.documents()
        errors += one.errors()
    tables = ((a.out, COLUMNS, rows), (a.out_documents, DOCUMENT_COLUMNS, documents))
    for path, columns, lines in (*tables, (a.out_errors, ERROR_COLUMNS, errors)):
        with atomic(path) as temporary:
            table = pd.DataFrame(lines, columns=list(columns))
            table.to_csv(temporary, index=False, float_format="%.8g", lineterminator="\n")


Key = tuple[str, str, str]  # link, policy, slots


class OneSize:
    """One model at one size on one host, by both instruments."""

    def __init__(self, size: MeasuredSize, options: dict, progress: Progress) -> None:
        self.size, self.record, self.options = size, size.record, options
        self.found: dict[tuple[str, Key, str], Series | str] = {}  # by instrument, key and text; or why there is none
        for key, text in self.cells(size):
            link, policy, slots = key
            if policy not in size.bounds:
                self.found[ENGINE, key, text] = series_or_reason(size.engine, link, policy, slots, text)
            self.found[SIMULATOR, key, text] = series_or_reason(size.simulator, link, policy, slots, text)
            progress.advance()

    @staticmethod
    def cells(size: MeasuredSize) -> list[tuple[Key, str]]:
        """Of the policies that were measured, and of the bounds."""
        record = size.record
        keys = itertools.product(record["links"], [*record["policies"], *size.bounds], record["slots"])
        return list(itertools.product(keys, record["texts"]))

    def keys(self, instrument: str) -> list[Key]:
        return list(dict.fromkeys(key for of, key, _ in self.found if of == instrument))

    # ---- measured.csv ------------------------------------------------------------------------------------------------
    def rows(self) -> list[dict]:
        """A row a cell and instrument, and one over all texts where every text has a time."""
        lines = []
        texts, measured = list(self.record["texts"]), self.keys(ENGINE)
        for key in self.keys(SIMULATOR):
            for instrument in (ENGINE, SIMULATOR) if key in measured else (SIMULATOR,):
                lines += [self.row(instrument, key, [text]) for text in texts]
                if all(isinstance(self.found[instrument, key, text], Series) for text in texts):
                    lines.append(self.row(instrument, key, texts))
        return lines

    def row(self, instrument: str, key: Key, texts: list[str]) -> dict:
        own = [self.found[instrument, key, text] for text in texts]
        one_text = len(texts) == 1
        row = self.facts(key) | {"instrument": instrument, "text": texts[0] if one_text else ALL}
        row["topic"] = self.record["texts"][texts[0]]["topic"] if one_text else ALL
        if not isinstance(own[0], Series):
            return row | {"status": "failed" if instrument == ENGINE else "absent", "reason": own[0]}
        row |= times(own) | {name: value for name, value in self.bounds(key, own).items() if name in COLUMNS}
        found = [self.speedup(instrument, key, texts), self.loss(instrument, key, texts)]
        reasons = [one.pop("reason", "") for one in found] + [series.reason for series in own]
        return row | found[0] | found[1] | {"status": "ok", "reason": "; ".join(dict.fromkeys(filter(None, reasons)))}

    def facts(self, key: Key) -> dict:
        """Of the cell, whatever was found."""
        record, (link, policy, slots) = self.record, key
        row = self.size.policy(policy)
        facts = {name: record[name] for name in ("model", "size", "experts", "expert_bytes", "width", "expert_width")}
        facts |= {name: getattr(row, name) for name in ("miss_rule", "eviction", "beta", *PREFETCH, "lossless")}
        facts |= {"policy": policy, "slots": slots, "slots_percent": record["slots"][slots]["percent"]}
        facts |= {"slots_count": record["slots"][slots]["count"], "dtype": record["dtype"], "null_s": record["null_s"]}
        facts |= {"host": record["host"]["id"], "fingerprint": record["host"]["fingerprint"], "host_status": "measured"}
        facts |= {"profile_quick": record["host"]["quick"], "link": link, "link_kind": record["links"][link]["kind"]}
        facts |= {"link_status": record["links"][link]["status"], "level": self.options["level"]}
        return facts | {"rehearsal": is_rehearsal({"expert_bytes": record["model_expert_bytes"]})}

    def bounds(self, key: Key, own: list[Series]) -> dict:
        """What no token of these decisions can be faster than, and how far it is from that; seconds a token."""
        runs_tokens = sum(series.token_s.size for series in own)
        token_s, stall_s = (np.concatenate([getattr(s, n).ravel() for s in own]).mean() for n in ("token_s", "stall_s"))
        foreground = sum(series.foreground_bytes for series in own) / runs_tokens
        drops = sum(series.counts["drops"] for series in own) / runs_tokens
        link_s = foreground / self.size.bandwidth_bytes_per_s(key[0])
        computed = self.size.computed_bytes(key[0], drops)
        token_bound_s = math.nan if computed is None else computed / self.size.memory_bytes_per_s() + link_s
        return {
            "ceiling_token_s": token_s - stall_s + link_s,
            "limit_token_s": token_s - stall_s + foreground / self.size.limit_bytes_per_s(key[0]),
            "stall_s": stall_s,
            "link_bound_s": link_s,
            "stall_over_link": stall_s / link_s if link_s else math.nan,
            "token_bound_s": token_bound_s,
            "token_over_bound": token_s / token_bound_s,
        }

    def speedup(self, instrument: str, key: Key, texts: list[str]) -> dict:
        base_key = (key[0], BASELINE, key[2])
        lost = [text for text in texts if not isinstance(self.found.get((instrument, base_key, text)), Series)]
        if lost:
            return {"reason": f"no time of {BASELINE} on {', '.join(lost)}: no speedup"}
        if key == base_key:
            return {"speedup": 1.0, "speedup_low": 1.0, "speedup_high": 1.0}
        parts = []
        for text in texts:
            base, own = self.found[instrument, base_key, text], self.found[instrument, key, text]
            seconds = [series.token_s.mean(axis=0)[series.later] for series in (base, own)]
            parts.append((own.topic, [(name, tokens - 1) for name, tokens in own.documents], *seconds))
        return speedup(parts, **self.options)

    def loss(self, instrument: str, key: Key, texts: list[str]) -> dict:
        """Of the timed decisions, against the baseline's on the same tokens."""
        if instrument != ENGINE:
            return {}
        parts = []
        for text in texts:
            base, own = self.found.get((ENGINE, (key[0], BASELINE, key[2]), text)), self.found[ENGINE, key, text]
            if not isinstance(base, Series) or base.losses is None or own.losses is None:
                return {"reason": f"no scored log of {BASELINE} and {key[1]} on {text}: no loss"}
            parts.append((own.topic, own.documents, own.losses, base.losses))
        percent = percent_change(paired_interval(parts, **self.options))
        ends = {"delta_percent_low": percent.low, "delta_percent_high": percent.high}
        return {"delta_percent": percent.estimate, "detectable_percent": percent.detectable, **ends}

    # ---- documents ---------------------------------------------------------------------------------------------------
    def documents(self) -> list[dict]:
        """Of the engine, by document: seconds of its tokens but the first, and its losses, means over the repeats; and
        tokens of the repeats together that came to the same as the baseline's.
        """
        lines = []
        for key, text in itertools.product(self.keys(ENGINE), self.record["texts"]):
            own = self.found[ENGINE, key, text]
            if not isinstance(own, Series):
                continue
            facts = self.facts(key) | {"text": text, "topic": own.topic}
            changed = own.counts["substitutions"] + own.counts["drops"] > 0
            facts["lossy_without_effect"] = not facts["lossless"] and not changed
            facts["background_inert"] = facts["beta"] is not None and facts["slots_count"] == self.record["top_k"]
            base = self.found.get((ENGINE, (key[0], BASELINE, key[2]), text))
            same = identical(own, base) if isinstance(base, Series) else np.zeros((0, own.token_s.shape[1]), bool)
            token_s, end = own.token_s.mean(axis=0), 0
            for name, tokens in own.documents:
                begin, end = end, end + tokens
                line = facts | {"document": name, "tokens": tokens}
                line |= {"timed_tokens": tokens - 1, "time_s": token_s[begin + 1 : end].sum()}
                line |= {"compared": same[:, begin:end].size, "identical": same[:, begin:end].sum()}
                if own.losses is not None:
                    line["loss_nats"] = own.losses[begin:end].sum()
                lines.append({column: line.get(column) for column in DOCUMENT_COLUMNS})
        return lines

    # ---- engine_simulator.csv ----------------------------------------------------------------------------------------
    def errors(self) -> list[dict]:
        """A row a (link, slots, policy), over all texts."""
        lines = []
        for key in self.keys(ENGINE):
            line = {name: value for name, value in self.facts(key).items() if name in ERROR_COLUMNS}
            found = {i: [self.found[i, key, text] for text in self.record["texts"]] for i in (ENGINE, SIMULATOR)}
            lost = [one for series in found.values() for one in series if not isinstance(one, Series)]
            if lost and lost[0] in found[ENGINE]:
                lines.append(line | {"reason": lost[0]})
                continue
            line |= {name: value for name, value in self.bounds(key, found[ENGINE]).items() if name in ERROR_COLUMNS}
            measured = times(found[ENGINE])
            line |= {"tokens": measured["tokens"], "repeats": measured["repeats"]}
            line |= {f"engine_{part}_s": measured[f"token_s_{part}"] for part in ("median", "p95")}
            if lost:
                lines.append(line | {"reason": lost[0]})
                continue
            modelled = times(found[SIMULATOR])
            for part in ("median", "p95"):
                line[f"simulator_{part}_s"] = modelled[f"token_s_{part}"]
                line[f"{part}_ratio"] = modelled[f"token_s_{part}"] / measured[f"token_s_{part}"]
            lines.append(line)
        return lines


def series_or_reason(take: Callable[..., Series], *cell: str) -> Series | str:
    try:
        return take(*cell)
    except Absent as exc:
        return str(exc)


def times(own: list[Series]) -> dict:
    """Seconds and counts of the series of several texts as one. Repeats: the fewest that every text has."""
    token_s = np.concatenate([series.token_s.mean(axis=0)[series.later] for series in own])
    stall_s = np.concatenate([series.stall_s.mean(axis=0)[series.later] for series in own])
    every = np.concatenate([series.token_s[:, series.later].ravel() for series in own])
    repeats = min(len(series.token_s) for series in own)
    by_repeat = [np.concatenate([series.token_s[r][series.later] for series in own]).mean() for r in range(repeats)]
    counts, runs_tokens = add_up([series.counts for series in own]), sum(series.token_s.size for series in own)
    scored = {log: found for series in own for log, found in series.scored.items()}
    background = sum(series.background_bytes for series in own) / runs_tokens
    demands = sum(counts[name] for name in COUNTS[1:])
    gaps = [series.largest_loss_difference for series in own if math.isfinite(series.largest_loss_difference)]
    return {
        "tokens": sum(series.token_s.shape[1] for series in own),
        "documents": sum(len(series.documents) for series in own),
        "repeats": repeats,
        "token_s_mean": token_s.mean(),
        "token_s_median": np.median(every),
        "token_s_p95": np.quantile(every, 0.95),
        "token_s_lowest_repeat": min(by_repeat),
        "token_s_highest_repeat": max(by_repeat),
        "first_token_s": np.mean([series.token_s[:, ~series.later].mean() for series in own]),
        "compute_s_mean": (token_s - stall_s).mean(),
        "stall_s_mean": stall_s.mean(),
        "stall_share": stall_s.mean() / token_s.mean(),
        "bytes_per_token": sum(series.foreground_bytes for series in own) / runs_tokens + background,
        "background_bytes_per_token": background,
        "miss_rate": 1 - counts["hits"] / demands,
        **{name: counts[name] for name in (*COUNTS, *MASSES)},
        "failed_loads": sum(series.failed_loads for series in own),
        "other_cores": np.mean([series.other_cores for series in own]),
        "rescored_events": sum(events for events, _ in scored.values()) if scored else None,
        "rescored_differences": sum(differences for _, differences in scored.values()) if scored else None,
        "largest_loss_difference": max(gaps) if gaps else None,
    }


if __name__ == "__main__":
    main_guard(main)
