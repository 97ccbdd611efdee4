"""The configuration of a run, read and checked before the first job: config.yaml, its sheets and its schema.

settings = load("config/config.yaml")           # or check(config) of an already parsed mapping
settings.models["reference"].source
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from engine.errors import UserError, error, nearest
from engine.geometry import EXPERTS_KEYS, TOP_K_KEYS
from engine.host import load_hosts
from engine.host_facts import fingerprint
from engine.model_sheet import Model, find_config, load_models
from engine.policies import BASELINE, Policy, load_policies
from engine.residency import slots_from_percent
from engine.schema import Origin, check_schema
from evals.cluster import Submitted
from evals.corpora import available, row_of, table
from evals.peers.sheet import load_sheet
from evals.sandbox import require_opt_in
from evals.task_sheet import Task, load_tasks

SCHEMA = Path(__file__).parent.parent / "workflow" / "schemas" / "config.schema.json"
LOCAL = "local"  # id of the profile that the run makes of its own machine


@dataclass(frozen=True)
class Measure:
    """What `results/measured/<host>` times on this machine."""

    models: tuple[str, ...]  # of this run
    slots: tuple[str, ...]
    prefetch: tuple[str, ...]  # policies of the sheet of those that prefetch
    links: dict[str, tuple[int, int, int]]  # by name of a profile's link: documents a text, tokens each, repeats


@dataclass(frozen=True)
class Peers:
    """What `results/peers` runs on this machine."""

    sheet: str
    models: dict[str, str]  # id: the size it is inflated to, or `own`
    memory_bytes: int
    documents: int
    tokens: int
    timeout_s: float


@dataclass(frozen=True)
class Prefetch:
    """Policies that prefetch: simulated on every host at one budget, and measured."""

    policies: dict[str, Policy]
    slots: str  # id
    tokens: int  # of every document, the first, on which decisions of lossy ones are scored


@dataclass(frozen=True)
class Sweep:
    """Policies that are scored over a stream of changing topics."""

    policies: dict[str, Policy]
    slots: str  # id
    tokens: int  # of every document, the first


@dataclass(frozen=True)
class ExperimentB:
    """Few heavy against many light substitutions."""

    slots: str  # id
    tokens: int  # of every document, the first


@dataclass(frozen=True)
class Tasks:
    """Which tasks of the sheet are asked, of how many problems, and by which policies."""

    tasks: dict[str, Task]
    slots: str  # id
    problems: int | None  # the first of each task, None: all
    new_tokens: int  # where a task has no limit of its own
    generate: tuple[str, ...]  # policies of this run, the baseline among them
    run_code: bool


@dataclass(frozen=True)
class Predictors:
    """How the next layers' experts are foretold."""

    rank: int  # of the adapter
    learning_rate: float
    names: int  # experts named of a layer


@dataclass(frozen=True)
class Settings:
    models: dict[str, Model]
    policies: dict[str, Policy]
    calibration_texts: tuple[str, ...]
    test_texts: tuple[str, ...]
    slots: dict[str, float]  # id: percent of E
    context_tokens: int
    delay_tokens: int
    threads: int
    documents: int | None  # the first documents of each text alone
    statistics: dict[str, float | int]
    hosts: dict[str, Path]  # profiles by id; `local` is this machine's, made by the run
    probe: str  # full | quick | none
    measure: Measure
    peers: Peers
    prefetch: Prefetch
    sweep: Sweep
    experiment_b: ExperimentB
    tasks: Tasks
    predictors: Predictors
    this_host: str  # id of the profile of this machine, a key of hosts


def load(path: str | Path) -> Settings:
    path = Path(path)
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise error(f"{path}: {exc.strerror}", "a configuration", "copy config/config.yaml") from None
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise error(f"{path}: {exc}", "valid YAML in UTF-8", "mend the file") from None
    return check(config, str(path))


