"""Seconds and counts of one policy over the passages of one text on one host: by the engine, and by the simulator.

Both come from the same record (engine/measured_run.py). The engine's are its runs, whose logs the emulator has scored;
the simulator replays the recorded routing of the very same tokens with the host's own profile, frozen before the runs.
What knows the future cannot run, so the bounds are the simulator's alone.

    host = MeasuredHost.open("results/measured/local", traces={"reference": "results/traces/reference"})
    for size in host.sizes:
        size.engine("disk", "rule_015", "s25", "bible_test"), size.simulator("disk", "rule_015", "s25", "bible_test")
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import yaml

from engine.demand import load_demand
from engine.errors import UserError, error
from engine.files import sha256
from engine.geometry import Geometry
from engine.host import parse_host
from engine.host_times import Host, Link
from engine.log import count
from engine.measured_run import (
    DEMAND,
    PROFILE,
    Run,
    cell_of,
    check_rates,
    load_run,
    policy_of,
    read_rescored,
    records,
)
from engine.policies import BASELINE, Policy
from engine.predictions import from_trace
from engine.simulator import simulate
from engine.timing import Timing, limit_bytes_per_s
from engine.trace_file import open_trace
from evals.corpora import cluster
from evals.quality import CELL_FAILURES
from evals.records import load_arrays
from evals.simulation import Loaded, Predicted, Said, load_parts

COUNTS = ("events", "hits", "fetches", "substitutions", "drops")
MASSES = ("substituted_mass", "dropped_mass")  # means over events
BOUNDS = {  # the baseline with one part that knows the future, named as in the sheets
    "fetch_belady": {"eviction": "belady", "half_life_tokens": None},
    "prefetch_oracle": {"prefetch": "oracle", "schedule": "pieces"},
}


class Absent(Exception):
    """There is no such series: the reason."""


@dataclass(frozen=True)
class Series:
    """R runs of one policy over the T tokens of the passages of one text."""

    text: str
    topic: str
    documents: list[tuple[str, int]]  # cluster and tokens of every passage
    token_s: np.ndarray  # [R, T]
    stall_s: np.ndarray  # [R, T]
    counts: dict[str, float]  # of all runs together
    foreground_bytes: float  # of all runs together
    background_bytes: float
    losses: np.ndarray | None = None  # [T], mean over the runs that were scored
    scored: dict[str, tuple[int, int]] = field(default_factory=dict)  # by decisions: events, those decided otherwise
    largest_loss_difference: float = math.nan  # of the engine's own losses to the emulator's
    failed_loads: int = 0
    other_cores: float = math.nan  # that other work on the machine kept busy, in the mean
    reason: str = ""  # what is wrong with other runs of the cell, or why there are no losses
    outputs: dict[int, np.ndarray] = field(default_factory=dict)  # by repeat: [T, bytes], what every token came to

    @property
    def later(self) -> np.ndarray:
        """[T] bool: all but the first token of every document."""
        mask = np.ones(self.token_s.shape[1], bool)
        mask[np.cumsum([0, *(tokens for _, tokens in self.documents)])[:-1]] = False
        return mask


def output_of(run: Run) -> np.ndarray:
    """[T, bytes] uint8: loss, executed experts and combine weights of every token, bit by bit."""
    arrays = (run.losses, run.log.executed, run.log.weights)
    tokens = len(run.losses)
    return np.hstack([np.ascontiguousarray(array).reshape(tokens, -1).view(np.uint8) for array in arrays])


def identical(one: Series, other: Series) -> np.ndarray:
    """[R, T] bool: tokens that came to the same, in every repeat that both have."""
    pairs = [(output, other.outputs[repeat]) for repeat, output in one.outputs.items() if repeat in other.outputs]
    same = [(a == b).all(axis=1) if a.shape == b.shape else np.zeros(len(a), bool) for a, b in pairs]
    return np.array(same, bool).reshape(len(pairs), one.token_s.shape[1])


def add_up(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Counts of several logs as of one: every event weighs the same."""
    total = {name: sum(one[name] for one in counts) for name in COUNTS}
    masses = {name: sum(one[name] * one["events"] for one in counts) / total["events"] for name in MASSES}
    return total | masses


# ---- a host ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class MeasuredHost:
    """The folder of a host: its frozen profile, and a record for every model and size."""

    folder: Path
    profile: Host
    sizes: list[MeasuredSize]

    @classmethod
    def open(
        cls, folder: str | Path, traces: Mapping[str, str | Path], predictions: Mapping[str, str | Path] | None = None
    ) -> MeasuredHost:
        """By model, the folders of its recorded routing and of what predictors say. UserError: another profile."""
        folder = Path(folder)
        path = folder / PROFILE
        profile = parse_host(yaml.safe_load(path.read_text(encoding="utf-8")), path, name=folder.name)
        sizes = []
        for record in records(folder):
            held = record["host"]["fingerprint"], record["provenance"]["host_sha256"]
            if held != (profile.fingerprint, sha256(path)):
                found = f"{folder}: {record['model']} {record['size']} was measured with another profile"
                raise error(found, f"the {PROFILE} of the folder", "restore it, or move the folder away")
            model = record["model"]
            sizes.append(MeasuredSize(folder, profile, record, traces.get(model), (predictions or {}).get(model)))
        return cls(folder, profile, sizes)


