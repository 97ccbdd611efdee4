"""How much work is a configuration? Jobs, node hours that they ask for, bytes that they write, and the longest chain.

    growth = Growth.of("config/paper.yaml", figures=15, tables="results/published/tables")
    growth.jobs["score_policy"], growth.asked_hours, growth.chain

Jobs are those of `snakemake results/measured/cluster`, where a profile names its node, and after it of `results/all`,
where nothing is made yet; a test compares both, and the hours, with a dry run. Hours are what jobs ask for at their
first attempt (engine/cluster.py): limits, not a forecast. What runs where the run was started asks for none. Bytes are
of router traces and decision logs (engine/plan_texts.py counts tokens); a load is written once, and at most all K
chosen experts of an event are loaded.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.anatomy import Anatomy
from engine.cluster import SMALL_MB, SMALL_MINUTES, Ask, nodes
from engine.host import load_hosts
from engine.host_facts import fingerprint
from engine.measured_run import OWN, size_of
from engine.model_sheet import Model
from engine.plan_build import BASE, config_of, read_config, read_setting
from engine.plan_texts import RESOLVED, Texts

MOVE_BYTES = 24  # of one load in a decision log
SUBMITTING = {  # rules that run where the run was started: `localrules` of the Snakefile
    *("fetch_model", "index_results", "plot_figure", "resolve_task", "resolve_text", "write_pages", "write_provenance")
}
STORE = "pack_store of a size"  # that is timed; a model in bits is read from its store by every job
WAITS = {  # step: those it waits for, of those that are long
    "fetch_model": (),
    "unpack_model": (),
    "inflate_model": ("unpack_model", "fetch_model"),
    "pack_store": ("unpack_model", "fetch_model"),
    STORE: ("inflate_model",),
    "calibrate_model": ("pack_store",),
    "record_routing": ("pack_store",),
    "train_predictors": ("pack_store",),
    "measure_host": (STORE, "calibrate_model", "train_predictors"),
    "rescore_runs": ("measure_host",),
    "gate_model": ("calibrate_model",),
    "run_experiment_b": ("calibrate_model",),
    "run_tasks": ("calibrate_model",),
    "score_policy": ("calibrate_model", "record_routing"),
    "score_sweep": ("calibrate_model",),
    "predict_experts": ("train_predictors", "score_policy"),
    "simulate_host": ("predict_experts",),
    "score_delayed": ("simulate_host",),
    "tabulate": ("score_delayed", "gate_model", "run_experiment_b", "run_tasks", "score_sweep"),  # every table
    "claims": ("tabulate",),  # and the answer
    "index_results": ("claims",),
}
OF_MODEL = (  # one job a model, which holds it
    *("calibrate_model", "record_routing", "train_predictors", "gate_model", "run_experiment_b", "run_tasks"),
    *("score_sweep", "predict_experts", "score_delayed"),
)
BEFORE_TIMED = ("calibrate_model", "train_predictors")
SMALL = Ask(SMALL_MB, SMALL_MINUTES)
TABLES, CLAIMS = 10, 2  # rules: tables; claims, answer


@dataclass(frozen=True)
class Job:
    """of: what tells it from others of its rule. node: the kind it asks for, or none; minutes: its limit there."""

    rule: str
    of: str = ""
    node: str = ""
    minutes: int = 0
    step: str = ""  # of WAITS, where it is not the rule


@dataclass(frozen=True)
class Growth:
    """asked_hours: by kind of node. chain: the rules one after the other, and the minutes they ask for."""

    jobs: dict[str, int]
    asked_hours: dict[str, float]
    trace_bytes_a_token: int
    decision_bytes_a_token: int
    texts: Texts
    resolve: str  # the command that resolves unknown texts, or nothing
    chain: tuple[str, ...]
    chain_minutes: int

    @classmethod
    def of(
        cls, path: str | Path, figures: int, tables: str, base: str | Path = BASE, resolved: str | Path = RESOLVED
    ) -> Growth:
        """tables: of a run, resolved: texts, for tokens. figures: scripts that draw one each."""
        setting, config = read_setting(path, base), read_config(path, base)
        models = list(setting.models.values())
        policies = [name for name, policy in setting.policies.items() if not policy.prefetch]
        first, second = list(_cluster_jobs(models, config)), list(_all_jobs(models, policies, config, figures))
        every = list(dict.fromkeys([*first, *second]))
        minutes: Counter[str] = Counter()
        for job in every:
            minutes[job.node] += job.minutes
        trace = decisions = 0
        for model in models:
            anatomy = Anatomy.of_config(config_of(model).config, model.dtype)
            k = anatomy.top_k
            trace += anatomy.layers * (4 * anatomy.experts + 10 * k) + 4
            decisions += anatomy.layers * (11 * k + 1 + MOVE_BYTES * k) * len(policies) * len(config["slots"])
        texts = Texts.of(config["texts"]["test"], tables, resolved)
        done = set(first)
        # the second run begins after the first has ended
        chains = [_longest(first), _longest([job for job in every if job not in done])]
        return cls(
            jobs=dict(Counter(job.rule for job in every)),
            asked_hours={node: asked / 60 for node, asked in minutes.items() if node},
            trace_bytes_a_token=trace,
            decision_bytes_a_token=decisions,
            texts=texts,
            resolve=_command(texts.of_kind("unknown"), path, base),
            chain=tuple(name for names, _ in chains for name in names),
            chain_minutes=sum(asked for _, asked in chains),
        )

    @property
    def trace_bytes(self) -> int | None:
        """Of the texts whose tokens are known; None where none are."""
        return None if self.texts.tokens is None else self.texts.tokens * self.trace_bytes_a_token

    @property
    def decision_bytes(self) -> int | None:
        return None if self.texts.tokens is None else self.texts.tokens * self.decision_bytes_a_token


def _cluster_jobs(models: list[Model], config: dict) -> Iterator[Job]:
    """Of results/measured/cluster; none where no profile names its node, or nothing is measured."""
    measure = config["measure"]
    measured = [model for model in models if model.id in measure["models"]]
    names = nodes({name: Path(config["hosts"]) / f"{name}.yaml" for name in load_hosts(config["hosts"])})
    if not names or not set(measure["slots"]) & set(config["slots"]):
        return
    for model in measured:
        yield from (_job("resolve_text", text) for role in config["texts"].values() for text in role)
        yield from _made(model)
        yield from (_job(rule, model.id, Ask.of(model)) for rule in BEFORE_TIMED)
        for size in dict.fromkeys((OWN, size_of(model.timed_width, model.timed_expert_width))):
            of, ask = f"{model.id}/{size}", Ask.of(model, size=size)
            if size != OWN:
                yield _job("inflate_model", of, ask)
            if size != OWN or not model.bits:
                yield _job("pack_store", of, ask, step=STORE)
            for name in names:
                yield _job("measure_host", f"{name}/{of}", ask, f"host {name}")
                yield _job("rescore_runs", f"{name}/{of}", ask)


def _all_jobs(models: list[Model], policies: list[str], config: dict, figures: int) -> Iterator[Job]:
    """Of results/all."""
    own = load_hosts(config["hosts"])
    unknown = all(host.fingerprint != fingerprint() for host in own.values())  # this machine, which is `local` then
    yield from (_job("resolve_text", text) for role in config["texts"].values() for text in role)
    yield from (_job("resolve_task", task) for task in config["tasks"]["ids"])
    if unknown:
        yield _job("probe_host")
    for model in models:
        yield from _made(model)
        yield from (_job(rule, model.id, Ask.of(model)) for rule in OF_MODEL)
        yield from (_job("score_policy", f"{model.id}/{policy}", Ask.of(model)) for policy in policies)
        yield from (_job("simulate_host", f"{model.id}/{number}") for number in range(len(own) + unknown))
    yield from (_job("tabulate", str(number)) for number in range(TABLES))
    yield from (_job("claims", str(number)) for number in range(CLAIMS))
    yield from (_job("plot_figure", str(number)) for number in range(figures))
    yield from map(_job, ("write_pages", "write_provenance", "index_results"))


def _made(model: Model) -> Iterator[Job]:
    """Before a model can be held."""
    for rule, wanted in (("unpack_model", model.packed), ("fetch_model", model.revision), ("pack_store", model.bits)):
        if wanted:
            yield _job(rule, model.id, Ask.of(model))


def _job(rule: str, of: str = "", ask: Ask = SMALL, node: str = "", step: str = "") -> Job:
    if rule in SUBMITTING:
        return Job(rule, of)
    return Job(rule, of, node or f"{ask.mem_mb / 1e3:.0f} GB", ask.runtime, step)


def _longest(jobs: list[Job]) -> tuple[tuple[str, ...], int]:
    """The chain of rules that asks for most minutes, if no job ever waits for a node."""
    asked: dict[str, tuple[str, int]] = {}  # by step: its rule, and the longest limit of a job
    for job in jobs:
        step = job.step or job.rule
        asked[step] = (job.rule, max(job.minutes, asked.get(step, ("", 0))[1]))
    best: dict[str, tuple[tuple[str, ...], int]] = {}
    for step, before in WAITS.items():  # those it waits for stand above it
        chains = [best[name] for name in before]
        names, minutes = max(chains, key=lambda chain: (chain[1], len(chain[0])), default=((), 0))
        if step in asked:
            names, minutes = (*names, asked[step][0]), minutes + asked[step][1]
        best[step] = names, minutes
    return max(best.values(), key=lambda chain: (chain[1], len(chain[0])))


def _command(texts: list[str], path: str | Path, base: str | Path) -> str:
    if not texts:
        return ""
    files = [str(RESOLVED / f"{text}.json") for text in texts]
    overlay = [] if Path(path) == Path(base) else ["--configfile", str(path)]
    return shlex.join(["snakemake", "--cores", "1", *files, *overlay])
