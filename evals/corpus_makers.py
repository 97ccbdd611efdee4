"""From a file to its units: what is one row, article, function or chapter of a text, and how does it read?

A maker takes the verified path and the options of the text and returns `(unit id, text)` pairs in a fixed order.
A unit is the smallest piece that may be left out (a test unit that shares 13 words with a training text); documents
are whole units packed by evals/corpora.py. Makers only clean; they never sample at random without a named seed.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

Units = list[tuple[str, str]]


def pack(units: Units, limit: int, glue: str = "") -> Iterator[tuple[str, str]]:
    """Join consecutive units into runs of at most `limit` bytes (a longer one stands alone), named by the first."""
    name, run = "", ""
    for unit_name, text in units:
        if run and len((run + glue + text).encode()) > limit:
            yield name, run
            run = ""
        name, run = (name, run + glue + text) if run else (unit_name, text)
    if run:
        yield name, run


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def passages(path: Path, options: dict) -> Units:
    """Wikipedia passages of a question set: each once, cut at its first and last whole sentence.

    BoolQ cuts its passages at a fixed length from the end, so most open in mid-word ("ce that time, chess programs").
    """
    units, seen = [], set()
    for number, row in enumerate(read_jsonl(path)):
        text = row["passage"].strip()
        title, dash, body = text.partition(" -- ")
        if not dash:
            title, body = "", text
        body = body.strip()
        if (body and not (body[0].isupper() or body[0] in "\"'(")) or body.startswith(("(;", "()")):
            start = re.search(r"(?<=[.!?]) (?=[A-Z\"])", body)
            body = body[start.end() :] if start else ""
        body = re.sub(r"\s*CANNOTANSWER\s*$", "", body).replace("``", '"').replace("''", '"')
        key = body[:200]
        if len(body) < 200 or key in seen:
            continue
        seen.add(key)
        units.append((f"row{number}", f"{title}\n\n{body}" if title and len(title) < 80 else body))
    return units


def bible(path: Path, options: dict) -> Units:
    """Chapters of the King James text, one verse paragraph a line; `without` or `books` choose the books.

    The file is a Python module of one call; it is parsed, never run. The brackets around words that the translators
    supplied ("[was]") are dropped: printed Bibles set them in italics.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    call = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    text = call.args[1].value
    starts, ends, sizes = call.args[2], call.args[3], call.args[4]
    books = [key.attr for key in sizes.keys]
    start = {key.value: value.value for key, value in zip(starts.keys, starts.values, strict=True)}
    end = {key.value: value.value for key, value in zip(ends.keys, ends.values, strict=True)}
    chosen = options.get("books") or [book for book in books if book not in options["without"]]
    unknown = {*chosen, *options.get("without", [])} - set(books)
    assert not unknown, f"no such book: {unknown}"
    units = []
    for number, book in enumerate(books, 1):
        if book not in chosen:
            continue
        chapters = sorted({verse // 1000 % 1000 for verse in start if verse // 1_000_000 == number})
        for chapter in chapters:
            verses = [verse for verse in start if verse // 1000 == number * 1000 + chapter]
            body = text[start[min(verses)] : end[max(verses)]].strip()
            body = re.sub(r"[\[\]]", "", body).replace("’", "'")
            units.append((f"{book.lower()}_{chapter}", re.sub(r"\n\s*\n+", "\n", body)))
    return units


def topics(path: Path, options: dict) -> Units:
    """The topics of `help()`: prose about the Python language, one topic a unit."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    table = ast.literal_eval(next(node.value for node in tree.body if isinstance(node, ast.Assign)))
    return [(name, re.sub(r"\n\*{5,}\n", "\n", text).strip()) for name, text in sorted(table.items())]


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
importlib.import_module("reasoning_gym.coaching")
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


def word_problem(question: str, worked: str) -> str:
    """One layout for every word problem: calculator marks `<<3*4=12>>` are dropped, the last line is `#### answer`."""
    worked = re.sub(r"<<[^>]*>>", "", worked)
    return f"Question: {' '.join(question.split())}\nAnswer: {worked.strip()}"
