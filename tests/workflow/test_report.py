"""End to end: `snakemake --report` of a tiny run is one page that a browser opens, with nothing to complain of.

The run and its report are those of test_pipeline.py, where a proxy refused every request while it was made.
"""

from __future__ import annotations

import base64
import html
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from browser import PROGRAM, Browser
from tiny import ABSENT, ROOT, SLOTS, TEST, run_script

OVERVIEW = (ROOT / "workflow" / "report" / "workflow.rst").read_text(encoding="utf-8")
CATEGORIES = set(re.findall(r"^\* \*\*(.+?)\*\*:", OVERVIEW, re.MULTILINE))  # the overview names each
HERE, RAW = "here", "raw data"
SHOWN = ("text/html", "image/png")  # what Snakemake's page shows; anything else it saves
LEVEL = "95 %"  # of the intervals
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt-get install chromium")


@dataclass(frozen=True)
class Report:
    page: Path
    folder: Path  # the results it was made of
    results: dict  # path: {labels, caption, mime_type, data_uri, ...}
    categories: dict  # category: {subcategory: [path]}
    overview: str  # HTML

    def paths(self, category: str, show: str | None = None) -> set[str]:
        paths = itertools.chain.from_iterable(self.categories[category].values())
        return {path for path in paths if show in (None, self.results[path]["labels"]["show"])}

    def file(self, path: str) -> Path:
        return self.folder / path.removeprefix("results/")


@pytest.fixture(scope="module")
def report(story) -> Report:
    text = story.report.read_text(encoding="utf-8")
    names = ("results", "categories", "workflow_desc")
    parts = (re.search(rf'<script id="[a-z-]+">\s*var {name} = (.*);$', text, re.MULTILINE)[1] for name in names)
    return Report(story.report, story.whole, *map(json.loads, parts))


# ---- what is in it ---------------------------------------------------------------------------------------------------
def test_every_result_is_a_page_and_raw_data_in_its_category(report):
    assert report.categories.keys() == CATEGORIES
    for category in CATEGORIES:
        here, raw = report.paths(category, HERE), report.paths(category, RAW)
        assert {report.results[path]["mime_type"] for path in here} <= set(SHOWN)
        names = [sorted(report.results[path]["labels"]["result"] for path in paths) for paths in (here, raw)]
        assert names[0] == names[1] and here | raw == report.paths(category)
    index = report.file("all").read_text(encoding="utf-8")
    listed = {f"results/{name}" for name in re.findall(r"^\| \[([^\]]+)\]", index, re.MULTILINE)}
    left_out = {path for path in listed if not path.endswith((".svg", ".json"))} - report.results.keys()
    # what the points of their figures hold
    assert left_out == {f"results/tables/local/{name}.csv" for name in ("claims_by_documents", "curves")}


def test_every_result_has_a_caption_with_numbers_of_this_run(report):
    for path, result in report.results.items():
        assert len(result["caption"]) > 100, path
        assert "system-message" not in result["caption"] and "{{" not in result["caption"], path
    for path in ("results/tables/local/speed.csv", "results/plots/local/loss_by_mass.png", "results/answer.md"):
        assert LEVEL in report.results[path]["caption"].replace("\n", " "), path
    for name, percent in SLOTS.items():
        assert f"{name} ({percent} %)" in report.results["results/plots/local/token_time.png"]["caption"]
        assert f"{name}: {percent} %" in report.overview
    assert ", ".join(TEST) in report.overview and LEVEL in report.overview
    assert "system-message" not in report.overview and "{{" not in report.overview


