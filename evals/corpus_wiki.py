"""Wikipedia articles as prose: the paragraphs of a dump, without its markup.

Only paragraphs that come out clean are kept. Citations, pronunciations, pictures, tables, lists and headings are
dropped; links become their text; a few templates that carry words (`{{convert|5|km}}`, `{{lang|el|...}}`) become
those words. A paragraph with a formula, or with any template not known to be empty of words, is left out whole, for
removing it would leave a hole in a sentence.
"""

from __future__ import annotations

import bz2
import html
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from evals.corpus_makers import Units, pack, pack_prose, slug

HOLE = "\0"  # stands for a template whose words cannot be rendered: its paragraph is left out
TAIL = "see also|references|external links|notes|further reading|bibliography|footnotes|sources|citations"
# first argument, second argument, or none at all, by template name
FIRST = {
    "abbr",
    "as of",
    "circa",
    "lang-en",
    "linktext",
    "nihongo",
    "nobr",
    "nowrap",
    "quote",
    "sc",
    "smallcaps",
    "unicode",
}
SECOND = {"lang", "transl", "transliteration", "lang-la-x"}
EMPTY = re.compile(
    r"(cite|citation|cn|fact|clarify|who|when|which|by whom|page needed|sfn|harv|efn|refn|note|ref|rp|ipa|respell|audio"
    r"|lang-|pron|pp-|use |about|for$|main|see|further|other|redirect|distinguish|hatnote|infobox|taxobox|sidebar"
    r"|portal|coord|dead link|verify|failed|better|according|dubious|relevance|update|anchor|clear|toc|multiple"
    r"|multi|expand|refimprove|disputed|original|specify|vague|where|quantify|sic|original research|full|check|nb"
    r"|shy|short description|good article|featured|semiprotect|wikt|sisterlinks|commons|col|div|reflist|image"
    r"|#tag|self|third|unreferenced|pov|synthesis|over|cleanup|lead|pic|tree|css|panorama|gallery|split|merge)"
)


def render_template(body: str) -> str:
    """The words a template stands for: none for notes and boxes, HOLE if unknown."""
    name, *rest = [part.strip() for part in body.split("|")]
    name = name.lower().replace("_", " ").split("\n")[0]
    arguments = [part for part in rest if "=" not in part]
    if name in FIRST and arguments:
        return ("c. " if name == "circa" else "As of " if name == "as of" else "") + arguments[0]
    if name in SECOND and len(arguments) > 1:
        return arguments[1]
    if name in ("convert", "cvt") and len(arguments) > 1:
        if arguments[1] in ("-", "to", "by", "and", "x", "–") and len(arguments) > 3:
            return f"{arguments[0]} {arguments[1]} {arguments[2]} {arguments[3]}"
        return f"{arguments[0]} {arguments[1]}"
    return "" if EMPTY.match(name) else HOLE


