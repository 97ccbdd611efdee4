"""Records of programs run on the same tokens as tables: a row a program, and its documents for the ledger.

A ratio says how many times faster a token is than llama.cpp's in the same memory (`llama_cpp` under the limit,
`llama_cpp_in_memory` without), a difference of perplexity is against the engine that fetches every miss in that
memory. Both are paired on the tokens that the two decoded; the interval draws documents within topics. First tokens of
documents are not timed, and the first document, the warm-up, is neither timed nor scored.

    record = engine.measured_run.read_peers(Path("results/measured/my_box/peers_reference.json"))
    rows(record, level=0.95, replicates=999, seed=1)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from evals.checked_tables import read_words, refuse, to_flags, to_numbers
from evals.measured_tables import DOCUMENT_COLUMNS
from evals.peers.sheet import LIMITED
from evals.quality import paired_interval
from evals.speedup import speedup
from evals.stats import percent_change

AGAINST = {LIMITED: "llama_cpp", "all": "llama_cpp_in_memory"}  # the ratio's denominator, by memory
EXACT = {LIMITED: "fetch_lfu_decay", "all": "engine_in_memory"}  # whose losses the others' are compared with
COLUMNS = ("model", "size", "rehearsal", "host", "fingerprint", "peer", "program", "memory", "memory_bytes")
COLUMNS += (
    "experts_bytes",
    "policy",
    "slots_percent",
    "threads",
    "load_mode",
    "read_ahead_kb",
    "documents",
    "tokens",
    "tokens_per_s",
)
COLUMNS += ("token_s_mean", "token_s_median", "token_s_p95", "against", "speedup", "speedup_low", "speedup_high")
COLUMNS += ("token_perplexity", "perplexity_against", "delta_percent", "delta_percent_low", "delta_percent_high")
COLUMNS += ("peak_bytes", "read_bytes_per_token", "level", "status", "reason")
STATUSES = ("failed", "not run", "ok")
NUMBERS = (
    "memory_bytes",
    "read_ahead_kb",
    "experts_bytes",
    "tokens",
    "documents",
    "tokens_per_s",
    "peak_bytes",
    "read_bytes_per_token",
)
NUMBERS += ("token_s_p95", "speedup", "speedup_low", "speedup_high", "token_perplexity", "delta_percent", "level")
NUMBERS += ("delta_percent_low", "delta_percent_high")


class Timed:
    """A row of a record with a token's seconds and losses, cut to the tokens that another row has too."""

    def __init__(self, record: dict, row: dict) -> None:
        self.documents = record["documents"][1:]  # [text, topic, document, tokens] of each
        self.seconds, self.losses = row["seconds"][1:], row["losses"][1:]

    def cut(self, other: Timed) -> tuple[list, list]:
        """For evals.speedup and paired_interval: (topic, clusters, the other's, own) of every document."""
        times, losses = [], []
        for (text, topic, name, _), *both in zip(
            self.documents, self.seconds, other.seconds, self.losses, other.losses, strict=True
        ):
            own_s, other_s, own, base = (np.array(values[: min(map(len, both))]) for values in both)
            times.append((topic, [(f"{text}/{name}", len(own) - 1)], other_s[1:], own_s[1:]))
            losses.append((topic, [(f"{text}/{name}", len(own))], own, base))
        return times, losses


def rows(record: dict, **options) -> Iterator[dict]:
    """A row a program, whatever became of it."""
    done = {row["id"]: row for row in record["peers"] if row["status"] == "ok" and "seconds" in row}
    for row in record["peers"]:
        settings = row["settings"]
        line = _facts(record, row) | {"level": options["level"]}
        if row["id"] in done:
            own, memory = Timed(record, row), settings["memory"]
            line |= _times(own, row)
            if AGAINST[memory] in done:
                times, _ = own.cut(Timed(record, done[AGAINST[memory]]))
                line |= {"against": AGAINST[memory]} | speedup(times, **options)
            if EXACT[memory] in done:
                _, losses = own.cut(Timed(record, done[EXACT[memory]]))
                found = percent_change(paired_interval(losses, **options))
                ends = {"delta_percent_low": found.low, "delta_percent_high": found.high}
                line |= {"perplexity_against": EXACT[memory], "delta_percent": found.estimate} | ends
        elif "tokens_per_s" in row:
            line |= {"tokens_per_s": row["tokens_per_s"], "token_s_mean": 1 / row["tokens_per_s"]}
        yield line