def check(
    config: object, where: str | Mapping[str, str] = "config/config.yaml", told: Submitted | None = None
) -> Settings:
    """Validate a parsed configuration and everything it names. UserError names file, key and value.

    where: the file, or the file of every top-level key where several were laid over each other. told: in a job of a
    cluster, by the machine that submitted it.
    """
    where = Origin(where)
    check_schema(config, where, SCHEMA, "config/README.md")
    policies = load_policies(config["policies_sheet"])
    if config["policies"] != "all":
        for name in config["policies"]:
            if name not in policies:
                raise error(
                    f"{where['policies']}: policies names '{name}'",
                    f"ids of {config['policies_sheet']}",
                    nearest(name, policies),
                )
        policies = {name: policies[name] for name in config["policies"]}
    if BASELINE not in policies:
        raise error(
            f"{where['policies']}: policies without {BASELINE}",
            "the baseline among them",
            "add it: losses are paired with it",
        )
    sheet = load_models(config["models_sheet"])
    for name in config["models"]:
        if name not in sheet:
            raise error(
                f"{where['models']}: models names '{name}'", f"ids of {config['models_sheet']}", nearest(name, sheet)
            )
        _check_slots(config["slots"], sheet[name], where["slots"])
    for role in ("calibration", "test"):
        for text in config["texts"][role]:
            if text not in table():
                raise error(
                    f"{where['texts']}: texts.{role} names '{text}'",
                    f"ids of evals/corpora.toml of role {role}",
                    nearest(text, available(role=role)),
                )
            if row_of(text)["role"] != role:
                raise error(
                    f"{where['texts']}: texts.{role} names '{text}', whose role is {row_of(text)['role']}",
                    f"texts of role {role}",
                    "no text is both calibrated and tested on",
                )
    hosts, this_host = find_hosts(config["hosts"], where["hosts"], told.this_host if told else None)
    threads = told.threads if told else usable_cores()
    prefetch = _prefetch(config, where["prefetch"])  # before `measure`, which names policies of its sheet
    return Settings(
        models={name: sheet[name] for name in config["models"]},
        policies=policies,
        calibration_texts=tuple(config["texts"]["calibration"]),
        test_texts=tuple(config["texts"]["test"]),
        slots=dict(config["slots"]),
        context_tokens=int(config["context_tokens"]),  # a schema takes 1024.0 for an integer
        delay_tokens=int(config["delay_tokens"]),
        threads=threads if config["threads"] == "all" else int(config["threads"]),
        documents=int(config["documents"]) if "documents" in config else None,
        statistics={
            "level": config["statistics"]["level"],
            "replicates": int(config["statistics"]["replicates"]),
            "seed": int(config["statistics"]["seed"]),
        },
        hosts=hosts,
        probe=config["probe"],
        measure=_measure(config, sheet, where["measure"]),
        peers=_peers(config, sheet, where["peers"]),
        prefetch=prefetch,
        sweep=_sweep(config, where["sweep"]),
        experiment_b=_experiment_b(config, where["experiment_b"]),
        tasks=_tasks(config, policies, where["tasks"]),
        predictors=_predictors(config),
        this_host=this_host,
    )


def _measure(config: dict, sheet: Mapping[str, Model], where: str) -> Measure:
    """Models and slots that another configuration took out of the run are not measured either."""
    wanted, context = config["measure"], config["context_tokens"]
    for name in wanted["models"]:
        if name not in sheet:
            found = f"{where}: measure.models names '{name}'"
            raise error(found, f"ids of {config['models_sheet']}", nearest(name, sheet))
    prefetching = load_policies(config["prefetch"]["sheet"])
    for name in wanted["prefetch"]:
        if name not in prefetching or prefetching[name].clairvoyant:
            found = f"{where}: measure.prefetch names '{name}'"
            known = {name: policy for name, policy in prefetching.items() if not policy.clairvoyant}
            raise error(found, f"ids of {config['prefetch']['sheet']} that need no future", nearest(name, known))
    for name, link in wanted["links"].items():
        if link["tokens"] > context:
            found = f"{where}: measure.links.{name}.tokens is {link['tokens']}"
            raise error(found, f"at most context_tokens, {context}: the routing is recorded so", "lower it")
    return Measure(
        models=tuple(name for name in wanted["models"] if name in config["models"]),
        slots=tuple(name for name in wanted["slots"] if name in config["slots"]),
        prefetch=tuple(wanted["prefetch"]),
        links={
            name: (int(link["documents"]), int(link["tokens"]), int(link["repeats"]))
            for name, link in wanted["links"].items()
        },
    )


def _peers(config: dict, sheet: Mapping[str, Model], where: str) -> Peers:
    """Models that another configuration took out of the run are not run beside others either."""
    wanted = config["peers"]
    for name in wanted["models"]:
        if name not in sheet:
            found = f"{where}: peers.models names '{name}'"
            raise error(found, f"ids of {config['models_sheet']}", nearest(name, sheet))
    policies = load_policies(config["policies_sheet"]) | load_policies(config["prefetch"]["sheet"])
    for peer in load_sheet(wanted["sheet"]).values():
        if peer.policy and (peer.policy not in policies or policies[peer.policy].clairvoyant):
            known = {name: policy for name, policy in policies.items() if not policy.clairvoyant}
            found = f"{where}: row '{peer.id}' of {wanted['sheet']} has policy '{peer.policy}'"
            raise error(found, "a policy that needs no future", nearest(peer.policy, known))
    return Peers(
        sheet=wanted["sheet"],
        models={name: size for name, size in wanted["models"].items() if name in config["models"]},
        memory_bytes=int(wanted["memory_bytes"]),
        documents=int(wanted["documents"]),
        tokens=int(wanted["tokens"]),
        timeout_s=float(wanted["timeout_s"]),
    )


def _prefetch(config: dict, where: str) -> Prefetch:
    wanted, others = config["prefetch"], load_policies(config["policies_sheet"])
    policies = load_policies(wanted["sheet"])
    for name, policy in policies.items():
        if name in others or not policy.prefetch:
            found = f"{where}: row '{name}' of {wanted['sheet']}"
            what = "an id that is not in it" if name in others else "a predictor in its column prefetch"
            raise error(found, f"{what}, beside {config['policies_sheet']}", "mend the row")
    _check_budget("prefetch", config, where)
    return Prefetch(policies, wanted["slots"], int(wanted["tokens"]))