def strip_markup(source: str) -> list[str]:
    """The clean prose paragraphs of one article, in order."""
    text = re.sub(r"<!--.*?-->", "", source, flags=re.S)
    text = re.split(rf"(?im)^==\s*(?:{TAIL})\b[^=\n]*==", text)[0]
    text = re.sub(r"<ref[^>/]*/>", "", text, flags=re.I)
    text = re.sub(r"<ref\b.*?</ref\s*>", "", text, flags=re.S | re.I)
    text = re.sub(r"(?s)<(gallery|timeline|imagemap|syntaxhighlight|source|pre|table)\b.*?</\1>", "\n\n", text)
    text = re.sub(r"(?s)<(math|score|chem|code)\b.*?</\1>", HOLE, text)
    text = drop_tables(text)
    found = 1
    while found:  # innermost templates first
        text, found = re.subn(r"\{\{([^{}]*)\}\}", lambda match: render_template(match[1]), text)
    for _ in range(5):  # pictures whose captions hold links
        text = re.sub(r"\[\[([^\[\]|]*)(?:\|([^\[\]|]*))?\]\]", render_link, text)
        text = re.sub(r"\[\[(?:File|Image)\s*:[^\[\]]*\]\]", "", text, flags=re.I)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)+([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[(?:https?:)?//\S+\s*([^\]]*)\]", r"\1", text)
    text = re.sub(r"<br\s*/?>", " ", text, flags=re.I)
    text = re.sub(r"</?(?:sub|sup|small|big|i|b|em|strong|span|div|blockquote|nowiki|center|u|p|cite|var|abbr)"
                  r"\b[^>]*>", "", text, flags=re.I)  # fmt: skip
    text = html.unescape(html.unescape(text)).replace("\u00a0", " ").replace("\u200e", "")
    text = re.sub(r"'{2,5}", "", text)
    return [clean for line in text.split("\n") if (clean := clean_paragraph(line))]


def drop_tables(text: str) -> str:
    """The text without `{| ... |}`, which may nest."""
    kept, depth = [], 0
    for line in text.split("\n"):
        mark = line.lstrip(" :")[:3]
        depth += mark.startswith("{|")
        if not depth:
            kept.append(line)
        elif mark.startswith("|}") and mark != "|}}":
            depth -= 1
    return "\n".join(kept)


def render_link(match: re.Match) -> str:
    target, words = match[1], match[2]
    if re.match(r"(?i)\s*(category|file|image)\s*:", target):
        return ""
    return words or target.lstrip(":")


def clean_paragraph(line: str) -> str:
    """One paragraph with the punctuation that removed notes leave behind mended; empty if it is not clean prose."""
    if not line.strip() or line[0] in "*#:;|!=-{}" or HOLE in line:
        return ""
    line = re.sub(r"\([\s,;:–-]*", "(", line)
    line = re.sub(r"[\s,;:]*\(\s*(?:or|and|also|in)?\s*\)", "", line)
    line = re.sub(r"([,;:])\s*(?:[,;:]\s*)+", r"\1 ", line)
    line = re.sub(r"\s+([,.;:)])", r"\1", line)
    line = re.sub(r"[,;]\)", ")", re.sub(r"\s+", " ", line)).strip()
    foreign = sum(ord(character) > 0x24F and character not in "–—‘’“”…′″−°" for character in line)
    if len(line) < 150 or foreign > 0.02 * len(line) or re.search(r"[{}\[\]<>|=]|https?:", line):
        return ""
    return line if re.search(r"[.!?][\"'”’)]*$", line) else ""


def articles(path: Path) -> dict[str, str]:
    """Title to markup of every page of a dump that is no redirect, in the order of the dump."""
    found = {}
    with bz2.open(path) as handle:
        root = ElementTree.parse(handle).getroot()
    space = root.tag.split("}")[0] + "}"
    for page in root.iter(f"{space}page"):
        markup = page.find(f"{space}revision/{space}text").text or ""
        if not markup.lower().lstrip().startswith("#redirect"):
            found[page.find(f"{space}title").text] = markup
    return found


def wikipedia(path: Path, options: dict) -> Units:
    """One unit an article: its title, then its paragraphs, in `titles` order or all articles `without` some.

    With `lead_bytes`, only as many opening paragraphs as fit. Articles of fewer than three clean paragraphs
    (disambiguation pages, lists) are no units.
    """
    pages = articles(path)
    named = options.get("titles") or [title for title in pages if title not in options["without"]]
    units = []
    for title in named:
        paragraphs = strip_markup(pages[title])
        if len(paragraphs) < 3:
            continue
        unit = slug(title)
        if limit := options.get("lead_bytes"):
            opening = next(pack([("", title), *(("", text) for text in paragraphs)], limit, "\n\n"))
            units.append((unit, opening[1]))
        else:
            units += pack_prose(unit, [title, *paragraphs], options["part_bytes"])
    return units