@dataclass(frozen=True)
class MeasuredSize:
    """One model at one size on one host."""

    folder: Path
    profile: Host
    record: dict
    traces: str | Path | None
    predictions: str | Path | None = None

    @property
    def bounds(self) -> dict[str, Policy]:
        """By id; none where the baseline was not measured."""
        if BASELINE not in self.record["policies"]:
            return {}
        baseline = policy_of(self.record, BASELINE)
        return {name: replace(baseline, id=name, **parts) for name, parts in BOUNDS.items()}

    def policy(self, name: str) -> Policy:
        return self.bounds[name] if name in BOUNDS else policy_of(self.record, name)

    # ---- engine ------------------------------------------------------------------------------------------------------
    def engine(self, link: str, policy: str, slots: str, text: str) -> Series:
        """All its runs that are sound. Absent where there is none, with the reasons."""
        wanted = {"link": link, "policy": policy, "slots": slots, "text": text}
        rows = [row for row in self.record["cells"] if {name: row[name] for name in wanted} == wanted]
        reasons = [row["reason"] for row in rows if row["status"] != "ok"]
        runs, losses, scored, gaps = [], [], {}, [math.nan]
        for row in (row for row in rows if row["status"] == "ok"):
            cell = cell_of(self.record, row)
            path = cell.path(self.folder)
            try:
                if not path.is_file() or sha256(path) != row["sha256"]:
                    raise error(f"{path} is not the run of the record", row["sha256"][:16], "measure it again")
                run = load_run(path)
                check_rates(self.profile.link(link), run.journal, str(path))
            except UserError as exc:
                reasons.append(" ".join(str(exc).split()))
                continue
            runs.append((run, row))
            found = self._rescored.get(cell.name)
            if found is None or found["status"] != "ok":
                reasons.append(f"not scored: {found['reason'] if found else self._why_not_scored}")
                continue
            losses.append(self._losses[cell.name])
            scored[found["log"]] = found["events"], found["differences"]
            gaps.append(found["largest_loss_difference"])
        if not runs:
            planned = self.record["links"].get(link, {}).get("repeats", 0)
            raise Absent("; ".join(dict.fromkeys(reasons)) or f"none of {planned} runs was taken")
        return Series(
            text,
            self.record["texts"][text]["topic"],
            self.documents(link, text),
            np.stack([run.token_s for run, _ in runs]),
            np.stack([run.stall_s for run, _ in runs]),
            add_up([count(run.log) for run, _ in runs]),
            sum(run.bytes(True) for run, _ in runs),
            sum(run.bytes(False) for run, _ in runs),
            np.mean(losses, axis=0, dtype=np.float64) if losses else None,
            scored,
            float(np.nanmax(gaps)) if len(gaps) > 1 else math.nan,
            sum(len(row["failed_loads"]) for _, row in runs),
            float(np.mean([row.get("other_cores", math.nan) for _, row in runs])),
            "; ".join(dict.fromkeys(reasons)),
            {row["repeat"]: output_of(run) for run, row in runs},
        )

    def documents(self, link: str, text: str) -> list[tuple[str, int]]:
        return [(cluster(name), tokens) for name, _, tokens in self.record["passages"][link][text]]

    @functools.cached_property
    def _scores(self) -> tuple[Path, dict | None, str]:
        """(losses, what the emulator found, why that cannot be used)."""
        path, found = read_rescored(self.folder, self.record)
        if found is None:
            return path, None, f"{path.stem}.json is not there yet"
        of_record = self.folder / self.record["model"] / f"{self.record['size']}.json"
        if found["provenance"]["record_sha256"] != sha256(of_record):
            return path, None, f"{path.stem}.json is of another record"
        if not path.is_file() or found["provenance"]["losses_sha256"] != sha256(path):
            return path, None, f"{path.name} is not what {path.stem}.json describes"
        return path, found, ""

    @property
    def _why_not_scored(self) -> str:
        return self._scores[2] or "it is not among the scored runs"

    @functools.cached_property
    def _rescored(self) -> dict[str, dict]:
        """By name of a cell."""
        found = self._scores[1]
        return {cell_of(self.record, row).name: row for row in found["cells"]} if found else {}

    @functools.cached_property
    def _losses(self) -> dict[str, np.ndarray]:
        return load_arrays(self._scores[0]) if self._scores[1] else {}

    # ---- simulator ---------------------------------------------------------------------------------------------------
    def simulator(self, link: str, policy: str, slots: str, text: str) -> Series:
        """The same tokens, modelled. Absent where the routing is not here, or the model's parts have no price."""
        record = self.record
        if record["geometry"] is None:
            raise Absent("the sizes of this family are not modelled (engine/geometry.py)")
        if link not in self.profile.links:
            raise Absent(f"the profile has no link {link}")
        trace = self._trace(link, text)
        geometry = Geometry(**record["geometry"])
        row, slots_count = self.policy(policy), record["slots"][slots]["count"]
        try:
            timing = Timing.of(self.profile, link, geometry, slots_count, context_tokens=self.context_tokens(link))
            found = simulate(trace, row, timing, demand=self._demand, named=self._named(row, link, text))
        except CELL_FAILURES as exc:
            raise Absent(f"{type(exc).__name__}: {' '.join(str(exc).split())}") from None
        foreground, counts = float(found.foreground.sum()), found.summary()
        return Series(
            text,
            record["texts"][text]["topic"],
            self.documents(link, text),
            found.token_s[None],
            found.stall_s[None],
            add_up([counts]),
            foreground * timing.expert_bytes,
            found.bytes - (found.waiting + foreground + found.prefetched[0]) * timing.expert_bytes,
        )

    def context_tokens(self, link: str) -> int:
        """Keys and values that a token finds in the mean: documents are decoded from their beginning."""
        tokens = [n for parts in self.record["passages"][link].values() for _, _, n in parts]
        return round(sum(n * (n + 1) / 2 for n in tokens) / sum(tokens))

    @functools.cached_property
    def _demand(self):
        return load_demand(self.folder / self.record["model"] / DEMAND)

    @functools.cached_property
    def _traces(self) -> dict[tuple[str, str], Loaded]:
        return {}

    def _trace(self, link: str, text: str) -> Loaded:
        key = link, text
        if key not in self._traces:
            wanted = self.record["provenance"]["model"], self.record["texts"][text]["sha256"]
            path = Path(self.traces) / f"{text}.safetensors" if self.traces else None
            if path is None or not path.is_file():
                raise Absent(f"no recorded routing of {self.record['model']} over {text} here")
            trace = open_trace(path)
            if (trace.provenance.get("model_hash"), trace.provenance.get("text_sha256")) != wanted:
                raise Absent(f"the routing recorded here is of other weights or of another text than {text} there")
            rows = [range(first, first + n) for _, first, n in self.record["passages"][link][text]]
            try:
                self._traces[key] = load_parts(trace, rows)
            except UserError as exc:
                raise Absent(" ".join(str(exc).split())) from None
        return self._traces[key]

    def _named(self, policy: Policy, link: str, text: str) -> Said | None:
        """What the policy's predictor says of the tokens that were timed."""
        if not policy.prefetch:
            return None
        trace = self._trace(link, text)
        if policy.prefetch == "oracle":
            return Said(*from_trace(trace.whole.chosen, trace.whole.chosen_scores, trace.top_k))
        if self.predictions is None:
            raise Absent(f"no predictions of {self.record['model']} here")
        key = policy.prefetch, text
        if key not in self._said:  # whole texts: every link and policy asks for parts of the same file
            self._said[key] = Predicted(self.predictions, [trace])(*key)
        rows = [range(first, first + n) for _, first, n in self.record["passages"][link][text]]
        return self._said[key].parts(rows)

    @functools.cached_property
    def _said(self) -> dict[tuple[str, str], Said]:
        return {}

    # ---- physical limits ---------------------------------------------------------------------------------------------
    def bandwidth_bytes_per_s(self, link: str) -> float:
        """The best rate at which the profile has seen records of this size come in."""
        time, size = self.profile.link(link).time, self.record["record_bytes"]
        return max(n * size / time.total_s(size, n) for n in range(1, self.record["top_k"] + 1))

    def limit_bytes_per_s(self, link: str) -> float:
        return limit_bytes_per_s(self.profile, link)

    def link(self, name: str) -> Link:
        return self.profile.link(name)

    def memory_bytes_per_s(self) -> float:
        """The best rate of the profile: a copy reads and writes, an expert that is computed is read."""
        rates = [part["experts"].peak_bytes_per_s for part in self.profile.device.times.values()]
        rates += [2 * link.time.peak_bytes_per_s for link in self.profile.links.values() if link.kind == "memory"]
        return max(rates)

    def computed_bytes(self, link: str, drops_per_token: float) -> float | None:
        """Weights that a token reads: the experts it runs and all else; None without a geometry."""
        if self.record["geometry"] is None:
            return None
        g = Geometry(**self.record["geometry"])
        dense = g.dense_bytes + self.context_tokens(link) * g.kv_bytes
        return g.layers * (g.top_k * g.expert_bytes + dense) + g.head_bytes - drops_per_token * g.expert_bytes
