"""How much work is a configuration? Jobs, node hours that they ask for, bytes that they write, and the longest chain.

    growth = Growth.of("config/paper.yaml")
    growth.jobs["score_policy"], growth.asked_hours, growth.chain

Jobs are those of `snakemake results/all` where nothing is made yet, and of `results/measured/cluster`; a test compares
the former with a dry run. Hours and minutes are what the jobs ask for (engine/cluster.py): limits, not a forecast.
Bytes are of router traces and decision logs, for the texts whose tokens a run recorded; a load is written once, and at
most all K chosen experts of an event are loaded.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from engine.anatomy import Anatomy
from engine.cluster import SMALL_MB, SMALL_MINUTES, Ask, nodes
from engine.errors import error
from engine.host import load_hosts
from engine.host_facts import fingerprint
from engine.model_sheet import Model
from engine.plan_build import BASE, config_of, read_config, read_setting
from engine.plan_counts import FROM_EMPTY

MOVE_BYTES = 24  # of one load in a decision log
# rule: the rules it waits for, of those that are long
HELD = {  # a job a model, which holds it
    "unpack_model": (),
    "fetch_model": (),
    "pack_store": ("unpack_model", "fetch_model"),
    "calibrate_model": ("pack_store",),
    "record_routing": ("pack_store",),
    "train_predictors": ("pack_store",),
    "gate_model": ("calibrate_model",),
    "run_experiment_b": ("calibrate_model",),
    "run_tasks": ("calibrate_model",),
    "score_policy": ("calibrate_model", "record_routing"),
    "score_sweep": ("calibrate_model",),
    "predict_experts": ("train_predictors", "score_policy"),
    "score_delayed": ("simulate_host",),
}
SMALL = {  # a job that holds none
    "resolve_text": (),
    "resolve_task": (),
    "probe_host": (),
    "simulate_host": ("predict_experts", "probe_host"),
    "tabulate": ("score_delayed",),  # every table
    "claims": ("tabulate",),  # what follows from them
    "plot_figure": ("claims",),
    "index_results": ("plot_figure",),
}
MEASURED = ("measure_host", "rescore_runs")
TABLES, PAGES = 10, 4  # rules: tables; claims, answer, provenance, pages


@dataclass(frozen=True)
class Growth:
    """hours: by kind of node. chain: the rules one after the other, and the minutes they ask for."""

    jobs: dict[str, int]
    asked_hours: dict[str, float]
    trace_bytes: int
    decision_bytes: int
    unknown_texts: tuple[str, ...]
    chain: tuple[str, ...]
    chain_minutes: int

    @classmethod
    def of(cls, path: str | Path, figures: int, tables: str, base: str | Path = BASE) -> Growth:
        """tables: of a run, for the tokens of texts. figures: scripts that draw one each."""
        setting, config = read_setting(path, base), read_config(path, base)
        own = load_hosts(config["hosts"])
        hosts = len(own) + all(host.fingerprint != fingerprint() for host in own.values())  # or `local`
        models = list(setting.models.values())
        policies = [name for name, policy in setting.policies.items() if not policy.prefetch]
        texts = [*config["texts"]["calibration"], *config["texts"]["test"]]
        measured = [model for model in models if model.id in config["measure"]["models"]]
        on_nodes = nodes({name: Path(config["hosts"]) / f"{name}.yaml" for name in own})

        jobs = Counter(
            resolve_text=len(texts),
            resolve_task=len(config["tasks"]["ids"]),
            probe_host=int(hosts > len(own)),
            tabulate=TABLES,
            claims=PAGES,
            plot_figure=figures,
            index_results=1,
            simulate_host=len(models) * hosts,
        )
        hours: Counter[str] = Counter()
        for model in models:
            for rule in HELD:
                count = _count(rule, model, len(policies))
                jobs[rule] += count
                hours[_node(model)] += count * Ask.of(model).runtime / 60
        hours[f"{SMALL_MB / 1e3:g} GB"] += sum(jobs[rule] for rule in SMALL) * SMALL_MINUTES / 60
        for name in on_nodes:
            for model in measured:
                sizes = 1 + bool(model.timed_width or model.timed_expert_width)
                jobs.update(dict.fromkeys(MEASURED, sizes))
                hours[f"host {name}"] += sizes * Ask.of(model).runtime / 60
                hours[_node(model)] += sizes * Ask.of(model).runtime / 60  # scored again
        tokens, unknown = _tokens(tables, config["texts"]["test"])
        trace_bytes = decision_bytes = 0
        for model in models:
            anatomy = Anatomy.of_config(config_of(model).config, model.dtype)
            events, k = tokens * anatomy.layers, anatomy.top_k
            trace_bytes += events * (4 * anatomy.experts + 10 * k) + 4 * tokens
            decision_bytes += events * (11 * k + 1 + MOVE_BYTES * k) * len(policies) * len(config["slots"])
        chain, minutes = _longest(max(Ask.of(model).runtime for model in models), jobs)
        return cls(dict(jobs), dict(hours), trace_bytes, decision_bytes, unknown, chain, minutes)

    @property
    def page(self) -> str:
        lines = ["Jobs", *(f"  {rule:<18}{count:>8,}" for rule, count in self.jobs.items() if count)]
        lines += [f"  {'all':<18}{sum(self.jobs.values()):>8,}", "", "Node hours asked for, limits and not a forecast"]
        lines += [f"  {kind:<18}{hours:>8,.0f}" for kind, hours in self.asked_hours.items()]
        lines += ["", "Written, at most", f"  {'router traces':<18}{self.trace_bytes / 1e9:>8.1f} GB"]
        lines += [f"  {'decision logs':<18}{self.decision_bytes / 1e9:>8.1f} GB"]
        if self.unknown_texts:
            lines.append(f"  without {', '.join(self.unknown_texts)}, whose tokens no run recorded")
        chain = " > ".join(self.chain)
        return "\n".join(
            [*lines, "", f"One after the other, at most {self.chain_minutes / 60:.0f} hours", f"  {chain}"]
        )


def _node(model: Model) -> str:
    return f"{Ask.of(model).mem_mb / 1e3:.0f} GB"


def _count(rule: str, model: Model, policies: int) -> int:
    special = {
        "fetch_model": int(bool(model.revision)),
        "pack_store": int(bool(model.bits)),
        "score_policy": policies,
        "unpack_model": int(model.packed),
    }
    return special.get(rule, 1)


def _tokens(tables: str, texts: list[str]) -> tuple[int, tuple[str, ...]]:
    """Of the test texts together, as a run counted them, and those that it did not."""
    try:
        with (Path(tables) / "quality.csv").open(encoding="utf-8", newline="") as file:
            found = {row["text"]: int(row["tokens"]) for row in csv.DictReader(file) if row["tokens"]}
    except OSError as exc:
        raise error(f"{tables}/quality.csv: {exc.strerror}", "tables of a run", FROM_EMPTY) from None
    return sum(found.get(text, 0) for text in texts), tuple(text for text in texts if text not in found)


def _longest(minutes: int, jobs: Counter[str]) -> tuple[tuple[str, ...], int]:
    """The chain of rules that takes longest, if no job ever waits for a node."""
    rules = HELD | SMALL
    best: dict[str, tuple[tuple[str, ...], int]] = {}

    def to(rule: str) -> tuple[tuple[str, ...], int]:
        if rule not in best:
            names, before = max(map(to, rules[rule]), key=lambda found: found[1], default=((), 0))
            own = (minutes if rule in HELD else SMALL_MINUTES) if jobs[rule] else 0
            best[rule] = (*names, rule) if own else names, before + own
        return best[rule]

    return to("index_results")
