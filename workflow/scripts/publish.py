"""Copy a finished local run to results/published, the part of the results that is committed.

python workflow/scripts/publish.py                 refuses a run with failed cells or absent texts
python workflow/scripts/publish.py --partial       takes it all the same

Tables, records of quality and sweep (one a policy), of experiment B (one an arm) and of tasks (one a policy that wrote,
and task), gates and pictures with their data replace the published ones, folder by folder, and ledger and answer file
by file; nothing else there is touched. Every file that the index names must still be the one it describes.
"""

import argparse
import os
import re
import shutil
from pathlib import Path

from engine.errors import error, main_guard
from engine.files import atomic, sha256
from engine.measured_run import ROOT
from evals.figures import read_table
from evals.measured_tables import read_measured
from evals.settings import LOCAL
from evals.task_tables import read_tasks

LISTED = re.compile(r"^\| \[(?P<name>[^\]]+)\]\([^)]*\) \| (?P<hash>[0-9a-f]{64}) \|", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", default="results", type=Path, help="folder of the run, with its index `all`")
    parser.add_argument("--out", type=Path, help="default: <results>/published")
    parser.add_argument("--partial", action="store_true", help="publish although cells failed or texts are absent")
    a = parser.parse_args()
    out = a.out or a.results / "published"
    names = check_index(a.results / "all", a.partial)
    folders = {
        "tables": {Path(name).name: a.results / name for name in names if name.startswith("tables/local/")},
        "plots": {Path(name).name: a.results / name for name in names if name.startswith("plots/local/")},
        "quality": records(a.results, "quality.csv", "quality/{model}/{policy}/perplexity.json"),
        "sweep": records(a.results, "sweep.csv", "sweep/{model}/{policy}.json"),
        "experiment_b": {
            name.removeprefix("experiment_b/"): a.results / name for name in names if name.startswith("experiment_b/")
        },
        "tasks": task_records(a.results),
        "gate": {Path(name).name: a.results / name for name in names if name.startswith("gate/")},
    }
    for folder, files in folders.items():
        replace_folder(out / folder, files)
        print(f"{folder}: {len(files)} files")
    for name in names:
        if "/" not in name:  # claims and answer
            with atomic(out / name) as temporary:
                shutil.copyfile(a.results / name, temporary)
            print(name)
    for host in measured_hosts(a.results / "tables" / "local" / "measured.csv"):
        todo = "give it a name (engine.host probe --id) to commit it" if host == LOCAL else "commit its folder"
        print(f"measured host {host} ({ROOT / host}): {todo}")


def measured_hosts(table: Path) -> list[str]:
    """Hosts whose runs are in the tables: their folders belong to what is published."""
    return list(read_measured(table)["host"].unique()) if table.is_file() else []


def check_index(index: Path, partial: bool) -> list[str]:
    """Names of the files in the index, relative to it. UserError: partial, or not the files it was written for."""
    try:
        text = index.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error(f"{index} does not exist", "the index of a finished run", "run `snakemake results/all`") from None
    status = re.search(r"^Status: (.*)$", text, re.MULTILINE)
    listed = LISTED.findall(text)
    if not status or not listed:
        raise error(f"{index}: no status or no files", "an index by write_index.py", "delete it and run again")
    if status[1] != "complete" and not partial:
        raise error(f"{index}: {status[1]}", "a complete run", "`make retry`, or publish it with --partial")
    for name, expected in listed:
        path = index.parent / name
        if not path.is_file() or sha256(path) != expected:
            raise error(f"{path} is not the file that {index} describes", "one run", "run `snakemake results/all`")
    return [name for name, _ in listed]


def records(results: Path, table: str, place: str) -> dict[str, Path]:
    """<model>/<policy>.json of every policy in the table; records of policies that left the sheet stay behind."""
    rows = read_table(results / "tables" / "local" / table)[["model", "policy"]].drop_duplicates()
    files = {}
    for row in rows.to_dict("records"):
        path = results / place.format(**row)
        if not path.is_file():
            raise error(f"{path} does not exist", "a record of every policy", "run `snakemake results/all`")
        files[f"{row['model']}/{row['policy']}.json"] = path
    return files


def task_records(results: Path) -> dict[str, Path]:
    """<model>/<policy>/<task>.json of every policy that wrote; what was forced stands in the table, whole."""
    table = results / "tables" / "local" / "tasks.csv"
    if not table.is_file():
        return {}
    rows = read_tasks(table)[["model", "policy", "task"]].drop_duplicates()
    names = ["/".join(row) + ".json" for row in rows.itertuples(index=False)]
    return {name: path for name in names if (path := results / "tasks" / name).is_file()}


def replace_folder(folder: Path, files: dict[str, Path]) -> None:
    """The folder holds these files and no other; it is replaced whole."""
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        fresh.mkdir(parents=True, exist_ok=True)
        for name, source in sorted(files.items()):
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, fresh / name)
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


if __name__ == "__main__":
    main_guard(main)
