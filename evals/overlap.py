"""Does a text that is asked also stand in a text that was learnt?

Two texts overlap where they share 13 words in a row: lower case, letters and digits only, so punctuation, layout and
programming symbols do not hide a copy. The unit of a test or calibration text that holds such a run is left out. A
calibration text must not overlap a training text, a test text neither a training nor a calibration text.

What is trained on depends on the packages installed, but a test text must be the same everywhere: so the units to
leave out are kept in evals/corpora.toml, together with the sha256 of what remains. Without flags the command checks
this environment and fails if a kept unit overlaps; `--write` computes the lists anew (with EXPERTMISS_DATA set, so
that every text is there) and writes them.

    python -m evals.overlap
    python -m evals.overlap --write
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable

import numpy as np

from engine.errors import error, main_guard
from engine.files import write_text
from evals import corpora
from evals.corpus_files import AbsentText

WORDS = 13
WORD = re.compile(r"[^\W_]+")
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so a factor of a polynomial hash modulo 2**64


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def run_hashes(text: str, vocabulary: dict[str, int], size: int = WORDS) -> np.ndarray:
    """64-bit hashes of the runs of `size` words [max(0, words - size + 1)]; `vocabulary` numbers the words and grows.

    Two different runs get one hash with a chance of about 1e-12 in a training text of 10 million words.
    """
    numbers = np.array([vocabulary.setdefault(word, len(vocabulary) + 1) for word in words(text)], dtype=np.uint64)
    runs = max(0, len(numbers) - size + 1)
    hashes = np.zeros(runs, dtype=np.uint64)
    numbers = (numbers ^ (numbers >> np.uint64(7))) * MULTIPLIER
    numbers ^= numbers >> np.uint64(29)
    for offset in range(size):
        hashes = hashes * MULTIPLIER + numbers[offset : offset + runs]
    return hashes


def overlapping(units: dict[str, list[tuple[str, str]]], learnt: Iterable[str]) -> dict[str, list[str]]:
    """For each text, the ids of its units that share a run of 13 words with one of the `learnt` texts."""
    vocabulary: dict[str, int] = {}
    hashed = {name: [(unit, run_hashes(text, vocabulary)) for unit, text in rows] for name, rows in units.items()}
    wanted = [hashes for rows in hashed.values() for _, hashes in rows]
    known = np.unique(np.concatenate(wanted)) if wanted else np.zeros(0, dtype=np.uint64)
    seen = np.zeros(len(known), dtype=bool)
    for text in learnt:
        hashes = run_hashes(text, vocabulary)
        at = np.searchsorted(known, hashes)
        at[at == len(known)] = 0
        if len(known):
            seen[at[known[at] == hashes]] = True
    shared = known[seen]
    return {name: [unit for unit, hashes in rows if np.isin(hashes, shared).any()] for name, rows in hashed.items()}


def texts_of(ids: Iterable[str], kept: bool = False) -> dict[str, list[tuple[str, str]]]:
    """All units of the texts that are here, or only those not left out; absent texts are named on the terminal."""
    found = {}
    for corpus_id in ids:
        try:
            units, _ = corpora.units_of(corpus_id)
        except AbsentText as exc:
            print(f"{corpus_id}: not checked, {exc}")
            continue
        excluded = set(corpora.row_of(corpus_id).get("excluded", [])) if kept else set()
        found[corpus_id] = [(name, text) for name, text in units if name not in excluded]
    return found


def find(kept: bool) -> dict[str, list[str]]:
    """Overlapping units of every calibration and test text, of all units or of the `kept` ones."""
    calibration = texts_of(corpora.available(role="calibration"), kept)
    test = texts_of(corpora.available(role="test"), kept)
    learnt = [text for rows in texts_of(corpora.available(role="train"), kept=True).values() for _, text in rows]
    found = overlapping(calibration | test, learnt)
    asked = [text for name, rows in calibration.items() for unit, text in rows if unit not in set(found[name])]
    for name, units in overlapping(test, asked).items():
        both = {*found[name], *units}
        found[name] = [unit for unit, _ in test[name] if unit in both]
    return found


def set_value(table: str, corpus_id: str, key: str, value: str) -> str:
    """The TOML text with `key = value` in the table `[corpus_id]`, replaced or added as its last key."""
    start = table.index(f"\n[{corpus_id}]\n") + 1
    end = re.compile(r"^\[|^# -{10}", re.M).search(table, start + 1)
    stop = end.start() if end else len(table)
    section, rest = table[start:stop], table[stop:]
    section = re.sub(rf"(?m)^{key} = (\[[^\]]*\]|\"[^\"]*\")\n", "", section)
    body = section.rstrip("\n")
    return table[:start] + f"{body}\n{key} = {value}" + section[len(body) :] + rest


def write(found: dict[str, list[str]]) -> None:
    """Store the units to leave out and the sha256 of what remains."""
    for corpus_id, units in found.items():
        listed = "".join(f'    "{unit}",\n' for unit in units)
        store(corpus_id, "excluded", f"[\n{listed}]" if units else "[]")
    for corpus_id in found:
        store(corpus_id, "text_sha256", f'"{corpora.build(corpus_id).sha256}"')


def store(corpus_id: str, key: str, value: str) -> None:
    write_text(corpora.TABLE, set_value(corpora.TABLE.read_text("utf-8"), corpus_id, key, value))
    corpora.table.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the lists and hashes into evals/corpora.toml")
    arguments = parser.parse_args()
    found = find(kept=not arguments.write)
    for corpus_id, units in found.items():
        print(f"{corpus_id:26} {len(units):>4} units overlap")
    if arguments.write:
        write(found)
    elif worst := {name: units for name, units in found.items() if units}:
        name, units = next(iter(worst.items()))
        raise error(
            f"{sum(map(len, worst.values()))} kept units overlap a training text, the first {name}/{units[0]}",
            "none",
            "train on the pinned packages, or run python -m evals.overlap --write and raise the ids of the texts",
        )


if __name__ == "__main__":
    main_guard(main)
