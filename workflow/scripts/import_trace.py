"""Turn routing that was recorded elsewhere, a JSONL of chosen experts and weights, into a router trace.

python workflow/scripts/import_trace.py --jsonl routing.jsonl --out trace.safetensors

The first line says what was recorded, every other line is one token; docs/router_traces.md describes both. The file is
read twice, first to count the tokens of its documents, and `--batch` tokens are held at a time. Logits, where there are
any, must explain the choice and the weights by the score rule: else they are another layer's, or the rule is another.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import expit, softmax

from engine.errors import error, main_guard, nearest
from engine.trace import RouterTrace
from engine.trace_file import open_trace, trace_writer
from engine.trace_schema import PAGE, Faults, documents_of, first_of, unusable

NUMBERS = ("experts", "layers", "top_k")
WORDS = ("model", "policy", "score_rule", "text")
RULES = ("sigmoid", "softmax")
# logits recorded in half precision explain choice and weights no better than this
SLACK = 1e-2
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Recorded:
    """The first line: sizes, what goes into the provenance, and of a sigmoid router the correction bias [L, E]."""

    path: Path
    experts: int
    layers: int
    top_k: int
    provenance: dict[str, str]
    bias: np.ndarray | None
    tokens: int | None

    @property
    def sigmoid(self) -> bool:
        return self.provenance["score_rule"] == "sigmoid"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jsonl", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path, help="the trace, *.safetensors")
    parser.add_argument("--top-m", type=int, default=0, help="keep the best M logits of an event alone (default: all)")
    parser.add_argument("--batch", type=int, default=256, help="tokens in memory at a time")
    a = parser.parse_args()
    recorded = read_first_line(a.jsonl)
    documents, digest = read_documents(recorded)
    provenance = recorded.provenance | {"imported_from": a.jsonl.name, "imported_sha256": digest}
    with trace_writer(a.out, documents, provenance, top_m=a.top_m) as writer:
        for chunk in chunks_of(recorded, max(a.batch, 1)):
            writer.append(chunk)
    trace = open_trace(a.out)
    known = f"the best {trace.top_m} scores" if trace.top_m else "all scores" if trace.has_scores else "no scores"
    print(f"{a.out}: {trace.tokens:,} tokens in {len(documents):,} documents, {known}")


# ---- lines -----------------------------------------------------------------------------------------------------------
def lines(path: Path) -> Iterator[tuple[str, bytes, dict]]:
    """(file:line, the line, its object) of each line."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                try:
                    value = json.loads(line.decode())
                except ValueError as exc:  # no JSON, or no UTF-8
                    raise error(f"{where}: {exc}", "one JSON object a line", "mend the line; was it cut?") from None
                if not isinstance(value, dict):
                    raise error(f"{where}: {line[:40]!r}", "a JSON object", "mend the line")
                yield where, line, value
    except OSError as exc:
        raise error(f"{path}: {exc.strerror}", "a JSONL of routing", "check the path") from None


def read_first_line(path: Path) -> Recorded:
    where, _, value = next(lines(path), (f"{path}:1", b"", {}))
    for name in (*NUMBERS, *WORDS):
        if name not in value:
            raise error(f"{where}: no '{name}'", f"{', '.join((*NUMBERS, *WORDS))} ({PAGE})", "write the first line")
    tokens, bias = value.pop("tokens", None), value.pop("correction_bias", None)
    sizes = {name: value.pop(name) for name in NUMBERS}
    for name, size in {**sizes, "tokens": 1 if tokens is None else tokens}.items():
        if type(size) is not int or size < 1:
            raise error(f"{where}: {name} is {size!r}", "a whole number from 1", "mend the first line")
    if sizes["top_k"] > sizes["experts"]:
        raise error(f"{where}: top_k {sizes['top_k']} of {sizes['experts']} experts", "K <= E", "mend the first line")
    for name, word in value.items():
        if not isinstance(word, str) or not word or name in ("documents", "expertmiss"):
            raise error(f"{where}: '{name}' is {word!r}", "text, for the provenance", "mend the first line")
    if value["score_rule"] not in RULES:
        raise error(f"{where}: score_rule '{value['score_rule']}'", "a known one", nearest(value["score_rule"], RULES))
    if bias is not None:
        if value["score_rule"] != "sigmoid":
            raise error(f"{where}: correction_bias", "none where score_rule is softmax", "leave it out")
        bias = array_of(where, "correction_bias", bias, "[L][E]", (sizes["layers"], sizes["experts"]))
    return Recorded(path=path, **sizes, provenance=value, bias=bias, tokens=tokens)


