"""Forget what failed, so that the next run tries it again: records of failed cells, absent texts that are here now.

python workflow/scripts/forget_failed.py results/quality

Snakemake makes nothing again for which a finished index stands, so the index and the tables that such a record or text
went into are removed with it. Everything else stays. A text that is still absent is left alone: asking for it anew
would score every policy again. Of a measured host only the stamps go, so that measuring it again takes the failed runs.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from engine.errors import main_guard
from evals.corpora import AbsentText, load

TABLES = ("quality", "sweep", "experiment_b", "tasks")
DERIVED = ("all", *(f"tables/local/{table}.csv" for table in TABLES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="results/quality; other records, texts, tables and index lie beside it"
    )
    a = parser.parse_args()
    results = a.folder.parent
    forgotten = []
    tasks, swept = results / "tasks", results / "sweep"
    found = [*a.folder.glob("*/*/*.json"), *swept.glob("*/*.json")]
    for path in sorted([*found, *tasks.glob("*/*/*.json"), *tasks.glob("*/agreement.json")]):
        reason = failure(path)
        if reason:
            forgotten.append(path)
            print(f"{path}: {reason}")
    for path in sorted([*(results / "texts").glob("*.json"), *tasks.glob("*.json")]):
        reason = return_of(path)
        if reason:
            forgotten.append(path)
            print(f"{path}: {reason}")
    for folder in sorted((results / "experiment_b").glob("*")):
        reason = failed_experiment(folder)
        if reason:
            forgotten.append(folder)
            print(f"{folder}: {reason}")
    for path in [*forgotten, *(results / name for name in DERIVED if forgotten)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for stamp, reason in failed_measurements(results):
        stamp.unlink()
        host = stamp.parents[2].name
        print(f"{stamp}: {reason}; snakemake --cores 1 results/measured/{host} takes these runs again")
    print(f"{len(forgotten)} files forgotten; run snakemake --cores 1 results/all --rerun-incomplete")


def failure(record: Path) -> str | None:
    """Why a record must be made again, or None."""
    try:
        found = json.loads(record.read_text("utf-8"))
        cells = found.get("cells", [found])  # a record of one task is its own cell
        failed = [cell["reason"] for cell in cells if cell["status"] == "failed"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        return f"not a whole record ({type(exc).__name__})"
    return f"{len(failed)} failed cells, for example: {failed[0]}" if failed else None


def failed_experiment(folder: Path) -> str | None:
    """Why pilot and arms of experiment B must be run again, or None: they are one job."""
    for path in sorted(folder.glob("*.json")):
        if path.stem != "pilot":
            reason = failure(path)
        else:
            try:
                pilot = json.loads(path.read_text("utf-8"))
                reason = pilot["reason"] if pilot["status"] == "failed" else None
            except (OSError, ValueError, KeyError, TypeError) as exc:
                reason = f"not a whole record ({type(exc).__name__})"
        if reason:
            return f"{path.stem}: {reason}"
    return None


def failed_measurements(results: Path) -> Iterator[tuple[Path, str]]:
    """Stamps of measurements with failed runs, and why."""
    for path in sorted((results / "measured").glob("*/*/*.json")):
        stamp = results / "stamps" / "measured" / path.relative_to(results / "measured").with_suffix("") / "timed"
        if stamp.is_file() and (reason := failure(path)):
            yield stamp, reason


def return_of(text: Path) -> str | None:
    """Why a resolved text or task must be made again, or None: it is whole, or still absent."""
    try:
        value = json.loads(text.read_text("utf-8"))
        if value["status"] == "ok":
            return None
        load(value.get("text", value["id"]))  # of a task its text
    except AbsentText:
        return None
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as exc:
        return f"not a whole text ({type(exc).__name__})"
    return "was absent, is here now"


if __name__ == "__main__":
    main_guard(main)
