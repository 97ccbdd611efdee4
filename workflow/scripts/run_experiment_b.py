"""Experiment B on one model: a pilot on calibration text, and eight arms on the test texts where it says go.

    <out>/pilot.json              levels, realised masses, effect, power; go, or why not. Then nothing else is written
    <out>/arms.tsv                the arms as a sheet of policies
    <out>/<arm>.json              a record as score_policy.py writes it, with what stood in for what under `mechanism`
    <out>/<arm>.safetensors       losses by `<slots>/<text>`
    <out>/exact.safetensors       the same of the exact model: those of its recorded routing, cut

An arm that fails keeps its reason, the rest goes on.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.errors import main_guard
from engine.files import atomic, write_json
from engine.hook import attach
from engine.log import DecisionLog
from engine.policies import Policy, load_policies
from engine.residency import Demand, slots_from_percent
from evals.experiment_b import arms, pilot, write_sheet
from evals.jobs import (
    Progress,
    expert_bytes,
    load_calibration,
    load_model,
    load_texts,
    load_tokenizer,
    provenance,
)
from evals.parallel import ahead
from evals.perplexity import context_of
from evals.preregistration import Preregistration, load
from evals.quality import Text, cells, open_recording, record_of, run_emulator
from evals.stream import cut
from evals.watch import Watch, mechanism

ROW = "P1.5"


def main() -> None:
    a = arguments()
    rules = load(a.preregistration)
    slots_id, _, percent = a.slots.partition("=")
    tokenizer, bos = load_tokenizer(a.model_dir)
    demand, weights = load_calibration(a.demand, a.model_dir)
    whole = load_texts(a.texts, tokenizer, bos, a.documents)
    texts, calibration = (
        [cut(text, a.tokens, tokenizer, bos) for text in several]
        for several in (whole, load_texts(a.calibration, tokenizer, bos, a.documents))
    )
    exact = {
        f"{slots_id}/{text.id}": beginnings(
            open_recording(a.traces / f"{text.id}.safetensors", text, weights).losses(), text, short
        )
        for text, short in zip(whole, texts, strict=True)
    }
    model = load_model(a.model_dir, a.dtype, 1)  # evals/parallel.py has the others
    context = context_of(model, a.context)
    with attach(model) as attachment:
        slots = slots_from_percent(attachment.experts, float(percent))
        facts = {"model": weights, "score_rule": attachment.rule_name, "context": context, "threads": a.threads}
        facts = provenance(**facts, dtype=a.dtype, tokens=a.tokens)
        progress = Progress(f"pilot of experiment B, {a.model}", 7 * sum(sum(text.scored) for text in calibration))
        found = pilot(
            model,
            attachment,
            calibration,
            slots=slots,
            demand=demand,
            test=texts,
            comparisons=comparisons(rules),
            statistics=rules.statistics,
            threads=a.threads,
            context=context,
            bos=bos,
            progress=progress.advance,
        )
        of_run = {"slots": slots_id, "slots_percent": float(percent), "texts": {t.id: t.sha256 for t in calibration}}
        head = {"schema": "experiment-b-pilot-1", "model": a.model, "expert_bytes": expert_bytes(attachment)}
        write_json(a.out / "pilot.json", head | found | of_run | {"provenance": facts})
        if not found["go"]:
            print(f"{a.model}: experiment B stops after its pilot: {found['reason']}")
            return
        sheet = a.out / "arms.tsv"
        write_sheet(sheet, arms(found["levels"], found["tau"]))
        save(a.out / "exact.safetensors", exact)
        policies = load_policies(sheet)
        progress = Progress(f"experiment B, {a.model}", len(policies) * sum(sum(text.scored) for text in texts))
        options = {"demand": demand, "context": context, "bos": bos, "progress": progress.advance}
        percents = {slots_id: float(percent)}
        work = [partial(score, model, attachment, one, texts, percents, **options) for one in policies.values()]
        with ahead(work, a.threads) as results:
            for policy, result in zip(policies.values(), results, strict=True):
                rows, arrays, seen = result()
                losses = a.out / f"{policy.id}.safetensors"
                save(losses, arrays)
                record = record_of(
                    policy,
                    texts,
                    rows,
                    model=a.model,
                    delay=1,
                    provenance=facts,
                    experts=attachment.experts,
                    expert_bytes=expert_bytes(attachment),
                    losses=losses,
                )
                write_json(a.out / f"{policy.id}.json", record | {"mechanism": seen})


def score(
    model, attachment, policy: Policy, texts: list[Text], slot_percents: dict[str, float], *, demand: Demand, **options
) -> tuple[list[dict], dict[str, np.ndarray], dict]:
    """Cells of one arm, its losses by `<slots>/<text>`, and what was seen of its stand-ins."""
    arrays: dict[str, np.ndarray] = {}
    seen: list[tuple[Watch, DecisionLog]] = []
    watch: Watch | None = None

    def run(text: Text, slots: int) -> tuple[np.ndarray, DecisionLog]:
        nonlocal watch
        watch = Watch(attachment, policy, slots=slots, demand=demand)
        return run_emulator(model, watch, text, **options)

    def keep(slots_id: str, text: Text, loss: np.ndarray, log: DecisionLog) -> None:
        arrays[f"{slots_id}/{text.id}"] = loss
        seen.append((watch, log))

    rows = cells(policy, texts, slot_percents, experts=attachment.experts, run=run, keep=keep)
    return rows, arrays, mechanism(seen)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="id, for the record")
    parser.add_argument("--model-dir", required=True, help="folder in Hugging Face layout, or hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--calibration", nargs="+", required=True, help="resolved texts of role calibration")
    parser.add_argument("--texts", nargs="+", required=True, help="resolved texts of role test")
    parser.add_argument("--documents", type=int, help="the first documents of each text alone")
    parser.add_argument("--tokens", type=int, required=True, help="the first of every document")
    parser.add_argument("--slots", required=True, help="id=percent")
    parser.add_argument("--demand", required=True)
    parser.add_argument("--traces", required=True, type=Path, help="folder of record_routing.py")
    parser.add_argument("--preregistration", required=True, help="it says how the test is made")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", required=True, type=Path, help="folder")
    return parser.parse_args()


def comparisons(rules: Preregistration) -> int:
    """Size of the Holm family of the part that decides: primary parts of the row, of every model of the file."""
    return len(rules.models) * sum(part.role == "primary" for part in rules.rows[ROW].parts)


def beginnings(loss: np.ndarray, text: Text, short: Text) -> np.ndarray:
    """The losses of the cut text out of those of the whole one."""
    starts = np.cumsum([0, *text.scored[:-1]])
    return np.concatenate([loss[at : at + n] for at, n in zip(starts, short.scored, strict=True)])


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with atomic(path) as temporary:
        save_file(arrays, temporary)


if __name__ == "__main__":
    main_guard(main)
