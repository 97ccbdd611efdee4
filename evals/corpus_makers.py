"""From a file of prose to its units: what is one passage, chapter or article, and how does it read?

A maker takes the verified path and the options of a text and returns `(unit id, text)` pairs in a fixed order. A
unit is the smallest piece that can be left out. An id `name/3` is the third part of `name`: parts of one article
are one cluster for statistics. Makers clean and choose; none draws at random.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from engine.errors import error, nearest

Units = list[tuple[str, str]]


def pack(units: Units, limit: int, glue: str = "") -> Iterator[tuple[str, str]]:
    """Join consecutive units into runs of at most `limit` bytes, named by their first; a longer one stays alone."""
    name, run = "", ""
    for unit_name, text in units:
        if run and len((run + glue + text).encode()) > limit:
            yield name, run
            run = ""
        name, run = (name, run + glue + text) if run else (unit_name, text)
    if run:
        yield name, run


def pack_prose(name: str, paragraphs: list[str], limit: int) -> Units:
    """The parts `name/0`, `name/1`, ... of one article or chapter; a paragraph over `limit` is cut at sentences."""
    pieces = []
    for paragraph in paragraphs:
        sentences = re.split(r"(?<=[.!?])(?<! [A-Z].) (?=\S)", paragraph)
        pieces += [("", text) for _, text in pack([("", text) for text in sentences], limit, " ")]
    parts = [text for _, text in pack(pieces, limit, "\n\n")]
    return [(f"{name}/{number}", text) for number, text in enumerate(parts)]


def slug(title: str) -> str:
    return re.sub(r"\W+", "_", title.lower()).strip("_")


def passages(path: Path, options: dict) -> Units:
    """Wikipedia passages of a question set: each once, cut at its first and last whole sentence.

    BoolQ cuts its passages at a fixed length from the end, so most open in mid-word ("ce that time, chess programs").
    """
    units, seen = [], set()
    for number, row in enumerate(map(json.loads, path.read_text(encoding="utf-8").splitlines())):
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
    """Chapters of the King James text; `books` or `without` choose the books.

    The file is a Python module of one call; it is parsed, never run. With `lead_bytes` a chapter is cut after the
    last verse that fits. The brackets around words the translators supplied ("[was]") are dropped: printed Bibles
    set those words in italics.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    call = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    _, text, starts, ends, sizes = call.args[:5]
    start = {key.value: value.value for key, value in zip(starts.keys, starts.values, strict=True)}
    end = {key.value: value.value for key, value in zip(ends.keys, ends.values, strict=True)}
    number_of = {key.attr: number for number, key in enumerate(sizes.keys, 1)}
    names = options.get("books", options.get("without", []))
    if unknown := set(names) - set(number_of):
        raise error(f"book '{min(unknown)}'", "a book of the Bible", nearest(min(unknown), number_of))
    units = []
    for book in options.get("books") or [book for book in number_of if book not in names]:
        for chapter in sorted({verse // 1000 for verse in start if verse // 1_000_000 == number_of[book]}):
            verses = sorted(verse for verse in start if verse // 1000 == chapter)
            bodies = [text.value[start[verses[0]] : end[verse]] for verse in verses]
            bodies = [re.sub(r"\s*\n\s*", "\n", re.sub(r"[\[\]]", "", body)).strip() for body in bodies]
            fitting = [body for body in bodies if len(body.encode()) <= options.get("lead_bytes", 1 << 60)]
            units.append((f"{book.lower()}_{chapter % 1000}", fitting[-1].replace("’", "'")))
    return units[: options.get("count")]


def novel(path: Path, options: dict) -> Units:
    """Chapters of a hard-wrapped book in parts of `part_bytes`, lines joined into paragraphs, marks of italics off."""
    units = []
    for number, chapter in enumerate(re.split(r"(?m)^Chapter \d+\s*$", path.read_text(encoding="utf-8"))[1:], 1):
        paragraphs = [" ".join(text.split()).replace("_", "") for text in re.split(r"\n\s*\n", chapter)]
        units += pack_prose(f"chapter_{number}", [text for text in paragraphs if text], options["part_bytes"])
    return units


def sentences(path: Path, options: dict) -> Units:
    """One unit a line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(f"line{number}", line.strip()) for number, line in enumerate(lines) if line.strip()]


def wikitext(path: Path, options: dict) -> Units:
    """WikiText-2 raw as it is, tokenised punctuation and ` @-@ ` included, article by article without empty lines."""
    articles, title = {}, ""
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.strip()
        if re.fullmatch(r"= [^=].*[^=] =", line):
            title = f"{len(articles):02}_{slug(line)}"
            articles[title] = []
        if title and line:
            articles[title].append(line)
    return [unit for name, lines in articles.items() for unit in pack_prose(name, lines, options["part_bytes"])]


def topics(path: Path, options: dict) -> Units:
    """The topics of `help()`: prose about the Python language, one topic a unit."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    table = ast.literal_eval(next(node.value for node in tree.body if isinstance(node, ast.Assign)))
    return [(name, re.sub(r"\n\*{5,}\n", "\n", text).strip()) for name, text in sorted(table.items())]