def _sweep(config: dict, where: str) -> Sweep:
    wanted = config["sweep"]
    policies = load_policies(wanted["sheet"])
    if BASELINE not in policies:
        found = f"{where}: sweep.sheet is {wanted['sheet']}, which has no {BASELINE}"
        raise error(found, "the baseline among its rows", "add it: losses are paired with it")
    _check_budget("sweep", config, where)
    return Sweep(policies, wanted["slots"], int(wanted["tokens"]))


def _experiment_b(config: dict, where: str) -> ExperimentB:
    _check_budget("experiment_b", config, where)
    return ExperimentB(config["experiment_b"]["slots"], int(config["experiment_b"]["tokens"]))


def _check_budget(key: str, config: dict, where: str) -> None:
    """UserError where `<key>.slots` is no name of `slots`."""
    name = config[key]["slots"]
    if name not in config["slots"]:
        raise error(f"{where}: {key}.slots names '{name}'", "one of slots", nearest(name, config["slots"]))


def _limits(ids: list[str], sheet: Mapping[str, Task]) -> dict[str, int]:
    """Tasks with a limit of their own."""
    return {f"new_tokens of task {name}": sheet[name].new_tokens for name in ids if sheet[name].new_tokens}


def _tasks(config: dict, policies: Mapping[str, Policy], where: str) -> Tasks:
    """Policies that another configuration took out of the run do not generate either."""
    wanted, every = config["tasks"], load_policies(config["policies_sheet"])
    sheet = load_tasks(wanted["sheet"])
    for key, ids, known, named in (
        ("ids", wanted["ids"], sheet, wanted["sheet"]),
        ("slots", [wanted["slots"]], config["slots"], "slots"),
        ("generate", wanted["generate"], every, config["policies_sheet"]),
    ):
        for name in ids:
            if name not in known:
                raise error(f"{where}: tasks.{key} names '{name}'", f"ids of {named}", nearest(name, known))
    if BASELINE not in wanted["generate"]:
        found = f"{where}: tasks.generate without {BASELINE}"
        raise error(found, "the baseline among them", "add it: agreement is with what it says")
    for name, limit in {"tasks.new_tokens": wanted["new_tokens"], **_limits(wanted["ids"], sheet)}.items():
        if limit >= config["context_tokens"]:
            found = f"{where}: {name} is {limit:g}"
            raise error(
                found, f"fewer than context_tokens, {config['context_tokens']:g}: a prompt must fit", "lower it"
            )
    for name in wanted["generate"]:
        if every[name].clairvoyant:
            raise error(f"{where}: tasks.generate names '{name}'", "policies that need no future", "leave it out")
    return Tasks(
        tasks={name: sheet[name] for name in wanted["ids"]},
        slots=wanted["slots"],
        problems=None if wanted["problems"] == "all" else int(wanted["problems"]),
        new_tokens=int(wanted["new_tokens"]),
        generate=tuple(name for name in wanted["generate"] if name in policies),
        run_code=require_opt_in(wanted["run_code"]),  # refused here, not after minutes of scoring
    )


def _predictors(config: dict) -> Predictors:
    wanted = config["predictors"]
    return Predictors(int(wanted["rank"]), float(wanted["learning_rate"]), int(wanted["names"]))


def find_hosts(folder: str, where: str, known: str | None = None) -> tuple[dict[str, Path], str]:
    """Every profile of the folder, checked, and this machine's own, unless one of them is; and the id of that one.

    known: that id, where another machine found it.
    """
    if LOCAL in (hosts := load_hosts(folder)):
        raise error(f"{where}: {folder}/{LOCAL}.yaml", f"another id: {LOCAL} is probed by the run", "rename it")
    profiles = {name: Path(folder) / f"{name}.yaml" for name in hosts}
    here = fingerprint()
    this = known or next((name for name, host in hosts.items() if host.fingerprint == here), LOCAL)
    return ({LOCAL: Path("results/hosts") / f"{LOCAL}.yaml"} if this == LOCAL else {}) | profiles, this


def usable_cores() -> int:
    """Cores this process may run on; a job scheduler or container may leave fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_slots(slots: Mapping[str, float], model: Model, where: str) -> None:
    """Refuse S < K before the first job, where the model's config.json is at hand; else its cells fail, one by one."""
    try:
        config = find_config(model).config
        experts = next(config[key] for key in EXPERTS_KEYS if key in config)
        top_k = next(config[key] for key in TOP_K_KEYS if key in config)
    except (AttributeError, StopIteration, TypeError, UserError):
        return  # a hub id, a broken file (loading it says so) or another family
    for name, percent in slots.items():
        count = slots_from_percent(experts, percent)
        if count < top_k:
            raise error(
                f"{where}: slots.{name} is {percent:g} %, {count} of the {experts} experts of model {model.id}",
                f"at least K = {top_k} ({math.ceil(1000 * top_k / experts) / 10:g} %): one event must fit",
                "raise it",
            )
