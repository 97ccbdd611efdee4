"""A model whose experts wait in a store: opened, attached, and given an engine.

    with OpenModel("results/packed/reference/own", torch.float32) as opened:
        engine = opened.engine(slots=64, demand=demand, limits=None)
        engine.use(policy, completion="real")

The folder is a packed store (`python -m engine.offload pack`) or a Hugging Face checkpoint, which is read in place.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from engine.checkpoint import CheckpointStore
from engine.errors import error
from engine.hook import Attachment, attach
from engine.host_times import Affine
from engine.link import Link
from engine.offload_engine import AT_ONCE, Engine
from engine.quantised_store import DequantisedStore
from engine.record import Store
from engine.residency import Demand
from engine.skeleton import load_skeleton
from engine.slots import Slots
from engine.store import PackedStore, RamStore, is_packed


class OpenModel:
    """model, attachment and store of a folder; `engine` makes one over a link of its own. Close it."""

    def __init__(self, folder: str | Path, dtype: torch.dtype, *, ram: bool = False, device: str | None = None) -> None:
        """ram: all experts are read into host RAM first and wait there. device: cpu or cuda, None: a GPU if there is.

        UserError on a folder that is not whole.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        folder = Path(folder)
        if not folder.is_dir():
            raise error(f"{folder} is no folder", "a checkpoint or a packed store", "check --model")
        with ExitStack() as undo:
            store: Store = PackedStore(folder) if is_packed(folder) else CheckpointStore(folder, dtype)
            undo.callback(store.close)
            if store.layout.dtype != dtype:
                raise error(
                    f"{folder}: packed as {store.layout.dtype}", f"{dtype}", "pack it again, or choose its dtype"
                )
            self.model: nn.Module = load_skeleton(folder, dtype)
            self.model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # the experts stay away
            self.attachment: Attachment = attach(self.model)
            undo.callback(self.attachment.detach)
            if ram:
                store = RamStore(store, pin=device == "cuda")
            self.store = store
            self._open = undo.pop_all()

    def engine(self, *, slots: int, demand: Demand | None = None, limits: Affine | None = None, name="disk") -> Engine:
        """An engine whose link is throttled to `limits`; closed with the model."""
        link = self._open.enter_context(Link(self.store, limits=limits, name=name))
        return Engine(self.attachment, link, slots=slots, demand=demand)

    def fill(self) -> None:
        """All experts into memory: from now on the stock model, as the emulator needs it."""
        store = self.store if self.store.layout.bits is None else DequantisedStore(self.store)
        device = self.model.device.type
        slots = Slots(store.layout, layers=store.layers, slots=store.experts, staging=0, device=device)
        with Link(store) as link:
            for layer in range(store.layers):
                for first in range(0, store.experts, AT_ONCE):
                    last = min(first + AT_ONCE, store.experts)
                    link.fetch([slots.place(layer * store.experts + e, layer, e) for e in range(first, last)])
        slots.give_parts_to(self.attachment.layers)

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> OpenModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
