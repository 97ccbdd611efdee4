"""A sheet of the configuration: tab-separated, its header fixed, a row an id.

sheet = read_sheet("config/tasks.tsv", COLUMNS, "the sheet of tasks", parse)     # by id, in the sheet's order
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from engine.errors import error

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # of a row: it becomes a file name, so no dots, spaces or slashes
Row = TypeVar("Row")  # has an `id`


def read_sheet(
    path: str | Path,
    columns: Sequence[str],
    what: str,
    parse: Callable[[dict[str, str], str], Row],
    optional: Sequence[str] = (),
) -> dict[str, Row]:
    """parse(cells by column, `<path>:<line>`) makes a row. UserError names file, line and value.

    optional: columns that may follow the others, all of them or none.
    """
    try:
        with open(path, newline="", encoding="utf-8") as handle:
            lines = list(csv.reader(handle, delimiter="\t"))
    except OSError as exc:
        raise error(f"{path}: {exc.strerror}", what, "check its path in the configuration") from None
    except UnicodeDecodeError as exc:
        raise error(f"{path}: byte {exc.start} is no UTF-8", "a sheet in UTF-8", "save it as UTF-8") from None
    header = tuple(lines[0]) if lines else ()
    if header not in (tuple(columns), (*columns, *optional)):
        found = f"{path}:1: columns {lines[0] if lines else []}"
        after = f", then {', '.join(optional)} or nothing" if optional else ""
        raise error(found, f"exactly {', '.join(columns)}{after}", "mend the header")
    rows: dict[str, Row] = {}
    for number, cells in enumerate(lines[1:], start=2):
        where = f"{path}:{number}"
        if len(cells) != len(header):
            raise error(f"{where}: {len(cells)} cells", f"{len(header)} separated by tabs", "mend the row")
        row = parse(dict(zip(header, cells, strict=True)), where)
        if row.id in rows:
            raise error(f"{where}: id '{row.id}' a second time", "one row an id", "rename or remove one")
        rows[row.id] = row
    return rows
