"""Markdown and CSV files as pages of HTML that need nothing else: `snakemake --report` shows these on screen.

python workflow/scripts/write_pages.py results/answer.md results/tables/local/quality.csv --root results --out pages

A page lies under --out where its file lies under --root, with `.html` after its name. A table says a column that is the
same in every row once, above the rows, and shortens numbers to DIGITS; the file itself has all of them.
"""

import argparse
import csv
import html
import io
import itertools
import re
from pathlib import Path

from markdown_it import MarkdownIt

from engine.errors import error, main_guard
from engine.files import write_text

DIGITS = 5
FRACTION = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?")
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1e293b; margin: 1.2rem 1.6rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2em; } h3 { font-size: 1rem; margin-top: 1.6em; }
p, ul { max-width: 60rem; } a { color: #047857; } code, pre { font-size: 0.92em; } pre { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.92em; font-variant-numeric: tabular-nums; margin: 1em 0; }
th, td { border-bottom: 1px solid #e2e8f0; padding: 0.25em 0.7em; text-align: left; vertical-align: top; }
th { background: #f1f5f9; position: sticky; top: 0; }
td { max-width: 34rem; } td.number { text-align: right; white-space: nowrap; }
.rows { width: max-content; } .rows td { max-width: 24rem; }
tr:hover td { background: #ecfdf5; } input { font: inherit; padding: 0.3em 0.6em; width: 24rem; max-width: 90%; }
"""
FILTER = """
const rows = [...document.querySelectorAll("tbody tr")], said = document.querySelector("output");
document.querySelector("input").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(" ").filter(Boolean);
  for (const row of rows) {
    const cells = [...row.cells].map(cell => cell.textContent.toLowerCase());
    row.hidden = !words.every(word => cells.some(cell => cell.includes(word)));
  }
  said.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} rows`;
});
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="*.md or *.csv")
    parser.add_argument("--root", required=True, type=Path, help="folder that the files lie under")
    parser.add_argument("--out", required=True, type=Path, help="folder of the pages")
    a = parser.parse_args()
    for path in a.files:
        if path.suffix not in BODIES:
            raise error(f"{path}: no page is made of it", f"a file {' or '.join(BODIES)}", "leave it out")
        try:
            text, name = path.read_text(encoding="utf-8"), path.resolve().relative_to(a.root.resolve())
        except (OSError, ValueError) as exc:  # also no UTF-8
            raise error(f"{path}: {exc}", f"a text under {a.root}", "make it first") from None
        write_text(a.out / f"{name}.html", page(str(name), BODIES[path.suffix](text)))


def page(title: str, body: str) -> str:
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}</body></html>\n'


def of_markdown(text: str) -> str:
    """Markdown with tables. A heading can be linked to by the name that code hosts give it."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    for opening, inline in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", re.sub(r"[^\w\- ]", "", inline.content.lower()).replace(" ", "-"))
    return markdown.renderer.render(tokens, markdown.options, {})


def of_csv(text: str) -> str:
    """A table whose rows can be filtered by words."""
    header, *rows = csv.reader(io.StringIO(text))
    if not rows:
        return "<p>No rows.</p>\n"
    columns = list(zip(header, zip(*rows, strict=True), strict=True))
    same = {name: cells[0] for name, cells in columns if len(set(cells)) == 1 and len(rows) > 1}
    kept = [(name, cells) for name, cells in columns if name not in same]
    facts = ", ".join(f"{name} {cell}" for name, cell in same.items() if cell)
    lines = [f"<p>The same in every row: {html.escape(facts)}.</p>"] if facts else []
    lines += [f'<p><input placeholder="show rows with these words"> <output>{len(rows)} rows</output></p>']
    heads = "".join(f"<th>{html.escape(name)}</th>" for name, _ in kept)
    lines += [f'<table class="rows"><thead><tr>{heads}</tr></thead><tbody>']
    for row in zip(*(cells for _, cells in kept), strict=True):
        lines.append(f"<tr>{''.join(map(cell_of, row))}</tr>")
    return "\n".join([*lines, "</tbody></table>", f"<script>{FILTER}</script>", ""])


def cell_of(text: str) -> str:
    if FRACTION.fullmatch(text):
        return f'<td class="number">{float(text):.{DIGITS}g}</td>'
    kind = ' class="number"' if text.lstrip("-").isdecimal() else ""
    return f"<td{kind}>{html.escape(text)}</td>"


BODIES = {".csv": of_csv, ".md": of_markdown}

if __name__ == "__main__":
    main_guard(main)