@pytest.mark.parametrize("caption", sorted((ROOT / "workflow" / "report").glob("*.rst")), ids=lambda path: path.stem)
def test_no_caption_holds_a_number_typed_by_hand(caption):
    words = re.sub(r"\{%.*?%\}|\{\{.*?\}\}", "", caption.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not re.search(r"\b\d", words)


def test_the_rule_that_made_a_file_stands_beside_it(report):
    made = {path: result["job_properties"]["rule"] for path, result in report.results.items()}
    assert made["results/tables/local/speed.csv"] == "tabulate_speed"
    assert made["results/plots/local/token_time.png"] == "plot_figure"
    assert made["results/pages/answer.md.html"] == "write_pages" and made["results/answer.md"] == "write_answer"


def test_provenance_names_weights_texts_hosts_and_configuration(report):
    page = report.file("provenance.md").read_text(encoding="utf-8")
    record = json.loads(report.file("quality/tiny/rule_015/perplexity.json").read_text(encoding="utf-8"))
    facts = record["provenance"]
    for fact in (facts["commit"], facts["versions"], f"| tiny | {facts['model']} | float32 | softmax |"):
        assert fact in page
    for text in TEST:
        assert re.search(rf"^\| {text} \| test \| \w+ \| ours \| 5 \| tests \| {text}", page, re.MULTILINE)
    assert re.search(rf"^\| {ABSENT} \| test .*\| absent \| .*EXPERTMISS_DATA is not set", page, re.MULTILINE)
    assert "| rtx3090_pcie4 | modelled |" in page and "slots:\n  s25: 25\n" in page


# ---- in a browser ----------------------------------------------------------------------------------------------------
@needs_chromium
def test_chromium_shows_every_result_without_an_error_or_a_request(report, tmp_path):
    with Browser(tmp_path / "profile") as browser:
        browser.open(report.page)
        browser.wait("document.querySelector('#app').innerText.includes('This run')")
        assert browser.evaluate("document.querySelector('#loading-screen').style.display") == "none"
        browser.wait("document.querySelectorAll('#rulegraph canvas, #rulegraph svg').length > 0")
        for category in sorted(CATEGORIES):
            click(browser, f"[...document.querySelectorAll('#app li a')].find(a => a.innerText.trim() == '{category}')")
            names = {report.results[path]["labels"]["result"] for path in report.paths(category, HERE)}
            rows = "[...document.querySelectorAll('#app table.w-full tbody tr')]"
            browser.wait(f"{rows}.length == {len(names)}")
            assert set(browser.evaluate(f"{rows}.map(row => row.cells[0].innerText.trim())")) == names
            seen = {look_at_row(browser, f"{rows}[{number}]") for number in range(len(names))}
            assert seen == report.paths(category, HERE)
            browser.evaluate("app.setView({navbarMode: 'menu'})")
        click(browser, "[...document.querySelectorAll('#app li a')].find(a => a.innerText.trim() == 'Statistics')")
        browser.wait("document.querySelectorAll('#app canvas, #app svg.marks').length > 0")
        assert browser.complaints() == []


def click(browser: Browser, element: str) -> None:
    browser.wait(f"Boolean({element})")
    browser.evaluate(f"{element}.click()")


def look_at_row(browser: Browser, row: str) -> str:
    """Open the result of a row and its description, and come back. Returns its path."""
    click(browser, f"{row}.querySelectorAll('a')[0]")
    path = browser.evaluate("app.state.resultPath")
    if path.endswith(".png"):
        shown = "image => image.src == app.state.contentPath && image.naturalWidth > 300"
        browser.wait(f"[...document.images].some({shown})")
    else:
        name = path.removeprefix("results/pages/").removesuffix(".html")
        browser.wait(f"document.title == '{name}' && document.body.innerText.length > 5", frame=1)
        links = "[...document.querySelectorAll('a[href^=\"#\"]')]"
        assert browser.evaluate(f"{links}.every(a => document.getElementById(a.hash.slice(1)))", frame=1)
        assert (browser.evaluate(f"{links}.length", frame=1) > 0) == (name == "claims.md")
        if name == "claims.md":
            browser.evaluate(f"{links}.at(-1).click()", frame=1)
            browser.wait("scrollY > 0", frame=1)
    click(browser, f"{row}.querySelectorAll('a')[1]")
    browser.wait("document.querySelector('#app').innerText.includes('DESCRIPTION')")
    browser.evaluate("app.setView({navbarMode: 'subcategory'})")
    browser.wait(f"Boolean({row})")
    return path


@needs_chromium
@pytest.mark.parametrize(
    "body, complaint",
    [
        ("<script>console.error('no good')</script>", "no good"),
        ("<script>undefined.name</script>", "TypeError"),
        ('<img src="http://127.0.0.1:9/x.png">', "asked for http://127.0.0.1:9/x.png"),
        ('<img src="beside.png">', "beside.png"),
    ],
)
def test_what_the_browser_complains_of_is_seen(tmp_path, body, complaint):
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><title>bad</title>{body}", encoding="utf-8")
    with Browser(tmp_path / "profile") as browser:
        browser.open(page)
        assert complaint in "\n".join(browser.complaints())


@needs_chromium
def test_rows_of_a_table_are_found_by_words(tmp_path):
    source = tmp_path / "table.csv"
    source.write_text("policy,text,loss\nfetch_lru,bible,0\nrule_015,bible,1.5\nrule_015,code,2\n", encoding="utf-8")
    assert run_script("write_pages.py", source, "--root", tmp_path, "--out", tmp_path).code == 0
    with Browser(tmp_path / "profile") as browser:
        browser.open(tmp_path / "table.csv.html")
        browser.evaluate("document.querySelector('input').value = 'RULE bible'")
        browser.evaluate("document.querySelector('input').dispatchEvent(new Event('input'))")
        assert browser.evaluate("document.querySelector('output').textContent") == "1 of 3 rows"
        assert browser.evaluate("document.body.innerText").count("bible") == 1
        assert browser.complaints() == []


# ---- pages -----------------------------------------------------------------------------------------------------------
def test_golden_a_table_says_a_constant_column_once_and_shortens_fractions_alone(tmp_path):
    source = tmp_path / "table.csv"
    source.write_text('text,level,loss,note\na,0.95,1.23456789,<b>\nb,0.95,1200034,"x, y"\n', encoding="utf-8")
    assert run_script("write_pages.py", source, "--root", tmp_path, "--out", tmp_path / "pages").code == 0
    page = (tmp_path / "pages" / "table.csv.html").read_text(encoding="utf-8")
    assert "The same in every row: level 0.95." in page
    rows = re.findall(r"<tr>(<td.*?)</tr>", page)
    cells = [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows]
    assert cells == [["a", "1.2346", "<b>"], ["b", "1200034", "x, y"]] and "<b>" not in page


def test_golden_markdown_keeps_tables_and_links_to_its_headings(tmp_path):
    source = tmp_path / "page.md"
    source.write_text("# P1.1a\n\n[there](#p11a) <script>x</script>\n\n| a |\n|---|\n| b |\n", encoding="utf-8")
    assert run_script("write_pages.py", source, "--root", tmp_path, "--out", tmp_path).code == 0
    page = (tmp_path / "page.md.html").read_text(encoding="utf-8")
    assert '<h1 id="p11a">' in page and '<a href="#p11a">' in page and "<td>b</td>" in page and "<script>x" not in page


@pytest.mark.parametrize("name", ["table.txt", "absent.csv", "../outside.md"])
def test_a_file_that_no_page_can_be_made_of_is_named(tmp_path, name):
    for present in ("table.txt", "outside.md"):
        (tmp_path / present).write_text("x\n", encoding="utf-8")
    folder = tmp_path / "results"
    folder.mkdir()
    (tmp_path / "table.txt").rename(folder / "table.txt")
    ended = run_script("write_pages.py", folder / name, "--root", folder, "--out", tmp_path / "pages")
    assert Path(name).name in ended.message


def test_raw_data_in_the_report_is_the_file_to_the_byte(report):
    for path in ("results/tables/local/quality.csv", "results/claims.md"):
        data = report.results[path]["data_uri"].partition("base64,")[2]
        assert base64.b64decode(data) == report.file(path).read_bytes()
