"""From lm-eval's `--model_args` to a model that answers under a miss policy, whichever instrument runs it.

    args = parse({"pretrained": "models/reference", "policy": "quality_first", "slots": "25%", "demand": "cold"})
    model, handler = INSTRUMENTS[args.instrument](args)

An instrument here is a constructor ModelArgs -> (model, handler). A handler is asked for little (`Handler`), so that
the adapter does not know which instrument it drives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.demand import demand_facts, load_demand
from engine.emulator import Emulator
from engine.errors import error, nearest
from engine.files import sha256
from engine.hook import attach
from engine.hub import commit_of
from engine.link import Link
from engine.log import DecisionLog
from engine.model_sheet import DTYPES
from engine.offload import RAM, check_demand, find_link, model_dtype
from engine.offload_engine import Engine
from engine.offload_model import OpenModel
from engine.policies import Policy, find_policy, load_policies
from engine.residency import Residency, parse_slots
from engine.store import is_packed, read_manifest
from evals.jobs import load_model, model_hash
from evals.settings import usable_cores

COLD = "cold"
# what lm-eval passes along with the model's own arguments and has no effect here: one lane, no remote code
IGNORED = ("batch_size", "max_batch_size", "trust_remote_code")


class Handler(Protocol):
    """What an instrument's handler must have. The log is of decoding alone, since the last `clear_log`."""

    policy: Policy
    residency: Residency
    decodes_wide: bool

    def phase(self, kind: str) -> AbstractContextManager[None]: ...
    def restart(self) -> None: ...
    def clear_log(self) -> None: ...
    def log(self) -> DecisionLog: ...


@dataclass(frozen=True)
class ModelArgs:
    """What `--model_args` may say. The last four are lm-eval's own (HFLM), and mean what they mean there."""

    pretrained: str  # a folder in Hugging Face layout, or a hub id with its revision; offload: or a packed store
    policy: str  # an id of the sheet
    slots: str  # a layer: 64, or 25% of the experts
    demand: str  # calibration for the warm start (results/calibration/<model>.safetensors), or `cold`
    policies: str = "config/policies.tsv"
    instrument: str = "emulator"
    revision: str | None = None  # of a hub id; None: its main branch
    dtype: str = "auto"  # auto: the checkpoint's own
    delay: int = 1  # emulator: tokens until a background load completes
    link: str = "disk"  # offload: where experts wait, disk, sdcard (throttled to one) or ram
    completion: str = "next_step"  # offload: of background loads; `real` lets the clock decide, and answers may differ
    threads: int | None = None  # None: all cores
    device: str = "cpu"  # cuda where there is none means cpu, as in HFLM: lm-eval says cuda:0 by default
    max_length: int | None = None
    think_end_token: str | int | None = None
    enable_thinking: bool | None = None
    chat_template_args: dict[str, Any] | None = None


# arguments that one alone reads
OF_INSTRUMENT = {"completion": "offload", "delay": "emulator", "link": "offload"}
HFLM_ARGS = ("max_length", "think_end_token", "enable_thinking", "chat_template_args")


def parse(arguments: Mapping[str, Any]) -> ModelArgs:
    """Arguments by name, as lm-eval read them from the command line (25 is an int there). UserError names the wrong."""
    known = {field.name: field for field in dataclasses.fields(ModelArgs)}
    given = {name: value for name, value in arguments.items() if name not in IGNORED and value is not None}
    for name in given:
        if name not in known:
            raise error(f"model argument '{name}'", "one that the offloaded model has", nearest(name, known))
    for name, field in known.items():
        if name not in given and field.default is dataclasses.MISSING:
            raise error(f"no model argument '{name}'", f"{name}=...", f"known: {', '.join(sorted(known))}")
    words = ("pretrained", "policy", "slots", "demand", "policies", "instrument", "revision", "dtype", "device")
    for name in (*words, "link", "completion"):
        if name in given:
            given[name] = str(given[name])
    for name in ("delay", "threads", "max_length"):
        if name in given and not (isinstance(given[name], int) and given[name] > 0):
            raise error(f"model argument {name}={given[name]}", "a positive whole number", "mend it")
    args = ModelArgs(**given)
    if args.instrument not in INSTRUMENTS:
        raise error(f"instrument '{args.instrument}'", "one that runs a model", nearest(args.instrument, INSTRUMENTS))
    for name in given:
        if (reader := OF_INSTRUMENT.get(name, args.instrument)) != args.instrument:
            found, expected = f"{name}={given[name]} with instrument={args.instrument}", f"it with instrument={reader}"
            raise error(found, expected, "leave one out")
    if args.dtype not in (dtypes := ("auto", *DTYPES)):
        raise error(f"dtype '{args.dtype}'", "a type that weights come in", nearest(args.dtype, dtypes))
    return args


# ---- instruments ----------------------------------------------------------------------------------------------------
def emulator(args: ModelArgs) -> tuple[Any, Handler]:
    policy = find_policy(load_policies(args.policies), args.policy)
    demand = None if args.demand == COLD else load_demand(args.demand)
    model = load_model(args.pretrained, args.dtype, args.threads or usable_cores())
    attachment = attach(model.to(_device(args.device)))
    slots = parse_slots(args.slots, attachment.experts)
    return model, Emulator(attachment, policy, slots=slots, demand=demand, delay=args.delay)


class _Answering(Engine):
    """An engine that keeps no journal of its link: thousands of requests would fill it."""

    def clear_log(self) -> None:
        super().clear_log()
        self.link.clear()


def offload(args: ModelArgs) -> tuple[Any, Handler]:
    """The engine, over a packed store or a checkpoint in place."""
    policy, limits = find_policy(load_policies(args.policies), args.policy), find_link(args.link)
    demand = None if args.demand == COLD else load_demand(args.demand)
    torch.set_num_threads(args.threads or usable_cores())
    dtype = model_dtype(args.pretrained, None if args.dtype == "auto" else args.dtype)
    opened = OpenModel(args.pretrained, dtype, ram=args.link == RAM, device=_device(args.device).partition(":")[0])
    slots = parse_slots(args.slots, opened.attachment.experts)
    link = Link(opened.store, limits=limits, name=args.link)
    engine = _Answering(opened.attachment, link, slots=slots, demand=demand)
    engine.use(policy, completion=args.completion)
    return opened.model, engine


INSTRUMENTS: dict[str, Callable[[ModelArgs], tuple[Any, Handler]]] = {"emulator": emulator, "offload": offload}


def _device(name: str) -> str:
    return name if torch.cuda.is_available() or not name.startswith("cuda") else "cpu"


def identity(args: ModelArgs) -> dict[str, Any]:
    """All of the arguments that an answer may depend on, but what the model and the handler know of themselves.

    UserError on a demand that was calibrated on another model.
    """
    packed = is_packed(args.pretrained)
    model = read_manifest(args.pretrained).identity if packed else model_hash(args.pretrained)
    facts = {
        "instrument": args.instrument,
        "model_source": args.pretrained,
        "model_revision": commit_of(args.pretrained),
        "model_hash": model,
        "delay_tokens": args.delay,
        "completion": args.completion,
    }
    if args.demand == COLD:
        return facts | {"start": COLD}
    of_demand = demand_facts(args.demand).get("model")
    if packed:  # keyed by its own identity, calibrated as what was packed
        check_demand(args.demand, args.pretrained)
    elif of_demand != model:
        found = f"{args.demand} is of model {of_demand}"
        raise error(found, f"{model}, as in {args.pretrained}", f"calibrate on this model, or say demand={COLD}")
    return facts | {"start": "warm", "demand_sha256": sha256(args.demand)}
