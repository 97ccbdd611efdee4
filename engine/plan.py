"""What would this model take here, before anything is fetched? Disk, RAM, fast memory, slots, and seconds a token.

    python -m engine.plan --config config/paper.yaml [--model ID] [--host ID] [--slots 25%] [--json]
    python -m engine.plan --growth --config config/paper.yaml [--json]
    python -m engine.plan --check results/measured/epyc_2core_vm

It reads a model's config.json alone: of its folder, of the hub's cache, or the committed one of config/architectures.
Sizes are exact (engine/anatomy.py, engine/plan_memory.py). Times are modelled: a host's profile, and how often the
rehearsal model missed at the same share of residents (engine/plan_time.py, engine/plan_counts.py). docs/plan.md says
what is assumed, and `--check` how far the times are from measured ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from engine.errors import error, main_guard, nearest
from engine.model_sheet import load_models
from engine.plan_build import BASE, Plan, plans, read_setting, read_yaml
from engine.plan_check import compare, page
from engine.plan_counts import REHEARSAL, TABLES, Published
from engine.plan_growth import Growth
from engine.plan_growth_page import as_json as growth_as_json
from engine.plan_growth_page import page_of as growth_page
from engine.plan_page import page_of
from engine.policies import BASELINE, load_policies

FIGURES = Path(__file__).parent.parent / "workflow" / "scripts"
HEEDED = {"check": ("tables",), "growth": ("config", "tables", "json")}  # beside each, by what it reads


def as_json(plan: Plan) -> dict:
    """Everything that the page says, with exact numbers; times are modelled."""
    ways = [
        {
            "room": dataclasses.asdict(way.room),
            "slots": way.slots,
            "status": "modelled",
            "token": {name: dataclasses.asdict(found) if found else None for name, found in way.times.items()},
        }
        for way in plan.ways
    ]
    sums = ("records_bytes", "store_bytes", "fixed_bytes", "slots_bytes", "fast_bytes")
    return {
        "model": dataclasses.asdict(plan.model),
        "config": plan.config,
        "anatomy": dataclasses.asdict(plan.anatomy),
        "needs": dataclasses.asdict(plan.needs) | {name: getattr(plan.needs, name) for name in sums},
        "counts_of": plan.counts_of,
        "baseline": BASELINE,
        "ways": ways,
    }


def _only(known: dict, name: str | None, what: str) -> dict:
    if name is None:
        return known
    if name not in known:
        raise error(f"{what} '{name}'", f"a {what} of the configuration", nearest(name, known))
    return {name: known[name]}


def _refuse_unheeded(parser: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    """UserError where something is asked that --check or --growth would not heed."""
    for mode in (name for name in HEEDED if getattr(a, name)):
        for name, value in vars(a).items():
            if name not in (mode, *HEEDED[mode]) and value != parser.get_default(name):
                heeded = ", ".join(f"--{other}" for other in HEEDED[mode])
                todo = "leave it out: what is counted stands in the configuration and in the tables"
                raise error(f"--{name.replace('_', '-')} beside --{mode}", f"{heeded} alone", todo)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=BASE, help=f"laid over {BASE}, which is the default")
    parser.add_argument("--model", help="one of its models; any row of the sheet")
    parser.add_argument("--host", help="one of its hosts")
    parser.add_argument("--slots", help="slots a layer, or a share as 25%%; default the configuration's")
    parser.add_argument("--context", type=int, help="tokens of context; default the configuration's")
    parser.add_argument("--fast-memory", type=float, metavar="GB", help="GPU memory, or RAM that may be used")
    parser.add_argument("--counts", default=REHEARSAL, help="the rehearsal model whose misses are taken")
    parser.add_argument("--tables", default=TABLES, help="tables of a run, with its counts")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="of results/measured: predicted over measured")
    parser.add_argument(
        "--growth", action="store_true", help="jobs, limits of node hours, bytes, longest chain of a run"
    )
    parser.add_argument("--json", action="store_true", help="one object a model, a line each; one of --growth")
    a = parser.parse_args()
    _refuse_unheeded(parser, a)
    for name, value in (("--context", a.context), ("--fast-memory", a.fast_memory)):
        if value is not None and not 0 < value < float("inf"):
            raise error(f"{name} {value:g}", "a number above 0", "choose another")
    if a.check:
        print(page(compare(a.check, a.tables, load_policies(read_yaml(BASE)["policies_sheet"]))))
        return
    if a.growth:
        growth = Growth.of(a.config, len(list(FIGURES.glob("plot_*.py"))), a.tables)
        print(json.dumps(growth_as_json(growth), allow_nan=False) if a.json else growth_page(growth))
        return
    setting = read_setting(a.config)
    if a.model and a.model not in setting.models:
        sheet = load_models((read_yaml(BASE) | read_yaml(a.config))["models_sheet"])
        if a.model not in sheet:
            raise error(f"model '{a.model}'", "a row of the sheet of models", nearest(a.model, sheet))
        setting = dataclasses.replace(setting, models={a.model: sheet[a.model]})
    setting = dataclasses.replace(
        setting,
        models=_only(setting.models, a.model, "model"),
        hosts=_only(setting.hosts, a.host, "host"),
        context_tokens=a.context or setting.context_tokens,
    )
    published = Published(a.tables, a.counts)
    fast_bytes = int(a.fast_memory * 1e9) if a.fast_memory else None
    for number, plan in enumerate(plans(setting, published, a.slots, fast_bytes)):
        print(json.dumps(as_json(plan), allow_nan=False) if a.json else "\n" * (number > 0) + page_of(plan))


if __name__ == "__main__":
    main_guard(main)
