"""What every pipeline script needs: texts from their resolved files, a model ready to attach, provenance, progress."""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from safetensors import SafetensorError

from engine.demand import demand_facts, load_demand
from engine.errors import UserError, error
from engine.residency import Demand
from engine.safetensors_files import weights_hash
from evals.perplexity import scored_tokens, tokenize
from evals.quality import Text

_PACKAGES = ("torch", "transformers", "numpy", "numba", "tokenizers", "lm_eval", "snakemake")
_BROKEN_FILES = (KeyError, OSError, SafetensorError, TypeError, ValueError)  # what transformers raises on bad files


def load_resolved(path: str | Path) -> dict:
    """A resolved text: {status: ok | absent, id, topic, role, ...}; `ok` has documents [{id, text}]."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        value["status"], value["id"]
        if value["status"] != "absent":
            value["topic"], value["sha256"], [(d["id"], d["text"]) for d in value["documents"]]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as exc:
        raise error(f"{path}: {type(exc).__name__} {exc}", "a resolved text", "delete it and run again") from None
    return value


def load_texts(paths: list[str], tokenizer, bos: int | None, first: int | None = None) -> list[Text]:
    """Tokenised texts of the resolved files that are not absent. first: the first documents alone (small runs)."""
    texts = []
    for path in paths:
        resolved = load_resolved(path)
        if resolved["status"] == "absent":
            continue
        pairs = [(d["id"], d["text"]) for d in resolved["documents"][:first]]
        if not pairs:
            raise error(f"{path} has no documents", "at least one", "leave the text out of the configuration")
        documents = tuple(tokenize(tokenizer, pairs, least=1 if bos is not None else 2, where=str(path)))
        scored = tuple(scored_tokens(d, bos) for d in documents)
        texts.append(Text(resolved["id"], resolved["topic"], resolved["sha256"], documents, scored))
    if not texts:
        raise error(
            f"none of {', '.join(paths)} is present",
            "at least one of the configured texts",
            "the files say why; mend it, then `make retry`",
        )
    return texts


def load_tokenizer(folder: str | Path):
    """(tokenizer, bos id or None): one rule everywhere, BOS is prepended by us and never by the tokenizer."""
    from transformers import AutoTokenizer

    _check_folder(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except _BROKEN_FILES as exc:
        raise _broken(folder, exc) from None
    if len(tokenizer) < 2:  # without its files, transformers makes an empty one and says nothing
        raise error(f"{folder} has no tokenizer", "its files beside the weights", "fetch or unpack the model again")
    return tokenizer, tokenizer.bos_token_id


def load_model(folder: str | Path, dtype: str, threads: int):
    """A model in evaluation mode on `threads` threads. dtype: a name of torch's, or `auto` for the checkpoint's own.

    folder: also a packed store, of any bits: all its experts are read, and dequantised. UserError on a folder that is
    not a whole checkpoint, lacks a weight (transformers would make up a random one) or has one that is not finite.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from engine.offload import model_dtype
    from engine.skeleton import check_weights
    from engine.store import is_packed

    _check_folder(folder)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    if is_packed(folder):
        from engine.offload_model import OpenModel

        with OpenModel(folder, model_dtype(folder, None if dtype == "auto" else dtype), device="cpu") as opened:
            opened.fill()
            return opened.model
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    except _BROKEN_FILES as exc:
        raise _broken(folder, exc) from None
    check_weights(folder, loaded, model.named_parameters())
    return model.eval()


def _check_folder(folder: str | Path) -> None:
    """Else transformers would ask the hub for a model of that name."""
    if not Path(folder).is_dir():
        todo = "check the path; a hub id has its commit beside it in models.tsv (by hand: python -m engine.hub)"
        raise error(f"{folder}: no folder", "a whole checkpoint in Hugging Face layout", todo)


def _broken(folder: str | Path, exc: Exception) -> UserError:
    return error(
        f"{folder}: {' '.join(str(exc).split())[:200]}",
        "a whole checkpoint in Hugging Face layout",
        "fetch or unpack the model again",
    )


def model_hash(folder: str | Path) -> str:
    """Which weights a folder computes with (engine.safetensors_files.weights_hash); `none`: it has no such file."""
    return weights_hash(folder) or "none"


def load_calibration(path: str | Path, model_dir: str | Path) -> tuple[Demand, str]:
    """The demand of a warm start and the hash of the weights it is of. UserError: it is of other weights."""
    weights, of_demand = model_hash(model_dir), demand_facts(path)["model"]
    if of_demand != weights:
        raise error(f"{path} is of model {of_demand}", f"{weights}, as in {model_dir}", "calibrate again")
    return load_demand(path), weights


def expert_bytes(attachment) -> int:
    """Bytes of an attached model's routed experts, in the dtype it runs in, whatever its family calls them."""
    return sum(weight.nbytes for module in attachment.layers for weight in module.parameters())


def provenance(**facts: str | int) -> dict[str, str]:
    """What a record must hold to be repeated: command, commit, versions, machine; all values are strings."""
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "command": " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "commit": commit,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": " ".join(f"{name}={version}" for name, version in versions.items()),
        **{name: str(value) for name, value in facts.items()},
    }


class Progress:
    """One line on standard error at most every `every_s` seconds: done of total, rate, time left.

    Processes that are forked (evals/parallel.py) go on in the same count.
    """

    def __init__(self, title: str, total: int, unit: str = "tokens", every_s: float = 4.0) -> None:
        self.title, self.total, self.unit = title, total, unit
        self._every_s, self._started = every_s, time.perf_counter()  # a clock that all processes share
        self._done, self._told = multiprocessing.Value("q", 0), multiprocessing.Value("d", self._started)

    def advance(self, number: int = 1) -> None:
        now = time.perf_counter()
        with self._done.get_lock():
            self._done.value += number
            done, tell = self._done.value, now - self._told.value >= self._every_s
            if not tell and done < self.total:
                return
            self._told.value = now
            rate = done / max(now - self._started, 1e-9)
            left = (self.total - done) / max(rate, 1e-9)
            print(
                f"{self.title}: {done:,} of {self.total:,} {self.unit}, {rate:,.0f} a second, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
