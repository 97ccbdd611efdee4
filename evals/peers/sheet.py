"""Which program is run with which settings: a row of config/peers.tsv.

rows = load_sheet("config/peers.tsv")
rows["llama_cpp"].limited
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import error, nearest
from engine.sheets import ID, read_sheet

COLUMNS = ("id", "program", "memory", "policy", "slots", "threads", "load_mode", "tokens", "read_ahead_kb")
PROGRAMS = ("accelerate", "engine", "llama_bench", "llama_cpp", "transformers")
LIMITED, FREE = "limit", "all"
LOAD_MODES = ("dio", "mmap", "none")


@dataclass(frozen=True)
class Peer:
    """A row. slots: percent of a layer's experts. threads, tokens: None is all, else the first of every document.

    read_ahead_kb: of the disk's device while the program runs; None as the machine has it.
    """

    id: str
    program: str
    memory: str
    policy: str | None
    slots: int | None
    threads: int | None
    load_mode: str | None
    tokens: int | None
    read_ahead_kb: int | None = None

    @property
    def limited(self) -> bool:
        return self.memory == LIMITED


def load_sheet(path: str | Path) -> dict[str, Peer]:
    """By id, in the sheet's order. UserError names row, column and value."""
    return read_sheet(path, COLUMNS, "the sheet of peers", _parse)


def _parse(cells: dict[str, str], where: str) -> Peer:
    if not ID.fullmatch(cells["id"]):
        raise error(f"{where}: id '{cells['id']}'", "letters, digits, '_' or '-'", "rename it")
    for name, known in (("program", PROGRAMS), ("memory", (LIMITED, FREE))):
        if cells[name] not in known:
            raise error(f"{where}: {name} '{cells[name]}'", "one of this column", nearest(cells[name], known))
    engine, llama = cells["program"] == "engine", cells["program"].startswith("llama")
    for name, needed in (("policy", engine), ("slots", engine), ("load_mode", llama)):
        if (cells[name] != "-") != needed:
            expected = "a value" if needed else "'-'"
            raise error(f"{where}: {name} '{cells[name]}' of program {cells['program']}", expected, "mend the cell")
    if llama and cells["load_mode"] not in LOAD_MODES:
        raise error(f"{where}: load_mode '{cells['load_mode']}'", "one of llama.cpp's", ", ".join(LOAD_MODES))
    least = {"slots": 1, "threads": 1, "tokens": 2, "read_ahead_kb": 1}  # first tokens are not timed
    numbers = {name: _number(cells[name], number, f"{where}: {name}") for name, number in least.items()}
    words = {name: None if cells[name] == "-" else cells[name] for name in ("policy", "load_mode")}
    if numbers["slots"] is not None and numbers["slots"] > 100:
        raise error(f"{where}: slots '{cells['slots']}'", "a percentage", "mend the cell")
    return Peer(cells["id"], cells["program"], cells["memory"], **words, **numbers)


def _number(word: str, least: int, where: str) -> int | None:
    if word in ("-", "all"):
        return None
    if not word.isdigit() or not least <= int(word) < 1_000_000:
        raise error(f"{where} '{word}'", f"a whole number from {least}, or all", "mend the cell")
    return int(word)