def tokens_of(recorded: Recorded) -> Iterator[tuple[str, bytes, dict]]:
    """As `lines`, of the tokens: keys are known and the document is named."""
    known = ("chosen", "document", "logits", "top_logits", "weights")
    for number, (where, line, value) in enumerate(lines(recorded.path)):
        if number == 0:
            continue
        for name in value:
            if name not in known:
                raise error(f"{where}: key '{name}'", "a known key", nearest(name, known))
        for name in ("document", "chosen", "weights"):
            if name not in value:
                raise error(f"{where}: no '{name}'", "document, chosen, weights", "mend the line")
        if not isinstance(value["document"], str):
            raise error(f"{where}: document is {value['document']!r}", "its id, a text", "put it in quotes")
        yield where, line, value


def read_documents(recorded: Recorded) -> tuple[list, str]:
    """Documents as a trace has them, and the sha256 of the token lines."""
    sizes: dict[str, int] = {}
    last, digest, where = None, hashlib.sha256(), f"{recorded.path}:2"
    for where, line, value in tokens_of(recorded):
        digest.update(line)
        name = value["document"]
        if name != last and name in sizes:
            raise error(f"{where}: document '{name}' a second time", "each document in one piece", "sort the lines")
        sizes[name] = sizes.get(name, 0) + 1
        last = name
    tokens = sum(sizes.values())
    if tokens < 1 or tokens != (recorded.tokens or tokens):
        raise error(f"{where}: the file ends after {tokens} tokens", f"{recorded.tokens or 1}", "was it cut?")
    return documents_of(sizes.items()), digest.hexdigest()


# ---- arrays ----------------------------------------------------------------------------------------------------------
def chunks_of(recorded: Recorded, batch: int) -> Iterator[RouterTrace]:
    """Traces of `batch` tokens each. UserError names the line."""
    kind, rows, wheres = None, [], []
    for where, _, value in tokens_of(recorded):
        row = row_of(recorded, where, value)
        shapes = {name: array.shape for name, array in row.items()}
        if kind not in (None, shapes):
            raise error(
                f"{where}: arrays {', '.join(f'{n} {list(s)}' for n, s in shapes.items())}",
                f"those of the first token: {', '.join(f'{n} {list(s)}' for n, s in kind.items())}",
                "record every token alike",
            )
        kind = shapes
        rows.append(row)
        wheres.append(where)
        if len(rows) == batch:
            yield joined(recorded, rows, wheres)
            rows, wheres = [], []
    if rows:
        yield joined(recorded, rows, wheres)


def row_of(recorded: Recorded, where: str, value: dict) -> dict[str, np.ndarray]:
    """Arrays of one token: chosen, weights [L, K], and where there are any logits [L, E] or top_* [L, M]."""
    L, E, K = recorded.layers, recorded.experts, recorded.top_k
    row = {
        "chosen": array_of(where, "chosen", value["chosen"], "[L][K]", (L, K), ids_below=E),
        "weights": array_of(where, "weights", value["weights"], "[L][K]", (L, K)),
    }
    if "logits" in value and "top_logits" in value:
        raise error(f"{where}: both logits and top_logits", "one of them", "leave the other out")
    if "logits" in value:
        row["logits"] = array_of(where, "logits", value["logits"], "[L][E]", (L, E))
    if "top_logits" in value:
        top = value["top_logits"]
        if not isinstance(top, dict) or top.keys() != {"experts", "logits"}:
            raise error(f"{where}: top_logits", "an object of experts and logits", "mend the line")
        row["top_experts"] = array_of(where, "top_logits.experts", top["experts"], "[L][M]", (L, None), ids_below=E)
        shape = row["top_experts"].shape
        row["top_logits"] = array_of(where, "top_logits.logits", top["logits"], "[L][M]", shape)
    return row


