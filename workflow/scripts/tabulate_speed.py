"""From simulated times to tables: speed.csv, a row a (model, policy, slots, host, link, text), and seconds by document.

Times are the simulator's: modelled. Speedup joins on (host, link, model, slots, text): mean time a token of the
baseline over the policy's, its interval over clusters of documents as that of every difference (of its logarithm,
linearised at the estimate). Quality is the emulator's, at the delay that the simulator found for background loads
(rounded up to a power of two, `delay_tokens`); of a lossy policy that prefetches it is that of the very decisions that
were timed, on the first `loss_tokens` of every document. Rows over all texts pool their tokens.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd

from engine.errors import error, main_guard
from engine.files import atomic
from engine.policies import BASELINE
from evals.jobs import Progress
from evals.quality import paired_interval
from evals.records import is_rehearsal, load_arrays, load_scored
from evals.simulation import delay_of, scored_under
from evals.speedup import speedup
from evals.stats import percent_change
from evals.stream import beginnings

COLUMNS = [
    *("model", "policy", "miss_rule", "eviction", "beta", "prefetch", "schedule", "lossless", "slots"),
    *("slots_percent", "slots_count", "prefetched_per_token", "taken_per_token", "loss_tokens"),
    *("experts", "rehearsal", "host", "host_status", "link", "link_kind", "link_status", "text", "topic", "tokens"),
    *("documents", "token_s_mean", "token_s_median", "token_s_p95", "first_token_s", "compute_s_mean"),
    *("stall_s_mean", "bytes_per_token", "miss_rate", "delay_tokens_median", "delay_tokens_p90", "delay_tokens"),
    *("speedup", "speedup_low", "speedup_high", "ceiling_token_s", "limit_token_s", "delta_percent"),
    *("delta_percent_low", "delta_percent_high", "expert_bytes", "width", "expert_width", "dtype", "instrument"),
    *("level", "status", "reason"),
]
NO_DELAYED = {"tokens": 0, "losses": {}}
DOCUMENT_COLUMNS = ["model", "policy", "slots", "host", "link", "text", "document", "tokens", "time_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulations", nargs="+", required=True, help="results/simulation/<model>/<host>.json")
    parser.add_argument("--records", nargs="+", required=True, help="results/quality/<model>/<policy>/perplexity.json")
    parser.add_argument("--delayed", nargs="*", default=[], help="results/delayed/<model>.json")
    parser.add_argument("--level", type=float, default=0.95)
    parser.add_argument("--replicates", type=int, default=9999)
    parser.add_argument("--seed", type=int, default=20512)
    parser.add_argument("--out", required=True, help="speed.csv")
    parser.add_argument("--out-documents", required=True, help="seconds by document")
    a = parser.parse_args()
    options = {"level": a.level, "replicates": a.replicates, "seed": a.seed}
    scored = load_scored(a.records)
    delayed = {found["model"]: found for found in map(read_delayed, a.delayed)}
    simulations = [read_simulation(path) for path in a.simulations]
    progress = Progress("tabulate speed", sum(len(record["cells"]) for record, _ in simulations), "cells")
    rows, documents = [], []
    for record, times in simulations:
        model = record["model"]
        for link in dict.fromkeys(cell["link"] for cell in record["cells"]):
            cells = [cell for cell in record["cells"] if cell["link"] == link]
            one = OneLink(record, times, scored[model], delayed.get(model, NO_DELAYED), cells, options)
            rows += one.rows(progress)
            documents += one.documents()
    for path, columns, lines in ((a.out, COLUMNS, rows), (a.out_documents, DOCUMENT_COLUMNS, documents)):
        with atomic(path) as temporary:
            table = pd.DataFrame(lines, columns=columns)
            table.to_csv(temporary, index=False, float_format="%.8g", lineterminator="\n")


def read_simulation(path: str) -> tuple[dict, dict[str, np.ndarray]]:
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    return record, load_arrays(Path(path).with_suffix(".safetensors"))


def read_delayed(path: str) -> dict:
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    return record | {"losses": load_arrays(Path(path).with_suffix(".safetensors"))}


# ---- one link of one host under one model ----------------------------------------------------------------------------
class OneLink:
    """Cells of one (model, host, link), joined with the losses of the same tokens."""

    def __init__(self, record, times, scored, delayed, cells, options) -> None:
        self.record, self.times, self.scored, self.delayed, self.options = record, times, scored, delayed, options
        if BASELINE not in scored:
            found, expected = f"{record['model']}: no record of {BASELINE}", "the baseline among the records"
            raise error(found, expected, "score it: speedups and losses are against it")
        self.baseline = scored[BASELINE]
        quality = self.baseline.record
        self.clusters = quality["clusters"]
        topics = {cell["text"]: cell["topic"] for cell in quality["cells"]}
        self.cells = [cell | {"topic": topics[cell["text"]]} for cell in cells]
        self.facts = {
            "model": record["model"],
            "experts": quality["experts"],
            "rehearsal": is_rehearsal(quality),
            "host": record["host"]["id"],
            "host_status": record["host"]["status"],
            "instrument": record["instrument"],
            "level": options["level"],
            **{name: record["geometry"].get(name) for name in ("expert_bytes", "width", "expert_width", "dtype")},
        }

    def rows(self, progress: Progress) -> list[dict]:
        """A row a cell, and one over all texts where every text has a time."""
        rows = []
        for policy, slots in dict.fromkeys((cell["policy"], cell["slots"]) for cell in self.cells):
            own = [cell for cell in self.cells if (cell["policy"], cell["slots"]) == (policy, slots)]
            delay = self.delay(own)
            rows += [self.row([cell], cell["text"], cell["topic"], delay) for cell in own]
            if all(cell["status"] == "ok" for cell in own):
                rows.append(self.row(own, "all", "all", delay))
            progress.advance(len(own))
        return rows

    def row(self, cells: list[dict], text: str, topic: str, delay: int) -> dict:
        first = cells[0]
        names = ("policy", "slots", "slots_percent", "slots_count", "link", "link_kind", "link_status", "status")
        row = self.facts | {name: first[name] for name in names} | {"text": text, "topic": topic}
        row |= self.record["rows"][first["policy"]] | {"reason": first.get("reason", "")}
        if first["status"] != "ok":
            return row
        token_s, stall_s, delays = (self.joined(cells, part) for part in ("token_s", "stall_s", "delays"))
        tokens = len(token_s)
        demands = sum(cell["hits"] + cell["fetches"] + cell["substitutions"] + cell["drops"] for cell in cells)
        row |= {
            "tokens": tokens,
            "documents": sum(len(self.clusters[cell["text"]]) for cell in cells),
            "token_s_mean": token_s.mean(dtype=np.float64),
            "token_s_median": np.median(token_s),
            "token_s_p95": np.quantile(token_s, 0.95),
            "first_token_s": np.mean([cell["first_token_s"] for cell in cells]),
            "compute_s_mean": (token_s - stall_s).mean(dtype=np.float64),
            "stall_s_mean": stall_s.mean(dtype=np.float64),
            "bytes_per_token": sum(cell["bytes"] for cell in cells) / tokens,
            "miss_rate": 1 - sum(cell["hits"] for cell in cells) / demands,
            "ceiling_token_s": sum(cell["ceiling_token_s"] * cell["tokens"] for cell in cells) / tokens,
            "limit_token_s": sum(cell["limit_token_s"] * cell["tokens"] for cell in cells) / tokens,
            "delay_tokens": delay if row["beta"] is not None else None,
        }
        if row["prefetch"]:
            row |= {
                "prefetched_per_token": sum(cell["prefetched"] for cell in cells) / tokens,
                "taken_per_token": sum(cell["prefetched_taken"] for cell in cells) / tokens,
            }
        if len(delays):
            row |= {"delay_tokens_median": np.median(delays), "delay_tokens_p90": np.quantile(delays, 0.9)}
        row |= self.speedup(cells)
        return row | self.loss(cells, row, delay)

    def joined(self, cells: list[dict], part: str, policy: str | None = None) -> np.ndarray:
        """One array over the texts of the cells; of another policy on the same texts and slots where it is named."""
        names = [f"{c['link']}/{policy or c['policy']}/{c['slots']}/{c['text']}/{part}" for c in cells]
        return np.concatenate([self.times[name] for name in names])

    def speedup(self, cells: list[dict]) -> dict:
        """Mean time of the baseline over the policy's on the same tokens, with its interval."""
        texts = [cell["text"] for cell in cells]
        failed = [
            cell["text"]
            for cell in self.cells
            if (cell["policy"], cell["slots"]) == (BASELINE, cells[0]["slots"])
            and cell["text"] in texts
            and cell["status"] != "ok"
        ]
        if failed or not any(cell["policy"] == BASELINE for cell in self.cells):
            return {"reason": f"no time of {BASELINE} on {', '.join(failed) or 'this host'}: no speedup"}
        if cells[0]["policy"] == BASELINE:
            return {"speedup": 1.0, "speedup_low": 1.0, "speedup_high": 1.0}
        parts = []
        for cell in cells:
            base, own = self.joined([cell], "token_s", BASELINE), self.joined([cell], "token_s")
            parts.append((cell["topic"], self.clusters[cell["text"]], base, own))
        return speedup(parts, **self.options)

    # ---- quality of the same decisions -------------------------------------------------------------------------------
    def delay(self, cells: list[dict]) -> int:
        """Tokens that a background load takes here, over all texts, as the quality is taken at it."""
        ok = [cell for cell in cells if cell["status"] == "ok"]
        delays = self.joined(ok, "delays") if ok else np.zeros(0)
        return delay_of(delays)

    def loss(self, cells: list[dict], row: dict, delay: int) -> dict:
        if row["lossless"]:
            return {"delta_percent": 0.0, "delta_percent_low": 0.0, "delta_percent_high": 0.0}
        parts = []
        for cell in cells:
            key = f"{cell['slots']}/{cell['text']}"
            base, clusters = self.baseline.losses.get(key), self.clusters[cell["text"]]
            if row["prefetch"]:
                found = self.losses_under(cell)
                if base is not None:
                    base = base[beginnings([tokens for _, tokens in clusters], self.delayed["tokens"])]
                clusters = [(name, min(tokens, self.delayed["tokens"])) for name, tokens in clusters]
            else:
                found = self.losses_of(cell["policy"], key, delay)
            lost = [name for name, losses in ((cell["policy"], found), (BASELINE, base)) if losses is None]
            if lost:
                reason = f"no losses of {' and '.join(lost)} on {cell['text']}: no loss"
                return {"reason": "; ".join(part for part in (row["reason"], reason) if part)}
            parts.append((cell["topic"], clusters, found, base))
        percent = percent_change(paired_interval(parts, **self.options))
        return {
            "delta_percent": percent.estimate,
            "delta_percent_low": percent.low,
            "delta_percent_high": percent.high,
            "loss_tokens": sum(len(found) for _, _, found, _ in parts),
        }

    def losses_under(self, cell: dict) -> np.ndarray | None:
        """Losses [T] under the decisions that this link led to, of the first tokens of every document."""
        named = {name: cell[name] for name in ("link", "policy", "slots", "text")}
        return self.delayed["losses"].get(scored_under(host=self.record["host"]["id"], **named))

    def losses_of(self, policy: str, key: str, delay: int) -> np.ndarray | None:
        """Losses [T] of a policy at that delay, None where it was not scored."""
        scored = self.scored.get(policy)
        if scored is None:
            return None
        if scored.record["policy_row"]["beta"] is None or delay == scored.record["delay_tokens"]:
            return scored.losses.get(key)
        slots, text = key.split("/")
        return self.delayed["losses"].get(scored_under(delay_tokens=delay, policy=policy, slots=slots, text=text))

    def documents(self) -> list[dict]:
        """Seconds of every cluster of documents of every cell."""
        lines = []
        for cell in self.cells:
            if cell["status"] != "ok":
                continue
            token_s = self.joined([cell], "token_s").astype(np.float64)
            clusters = self.clusters[cell["text"]]
            names = np.repeat([name for name, _ in clusters], [n for _, n in clusters])
            found, index = np.unique(names, return_inverse=True)
            seconds, tokens = np.bincount(index, token_s), np.bincount(index)
            facts = {name: cell[name] for name in ("policy", "slots", "link", "text")}
            facts |= {"model": self.record["model"], "host": self.record["host"]["id"]}
            lines += [
                facts | {"document": name, "tokens": int(n), "time_s": s}
                for name, n, s in zip(found, tokens, seconds, strict=True)
            ]
        return lines


if __name__ == "__main__":
    main_guard(main)