def _facts(record: dict, row: dict) -> dict:
    settings = row["settings"]
    facts = {name: record[name] for name in ("model", "size", "experts_bytes", "rehearsal")}
    facts |= {"host": record["host"]["id"], "fingerprint": record["host"]["fingerprint"], "peer": row["id"]}
    facts |= {name: settings[name] for name in ("program", "memory", "policy", "load_mode")}
    facts |= {"slots_percent": settings["slots"], "threads": settings["threads"] or record["threads"]}
    facts["read_ahead_kb"] = settings["read_ahead_kb"] or record["read_ahead_kb"]
    facts["memory_bytes"] = record["memory_bytes"] if settings["memory"] == LIMITED else None
    facts |= {"status": row["status"], "reason": row.get("reason", ""), "peak_bytes": row.get("peak_bytes")}
    return facts


def _times(own: Timed, row: dict) -> dict:
    token_s = np.concatenate([document[1:] for document in own.seconds])
    losses = np.concatenate(own.losses)
    found = {"documents": len(own.seconds), "tokens": len(token_s), "tokens_per_s": 1 / token_s.mean()}
    found |= {"token_s_mean": token_s.mean(), "token_s_median": np.median(token_s)}
    found |= {"token_s_p95": np.percentile(token_s, 95), "token_perplexity": float(np.exp(losses.mean()))}
    read = row["read_bytes"]
    return found | {"read_bytes_per_token": None if read is None else read / len(losses)}


def read_table(path: str | Path) -> pd.DataFrame:
    """peers.csv, checked: flags as booleans, absent numbers NaN; it may be without rows. UserError as of read_words."""
    table = read_words(path, COLUMNS, "the table of peers", rows=False)
    refuse(path, table, ~table["status"].isin(STATUSES), "status", f"one of {', '.join(STATUSES)}")
    refuse(path, table, ~table["memory"].isin(AGAINST), "memory", f"one of {', '.join(AGAINST)}")
    refuse(path, table, table.duplicated(["host", "model", "peer"]), "peer", "one row a program")
    to_flags(path, table, "rehearsal")
    for name in NUMBERS:
        to_numbers(path, table, name, needed=(table["status"] == "ok") & (name == "tokens_per_s"))
    return table


def documents(record: dict) -> Iterator[dict]:
    """Of every program under the limit its documents, in the words of a measured host, over the link `limited`."""
    percents = {row["settings"]["slots"] for row in record["peers"] if row["settings"]["memory"] == LIMITED}
    (percent,) = percents - {None} or {None}
    for row in record["peers"]:
        if row["status"] != "ok" or row["settings"]["memory"] != LIMITED:
            continue
        own, counts = Timed(record, row), row["counts"]
        facts = {name: record[name] for name in ("model", "size", "rehearsal")}
        facts |= {"host": record["host"]["id"], "fingerprint": record["host"]["fingerprint"], "link": "limited"}
        facts |= {"link_status": "limited", "policy": row["id"], "slots": f"s{percent}", "slots_percent": percent}
        changed = counts.get("substitutions", 0) + counts.get("drops", 0) > 0
        facts |= {"lossless": not changed, "lossy_without_effect": False, "background_inert": False}
        for (text, topic, name, _), seconds, losses in zip(own.documents, own.seconds, own.losses, strict=True):
            line = facts | {"text": text, "topic": topic, "document": name, "tokens": len(losses)}
            line |= {"timed_tokens": len(seconds) - 1, "time_s": sum(seconds[1:]), "loss_nats": sum(losses)}
            yield {column: line.get(column, 0) for column in DOCUMENT_COLUMNS}
