"""A plan as a page for a terminal of 100 columns: what it takes, what fits, how fast, and what is assumed.

print(page_of(plan))
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from engine.plan_memory import PROGRAM_BYTES, WORKING_BYTES, share, sized
from engine.policies import BASELINE
from engine.quantisation import effective_bits

if TYPE_CHECKING:
    from engine.plan_build import Plan, Way

WIDTH = 100
ABREAST = 3  # hosts and links beside each other in the table of times


def page_of(plan: Plan) -> str:
    parts = [_title(plan), _sizes(plan), "Does it fit?", *(_room(plan, way) for way in plan.ways), *_scoring(plan)]
    timed = [way for way in plan.ways if way.times]
    for first in range(0, len(timed), ABREAST):
        parts.append(_times(timed[first : first + ABREAST]))
    return "\n".join([*parts, _assumed(plan)])


def _title(plan: Plan) -> str:
    a, model = plan.anatomy, plan.model
    layers = f"{a.layers} layers" + (f" (and {a.blocks - a.layers} without experts)" if a.blocks > a.layers else "")
    kept = model.dtype
    if model.bits:
        kept = f"{model.bits} bits ({effective_bits(model.bits, model.group):.3g} with scales)"
    text = f"{model.id}: {_many(a.parameters)} parameters, {_many(a.active_parameters)} of a token; "
    text += f"{a.experts} experts in each of {layers}, {a.top_k} chosen; experts in {kept}"
    note = f"Read from {plan.config}; nothing was fetched."
    if a.quantised:
        note += f" The checkpoint is quantised ({a.quantised}), which the engine refuses: sizes are those before."
    return f"{_wrap(text)}\n{_wrap(note)}"


def _sizes(plan: Plan) -> str:
    n = plan.needs
    left = n.fixed_bytes - n.rest_bytes - n.cache_bytes
    each = f"{n.layers * n.experts:,} experts of {n.record_bytes / 1e6:.3g} MB, and all else"
    rows = [
        ("disk", n.download_bytes + n.store_bytes, ""),
        ("  checkpoint, fetched", n.download_bytes, "not needed any more once it is packed"),
        ("  packed store", n.store_bytes, each),
        ("fast memory", n.fast_bytes, "of the GPU, or RAM where there is none"),
        ("  all but routed experts", n.rest_bytes, "attention, shared experts, embedding, output"),
        (f"  {n.slots} slots a layer", n.slots_bytes, f"{share(n.slots, n.experts)} of the experts"),
        ("  cache", n.cache_bytes, f"{n.context_tokens:,} tokens of context"),
        ("  working memory", left, "and rows beside the slots"),
        ("RAM to score texts", n.scoring_bytes, "results/all: the emulator holds every weight"),
    ]
    lines = [f"  {name:<26} {sized(size):>9}  {note}".rstrip() for name, size, note in rows]
    return "\n".join(["", "What it takes", *lines, ""])


def _room(plan: Plan, way: Way) -> str:
    room, experts = way.room, plan.needs.experts
    name = f"  {room.host}, {room.link}"
    if room.lacks:
        text = f"{name}: NO. {'; '.join(room.lacks)}"
    else:
        most = f"up to {room.most_slots} slots ({share(room.most_slots, experts)}) in {sized(room.fast_bytes)}"
        text = f"{name}: yes, {most}; {sized(room.needs_ram_bytes)} of {sized(room.ram_bytes)} RAM"
    return _wrap(f"{text}; no times: {way.reason}" if way.reason else text, "    ")


def _scoring(plan: Plan) -> list[str]:
    """Whose RAM does not hold the whole model, as the emulator wants it."""
    needed = plan.needs.scoring_bytes
    small = dict.fromkeys(way.room.host for way in plan.ways if way.room.ram_bytes < needed)
    if not small:
        return []
    text = f"  {', '.join(small)}: too little RAM to score texts ({sized(needed)}): perplexity and tasks need"
    return [_wrap(f"{text} another machine than the one that is timed", "    ")]


def _times(ways: list[Way]) -> str:
    heads = [f"{way.room.host}, {way.room.link}"[:25] for way in ways]
    lines = [
        "",
        "Expected, all modelled: milliseconds a token, tokens a second, speed over the baseline",
        f"  {'':<23}" + "".join(f"{head:>26}" for head in heads),
        f"  {'policy':<23}" + "".join(f"{_slots(way):>26}" for way in ways),
    ]
    names = [name for name in ways[0].times if any(way.times.get(name) for way in ways)]
    lines += [f"  {name:<23}" + "".join(_cell(way, name) for way in ways) for name in names]
    if unknown := [name for name in ways[0].times if name not in names]:
        lines.append(_wrap(f"  no run recorded {', '.join(unknown)}: no times", "    "))
    return "\n".join(lines)


def _slots(way: Way) -> str:
    if way.fewer:
        return f"{way.slots} slots, the most"
    return f"{way.slots} slots" + (", if it did fit" if way.room.lacks else "")


def _cell(way: Way, name: str) -> str:
    found, base = way.times.get(name), way.times.get(BASELINE)
    if not found:
        return f"{'-':>26}"
    over = f"{base.token_s / found.token_s:.2f}x" if base else ""
    return f"{1e3 * found.token_s:>12.1f}{found.tokens_per_s:>7.1f}{over:>7}"


def _assumed(plan: Plan) -> str:
    n = plan.needs
    lines = [
        f"as many misses a chosen expert as `{plan.counts_of}` had at the same share of residents, each by itself"
        " (it is a rehearsal: the papers' model misses less often); background loads as published",
        "a decision and a layer cost what the host's profile says; layers are alike: what lies outside routed experts"
        " is shared out among them; experts are computed from the bytes that are stored",
        f"{n.context_tokens:,} tokens of context all the time; one sequence, decoding; no prompt",
        f"working memory {sized(WORKING_BYTES)}, the program {sized(PROGRAM_BYTES)}: ours, not measured",
    ]
    low = plan.recorded_percents[0] if plan.recorded_percents else 0
    if any(100 * way.slots / n.experts < low for way in plan.ways if way.times):
        lines.append(f"below {low:g} % nothing was recorded: counts are those of {low:g} %, times are too short")
    return "\nAssumed (docs/plan.md)\n" + "\n".join(_wrap(f"  * {line}", "    ") for line in lines)


def _many(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _wrap(text: str, indent: str = "  ") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
