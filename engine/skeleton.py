"""A model without its experts: everything else is loaded, the experts' parameters stay on the meta device.

The weights come through transformers' own `from_pretrained`, which is given a state dict in place of a folder: what
is no expert's is read by us when it is asked for, what is an expert's answers with a meta tensor. So renamings and
conversions, casts, tied weights and the buffers that no file holds are what they always are.

    model = load_skeleton(Path("my-model"), torch.bfloat16)
    attach(model)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_tie_weights
from transformers.utils import logging

from engine.conversion import sources
from engine.errors import error
from engine.hook import experts_modules
from engine.record import Layout, is_finite
from engine.safetensors_files import dtype_of, read_headers, read_tensor, refuse_pointer

_BROKEN_CONFIG = (AttributeError, KeyError, OSError, StrictDataclassError, TypeError, ValueError)


class _Lazy:
    """A tensor as far as transformers looks at one while it loads: `tensor[...].to(device, dtype)`."""

    def __init__(self, make: Callable[[torch.dtype], torch.Tensor]) -> None:
        self._make = make

    def __getitem__(self, _: object) -> _Lazy:
        return self

    def to(self, device: object, dtype: torch.dtype) -> torch.Tensor:
        return self._make(dtype)


def load_skeleton(folder: Path, dtype: torch.dtype) -> nn.Module:
    """In evaluation mode, without gradients. UserError on a folder that is no whole checkpoint (experts apart, which a
    store answers for), lacks a weight or has one that is not finite.
    """
    folder = Path(folder)
    tensors = read_headers(folder)
    empty = meta_model(folder, dtype)
    absent = expert_parameters(empty)
    state = {name: _Lazy(partial(_on_meta, parameter.shape)) for name, parameter in absent.items()}
    for target, source in sources(empty, tensors).items():
        if target not in absent:
            for name in source.names:
                dtype_of(tensors[name])  # refused before anything is read
                state[name] = _Lazy(partial(read_tensor, tensors[name]))
    with quiet():
        model, loaded = type(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict=state,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    kept = [name for name in absent if model.get_parameter(name).dtype != dtype]
    if kept:  # a family may keep some parameters in float32: a record has one dtype
        raise error(f"{folder}: the family keeps {kept[0]} in float32", "experts of one dtype", "run it in float32")
    present = ((name, value) for name, value in model.state_dict().items() if not value.is_meta)
    check_weights(folder, loaded, present)
    return model.requires_grad_(False)


def meta_model(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model of a folder's config.json on the meta device, without a weight; tied weights are not tied yet."""
    folder = Path(folder)
    if (folder / "config.json").exists():
        refuse_pointer(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with quiet(), torch.device("meta"), no_tie_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except _BROKEN_CONFIG as exc:
        raise error(
            f"{folder}: {' '.join(str(exc).split())[:200]}",
            "the config.json of a causal language model that transformers knows",
            "fetch or unpack the model again",
        ) from None
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise error(
            f"{folder} is quantised ({method})", "F32, BF16 or F16 weights", "use a checkpoint that is not quantised"
        )
    return model.eval()


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that experts have one by one, by its name in the model: what a store holds."""
    return {
        f"{path}.{name}": getattr(module, name)
        for path, module in experts_modules(model).items()
        for name in Layout.of_module(module, model.dtype).names
    }


def check_weights(folder: Path, loaded: dict, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """UserError by name on a weight that from_pretrained had to make up, or that is not finite.

    loaded: its loading info, asked for with ignore_mismatched_sizes.
    """
    wrong = {name: "is missing" for name in loaded["missing_keys"]}
    wrong |= {name: f"has shape {list(found)}, not {list(wants)}" for name, found, wants in loaded["mismatched_keys"]}
    wrong |= {name: "is not finite" for name, weight in weights if name not in wrong and not is_finite(weight)}
    if wrong:
        name = min(wrong)
        raise error(
            f"{folder}: weight {name} {wrong[name]} ({len(wrong)} such)",
            "every weight of config.json, finite",
            "check the checkpoint, fetch or unpack it again",
        )


def _on_meta(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bar and no report of transformers: what is wrong is raised by us."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
