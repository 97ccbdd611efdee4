"""What a model takes of disk, RAM and fast memory, and how many slots a host has room for: sums of exact sizes.

    needs = Needs.of(anatomy, model, slots=128, context_tokens=4096)
    room = fit(needs, host, "pcie")
    room.slots, room.lacks

Fast memory is the GPU's where the host has one, else RAM. It holds all but the routed experts, L x S slots and STAGED
rows beside them, the cache at the given context, and WORKING_BYTES for what frameworks take and a layer computes. RAM
also holds the program (PROGRAM_BYTES) and, where experts wait in it (link `pcie` or `memory`), every record. Disk: the
checkpoint, and the packed store beside it. Loading a layer's tensors is not counted: they come one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.anatomy import Anatomy
from engine.decision import STAGED
from engine.geometry import DTYPE_BYTES
from engine.host_times import Host
from engine.model_sheet import Config, Model
from engine.quantisation import check_group, record_bytes

WORKING_BYTES = 1_500_000_000
PROGRAM_BYTES = 3_000_000_000
IN_RAM = ("memory", "pcie")  # kinds of links whose experts wait in RAM


@dataclass(frozen=True)
class Needs:
    """Bytes of one model under one setting, wherever it runs."""

    slots: int
    context_tokens: int
    record_bytes: int  # an expert in a store or slot
    layers: int
    experts: int
    top_k: int
    download_bytes: int
    rest_bytes: int  # all but routed experts
    cache_bytes: int
    whole_bytes: int  # every weight in the dtype

    @classmethod
    def of(cls, anatomy: Anatomy, model: Model, found: Config, slots: int, context_tokens: int) -> Needs:
        """UserError where the model's sizes cannot be packed as its row says."""
        b = DTYPE_BYTES[model.dtype]
        if model.bits:
            for shape in anatomy.expert_shapes:
                if len(shape) > 1:
                    check_group(f"an expert of {model.id} [{shape[0]}, {shape[1]}]", shape[1], model.bits, model.group)
        return cls(
            slots=slots,
            context_tokens=context_tokens,
            record_bytes=record_bytes(anatomy.expert_shapes, model.bits, model.group, b),
            layers=anatomy.layers,
            experts=anatomy.experts,
            top_k=anatomy.top_k,
            download_bytes=found.checkpoint_bytes or anatomy.parameters * b,
            rest_bytes=anatomy.rest_bytes,
            cache_bytes=anatomy.cache_bytes(context_tokens),
            whole_bytes=anatomy.parameters * b,
        )

    @property
    def records_bytes(self) -> int:
        return self.layers * self.experts * self.record_bytes

    @property
    def store_bytes(self) -> int:
        return self.records_bytes + self.rest_bytes

    @property
    def scoring_bytes(self) -> int:
        """Of RAM, where the emulator scores texts: every weight in the dtype."""
        return self.whole_bytes + PROGRAM_BYTES

    @property
    def fixed_bytes(self) -> int:
        """Of fast memory, whatever the slots."""
        return self.rest_bytes + STAGED * self.record_bytes + self.cache_bytes + WORKING_BYTES

    @property
    def slots_bytes(self) -> int:
        return self.layers * self.slots * self.record_bytes

    @property
    def fast_bytes(self) -> int:
        return self.fixed_bytes + self.slots_bytes


@dataclass(frozen=True)
class Room:
    """Whether a setting fits a host whose experts wait behind one link."""

    host: str
    link: str
    fast_bytes: int | None  # what the host has; None: its profile does not say
    ram_bytes: int
    needs_ram_bytes: int
    most_slots: int  # that fit, at most E; 0 where not even none would
    lacks: list[str] = field(default_factory=list)  # what does not fit, in words, with the nearest setting that does


def fit(needs: Needs, host: Host, link: str, fast_bytes: int | None = None) -> Room:
    """fast_bytes: of the GPU, or of RAM that may be used; None: as the profile says."""
    on_gpu = host.device.device == "cuda"
    ram = host.facts["ram_bytes"]
    has = fast_bytes or (host.facts.get("gpu_bytes") if on_gpu else ram)
    waiting = needs.records_bytes if host.links[link].kind in IN_RAM else 0
    if has is None:
        lack = "memory of its GPU is not in its profile: give --fast-memory GB, or probe it again"
        return Room(host.id, link, None, ram, PROGRAM_BYTES + waiting, 0, [lack])
    free = has - needs.fixed_bytes - (0 if on_gpu else PROGRAM_BYTES + waiting)
    most = max(0, min(needs.experts, free // (needs.layers * needs.record_bytes)))
    ram_needed = PROGRAM_BYTES + waiting + (0 if on_gpu else needs.fast_bytes)
    lacks = []
    waits_in_vain = waiting > 0 and ram_needed > ram
    if needs.slots > most and (on_gpu or not waits_in_vain):
        lacks.append(_fewer(needs, most, has, on_gpu))
    if waits_in_vain or (on_gpu and ram_needed > ram):
        lacks.append(f"{sized(ram_needed)} of RAM for every expert, of {sized(ram)}: {_smaller(host, link)}")
    return Room(host.id, link, has, ram, ram_needed, int(most), lacks)


def _fewer(needs: Needs, most: int, has: int, on_gpu: bool) -> str:
    what = "GPU memory" if on_gpu else "RAM"
    found = f"{needs.slots} slots a layer need {sized(needs.fast_bytes)} of {what}, of {sized(has)}: "
    if most >= needs.top_k:
        return f"{found}{most} slots fit ({share(most, needs.experts)})"
    return f"{found}not even K = {needs.top_k} slots fit; fewer bits, a shorter context or more memory"


def _smaller(host: Host, link: str) -> str:
    disks = [name for name, other in host.links.items() if other.kind == "disk"]
    return "fewer bits, or experts behind its disk" if disks else "fewer bits, or a host with a disk link"


def sized(size: float) -> str:
    """In units of 10^9 bytes, as disks are sold, or of 10^6."""
    if size < 1e9:
        return f"{size / 1e6:,.0f} MB"
    return f"{size / 1e9:,.1f} GB" if size < 1e11 else f"{size / 1e9:,.0f} GB"


def share(slots: int, experts: int) -> str:
    return f"{100 * slots / experts:.3g} %"
