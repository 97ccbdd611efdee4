"""Resolve one task of config/tasks.tsv into results/tasks: the problems that a run asks, or why there are none.

python workflow/scripts/resolve_task.py --tasks config/tasks.tsv --id humaneval --problems 16 --out humaneval.json
"""

import argparse
import os

from engine.errors import error, main_guard, nearest
from engine.files import write_json
from evals.corpora import AbsentText
from evals.task_rows import load_rows, rows_hash
from evals.task_sheet import load_tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", required=True, help="the sheet")
    parser.add_argument("--id", required=True)
    parser.add_argument("--problems", type=int, help="the first so many; default: all")
    parser.add_argument("--data-dir", default=os.environ.get("EXPERTMISS_DATA"), help="default: EXPERTMISS_DATA")
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    tasks = load_tasks(a.tasks)
    if a.id not in tasks:
        raise error(f"task '{a.id}'", f"an id of {a.tasks}", nearest(a.id, tasks))
    value = {"id": a.id, "text": tasks[a.id].text}
    try:
        found = load_rows(tasks[a.id].text, a.data_dir)
    except AbsentText as exc:
        value = {"status": "absent", "reason": str(exc), **value}
        print(f"{a.id} is absent: {exc}")
    else:
        rows = list(found.rows[: a.problems])
        value = {
            "status": "ok",
            **value,
            "topic": found.topic,
            "licence": found.licence,
            "sha256": found.sha256,
            "rows_sha256": rows_hash(rows),
            "source": found.source,
            "found": found.found,
            "left_out": found.left_out,
            "rows": rows,
        }
        print(f"{a.id}: {len(rows)} problems of {found.found}, {found.left_out} left out as learnt from")
    write_json(a.out, value)


if __name__ == "__main__":
    main_guard(main)