def array_of(
    where: str, name: str, value: object, axes: str, shape: tuple[int | None, ...], ids_below: int | None = None
) -> np.ndarray:
    """A nested list as float32, or as int16 ids. None in a shape: any length."""
    try:
        found = np.asarray(value)
    except ValueError:  # lists of unequal length
        found = np.empty(0, object)
    fits = found.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, found.shape, strict=True))
    if not fits or found.dtype.kind not in ("i" if ids_below else "if"):
        what = "whole numbers" if ids_below else "numbers"
        size = ", ".join("M" if n is None else str(n) for n in shape)
        raise error(f"{where}: {name} is no {axes} of {what}", f"[{size}]", "mend the line")
    if ids_below and (found.min() < 0 or found.max() >= ids_below):
        bad = found.min() if found.min() < 0 else found.max()
        raise error(f"{where}: {name} with id {bad}", f"ids from 0 to {ids_below - 1}", "mend the line")
    with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused as that
        return found.astype(np.int16 if ids_below else np.float32)


def joined(recorded: Recorded, rows: list[dict[str, np.ndarray]], wheres: list[str]) -> RouterTrace:
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}  # [T, L, width]
    chosen, weights = arrays["chosen"], arrays["weights"]
    logits, top_m = arrays.get("logits"), 0
    if "top_logits" in arrays:
        experts = arrays["top_experts"].astype(np.int64)
        ordered = np.sort(experts, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        sound = np.isfinite(arrays["top_logits"]).all(-1)
        refuse([(twice, "top_logits with an id twice"), (~sound, "a logit that is NaN or infinite")], wheres)
        top_m = experts.shape[-1]
        logits = np.full((*chosen.shape[:2], recorded.experts), -np.inf, np.float32)
        np.put_along_axis(logits, experts, arrays["top_logits"], axis=-1)
    if logits is None:
        # by weight is the router's own order under a softmax; a correction bias can change it under a sigmoid
        trace = RouterTrace(chosen, weights, weights, recorded.experts)
        refuse(unusable(trace), wheres)
        return trace
    scores = logits
    if recorded.sigmoid:
        bias = 0 if recorded.bias is None else recorded.bias
        scores = np.where(np.isneginf(logits), -np.inf, expit(logits) + bias).astype(np.float32)
    chosen_scores = np.take_along_axis(scores, chosen, axis=-1)
    apart = logits if recorded.sigmoid else None
    trace = RouterTrace(chosen, weights, chosen_scores, recorded.experts, scores, apart, top_m)
    refuse(unusable(trace), wheres)
    refuse(unexplained(trace, logits, recorded.sigmoid), wheres)
    return trace


def unexplained(trace: RouterTrace, logits: np.ndarray, sigmoid: bool) -> Faults:
    """Events whose chosen are not the best by score, or whose weights do not follow the chosen logits."""
    worst = trace.chosen_scores.min(-1)
    others = trace.scores.copy()
    np.put_along_axis(others, trace.chosen.astype(np.int64), -np.inf, axis=-1)
    yield others.max(-1) > worst + SLACK * (1 + np.abs(worst)), "logits by which an expert beats a chosen one"
    of_chosen = np.take_along_axis(logits, trace.chosen, axis=-1)
    own = expit(of_chosen) if sigmoid else softmax(of_chosen, axis=-1)
    own = own / own.sum(-1, keepdims=True)
    yield np.abs(own - trace.g).max(-1) > TOLERANCE, "weights that do not follow the logits"


def refuse(faults: Faults, wheres: list[str]) -> None:
    fault = first_of(faults)
    if fault is not None:
        token, layer, what = fault
        raise error(
            f"{wheres[token]}: layer {layer}: {what}",
            f"a router's choice as {PAGE} has it",
            "mend the line, give the correction_bias, or leave the logits out",
        )


if __name__ == "__main__":
    main_guard(main)
