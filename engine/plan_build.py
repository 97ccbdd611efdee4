"""A plan put together: one model on every host of a configuration, from its config.json and what was recorded.

    setting = read_setting("config/paper.yaml")
    for plan in plans(setting, Published("results/published/tables")):
        plan.needs.fast_bytes, plan.ways[0].times["rule_015"].token_s

What is asked for and what comes out of it are data classes; sizes, fit, counts and times have a file each (plan_*.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from engine.anatomy import Anatomy
from engine.errors import UserError, error, nearest
from engine.geometry import Geometry
from engine.host import load_hosts
from engine.host_times import Host
from engine.model_sheet import Config, Model, find_config, load_models
from engine.overlay import laid_over
from engine.plan_counts import Published
from engine.plan_memory import Needs, Room, fit
from engine.plan_time import Expected, expect
from engine.policies import Policy, load_policies
from engine.residency import parse_slots, slots_from_percent
from engine.schema import check_schema
from engine.timing import Timing, offload_links

BASE = "config/config.yaml"  # another configuration is laid over it
SCHEMA = Path(__file__).parent.parent / "workflow" / "schemas" / "config.schema.json"


@dataclass(frozen=True)
class Setting:
    """What of a configuration a plan needs, read and checked."""

    models: dict[str, Model]
    hosts: dict[str, Host]
    policies: dict[str, Policy]  # of this run, then those that prefetch
    percent: float  # of the experts, the budget at which policies are compared
    context_tokens: int


@dataclass(frozen=True)
class Way:
    """One host whose experts wait behind one link."""

    room: Room
    slots: int  # that the times are for: as many as were asked for, or as fit
    times: dict[str, Expected | None]  # by policy; None where no run recorded it
    fewer: bool = False  # than were asked for
    reason: str = ""  # why there are no times


@dataclass(frozen=True)
class Plan:
    """One model on every host."""

    model: Model
    config: str  # where config.json was found
    anatomy: Anatomy
    needs: Needs
    ways: list[Way]
    counts_of: str  # the rehearsal model
    recorded_percents: list[float]


def read_setting(path: str | Path, base: str | Path = BASE) -> Setting:
    """The configuration laid over the default one, as the pipeline does it. UserError names file and key."""
    config = read_config(path, base)
    sheet, policies = load_models(config["models_sheet"]), load_policies(config["policies_sheet"])
    for name in config["models"]:
        if name not in sheet:
            raise error(f"{path}: models names '{name}'", f"ids of {config['models_sheet']}", nearest(name, sheet))
    wanted = policies if config["policies"] == "all" else config["policies"]
    for name in wanted:
        if name not in policies:
            found = f"{path}: policies names '{name}'"
            raise error(found, f"ids of {config['policies_sheet']}", nearest(name, policies))
    budget = config["prefetch"]["slots"]
    if budget not in config["slots"]:
        raise error(f"{path}: prefetch.slots names '{budget}'", "one of slots", nearest(budget, config["slots"]))
    return Setting(
        models={name: sheet[name] for name in config["models"]},
        hosts=load_hosts(config["hosts"]),
        policies={name: policies[name] for name in wanted} | load_policies(config["prefetch"]["sheet"]),
        percent=float(config["slots"][budget]),
        context_tokens=int(config["context_tokens"]),
    )


def read_config(path: str | Path, base: str | Path = BASE) -> dict:
    """Checked against the schema alone."""
    config = laid_over(read_yaml(base), read_yaml(path))
    check_schema(config, str(path), SCHEMA, "config/README.md")
    return config


def plans(
    setting: Setting, published: Published, slots: str | None = None, fast_bytes: int | None = None
) -> Iterator[Plan]:
    """Of every model of the setting. slots: `25%` or a number, None the setting's share."""
    for model in setting.models.values():
        found = config_of(model)
        anatomy = Anatomy.of_config(found.config, model.dtype)
        wanted = parse_slots(slots, anatomy.experts) if slots else slots_from_percent(anatomy.experts, setting.percent)
        if not anatomy.top_k <= wanted <= anatomy.experts:
            raise error(
                f"{wanted} slots a layer for {model.id}",
                f"from K = {anatomy.top_k} to E = {anatomy.experts}",
                "choose another --slots",
            )
        needs = Needs.of(anatomy, model, found, wanted, setting.context_tokens)
        geometry = Geometry.of_anatomy(anatomy, bits=model.bits, group=model.group)
        ways = [
            way(geometry, needs, host, link, setting, published, fast_bytes)
            for host in setting.hosts.values()
            for link in offload_links(host)[0]
        ]
        yield Plan(model, found.found, anatomy, needs, ways, published.model, published.percents)


def config_of(model: Model) -> Config:
    """UserError where no config.json is on this machine."""
    found = find_config(model)
    if found is None:
        revision = f"revision='{model.revision}'" if model.revision else "revision='main'"
        get = f"from huggingface_hub import hf_hub_download as get; get('{model.source}', 'config.json', {revision})"
        raise error(
            f"no config.json of model '{model.id}' ({model.source}) on this machine",
            f"one in its folder, in the hub's cache, or config/architectures/{model.id}.json",
            f'fetch it alone: python -c "{get}"',
        )
    return found


def way(
    geometry: Geometry,
    needs: Needs,
    host: Host,
    link: str,
    setting: Setting,
    published: Published,
    fast_bytes: int | None,
) -> Way:
    room = fit(needs, host, link, fast_bytes)
    slots = min(needs.slots, room.most_slots) if room.fast_bytes else needs.slots
    if slots < needs.top_k:
        return Way(room, 0, {})
    try:
        timing = Timing.of(host, link, geometry, slots, context_tokens=needs.context_tokens)
    except UserError as exc:  # a dtype that the profile does not have
        return Way(room, 0, {}, reason=str(exc))
    percent = 100 * slots / needs.experts
    times: dict[str, Expected | None] = {}
    for name, policy in setting.policies.items():
        counts = published.of(policy, percent, needs.top_k, setting.policies)
        times[name] = expect(timing, geometry, counts, policy) if counts else None
    return Way(room, slots, times, fewer=slots < needs.slots)


def read_yaml(path: str | Path) -> dict:
    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise error(f"{path}: {exc.strerror}", "a configuration", "config/paper.yaml is one") from None
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise error(f"{path}: {' '.join(str(exc).split())}", "valid YAML in UTF-8", "mend the file") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds no keys", "a configuration", "config/README.md explains them")
    return value
