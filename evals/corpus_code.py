"""Python source as text: whole functions and classes, cleaned of what a reader would skip.

Left out: licence headers, tests, vendored copies, generated files, data tables, blocks seen before (packages copy
each other's functions). Source that does not parse on this Python is left out too. Large classes are cut between
methods, so a piece is always a run of whole definitions.

The training side reads what is installed here, so its text depends on the environment: its provenance lists every
package with version and licence, and its sha256 is taken when it is built.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from engine.errors import error
from evals.corpus_makers import Units, pack, slug

SKIPPED_FOLDERS = {
    *(
        "_vendor",
        "vendor",
        "vendored",
        "_vendored_packages",
        "externals",
        "extern",
        "_external",
        "third_party",
    ),
    *("test", "tests", "testing", "_test", "idlelib", "lib2to3", "turtledemo", "site-packages", "pydoc_data"),
    *(
        "encodings",
        "unicode",
        "unicodedata",
        "_generated",
        "include",
        "ensurepip",
        "__pycache__",
        "deprecated",
    ),
}
SKIPPED_NAMES = re.compile(r"(^|_)(tests?|generated|tables?|parsetab|unicode_?data|mapping|entities|pb2)(_|\.|$)")
PIECE_BYTES = 6_000


def strip_header(source: str) -> str:
    """Drop the shebang and the opening comment block (a licence, an author list, an encoding line)."""
    lines = source.splitlines()
    first = 0
    while first < len(lines) and (not lines[first].strip() or lines[first].startswith("#")):
        first += 1
    return "\n".join(lines[first:])


def is_table(block: str) -> bool:
    """Does a block hold data rather than code or prose? Digits, symbols and foreign scripts outweigh words there."""
    size = max(len(block), 1)
    letters = sum(character.isalpha() for character in block) / size
    digits = sum(character.isdigit() for character in block) / size
    foreign = sum(ord(character) > 127 for character in block) / size
    longest = max(map(len, block.splitlines() or [""]))
    return (size > 300 and (letters < 0.4 or digits > 0.15)) or foreign > 0.03 or longest > 200


def definitions(source: str, limit: int) -> list[tuple[str, str]]:
    """Name and text of each top-level statement run, in file order; a class over `limit` bytes is cut into methods.

    Comments directly above a definition stay with it, and so do the blank lines below it. Raises SyntaxError
    for source of another Python.
    """
    lines = source.splitlines()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        nodes: list[ast.stmt] = list(ast.parse(source).body)
    while True:  # replace a class that is too long by its opening and its methods
        for at, node in enumerate(nodes):
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if isinstance(node, ast.ClassDef) and len(text.encode()) > limit and len(node.body) > 1:
                nodes[at : at + 1] = [
                    ast.copy_location(ast.Pass(lineno=0, col_offset=0), node),
                    *node.body[1:],
                ]
                nodes[at].end_lineno = node.body[1].lineno - 1
                nodes[at].name = node.name
                break
        else:
            break
    starts = []
    for node in nodes:
        start = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))]) - 1
        while start and lines[start - 1].lstrip().startswith("#"):
            start -= 1
        starts.append(max(start, starts[-1] + 1 if starts else 0))
    found = []
    for node, start, stop in zip(nodes, starts, [*starts[1:], len(lines)], strict=True):
        found.append((getattr(node, "name", ""), "\n".join(lines[start:stop]) + "\n"))
    return found


def source_units(path: Path, label: str, seen: set[bytes]) -> Units:
    """The cleaned pieces of one file; `seen` collects the hashes of blocks over all files."""
    try:
        source = path.read_text(encoding="utf-8")
        head = source[:1500].lower()
        if "generated" in head and ("do not edit" in head or "automatically" in head or "auto-generated" in head):
            return []
        blocks = definitions(strip_header(source).expandtabs(4), PIECE_BYTES)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return []  # not source of this Python: nothing to learn from
    kept = []
    for name, block in blocks:
        digest = hashlib.sha256("".join(block.split()).encode()).digest()[:12]
        short = len(block) < 120
        if is_table(block) or len(block.encode()) > 4 * PIECE_BYTES or (digest in seen and not short):
            continue
        seen.add(digest)
        kept.append((name, block))
    runs = [text.strip("\n").rstrip() for _, text in pack(kept, PIECE_BYTES)]
    return [(f"{label}#{number}", text) for number, text in enumerate(runs) if len(text) >= 200]


def python_files(root: Path) -> list[Path]:
    """The `.py` files under `root` worth reading, in an order that does not depend on the file system."""
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        skipped = SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or SKIPPED_NAMES.search(path.name.lower())
        if not skipped and 400 < path.stat().st_size < 300_000:
            found.append(relative)
    # by hash of the name: a package cut at `package_bytes` is a sample of all its folders
    found.sort(key=lambda relative: hashlib.sha256(relative.as_posix().encode()).hexdigest())
    return [root / relative for relative in found]


def standard_library(path: Path | None, options: dict) -> tuple[Units, list[str]]:
    """The source of this interpreter's standard library."""
    root, seen, units = Path(sysconfig.get_path("stdlib")), set(), []
    for file in python_files(root):
        units += source_units(file, file.relative_to(root).as_posix(), seen)
    return units, [f"CPython {sysconfig.get_config_var('py_version')}"]


def package_roots(name: str) -> tuple[str, list[Path]]:
    """Version and import folders of an installed distribution. Raises PackageNotFoundError."""
    found = distribution(name)
    tops = {file.parts[0] for file in found.files or [] if file.suffix == ".py" and len(file.parts) > 1}
    roots = [Path(found.locate_file(top)) for top in sorted(tops) if not top.startswith((".", "__"))]
    return found.version, [root for root in roots if root.is_dir() and root.suffix != ".data"]


def installed(options: dict, units_of) -> tuple[Units, list[str]]:
    """Units of every listed package that is installed, with name, version and licence of each, and the missing."""
    units, origin, seen = [], [], set()
    for name, licence in sorted(options["packages"].items()):
        try:
            version, roots = package_roots(name)
        except PackageNotFoundError:
            origin.append(f"{name}: not installed")
            continue
        budget = options.get("package_bytes", 1 << 60)
        for root in roots:
            for file in python_files(root):
                if budget <= 0:
                    break
                fresh = units_of(file, f"{root.name}/{file.relative_to(root).as_posix()}", seen)
                budget -= sum(len(text.encode()) for _, text in fresh)
                units += fresh
        origin.append(f"{name} {version} ({licence})")
    return units, origin


def installed_code(path: Path | None, options: dict) -> tuple[Units, list[str]]:
    """Source of the installed packages, at most `package_bytes` each."""
    return installed(options, source_units)


def docstring_units(path: Path, label: str, seen: set[bytes]) -> Units:
    """The docstrings of one file over 400 characters, each once (scientific packages repeat them)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return []
    units = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        text = ast.get_docstring(node) or ""
        digest = hashlib.sha256(" ".join(text.split())[:300].encode()).digest()[:12]
        if len(text) < 400 or len(text) > 20_000 or digest in seen or is_table(text):
            continue
        seen.add(digest)
        units.append((f"{label}:{getattr(node, 'name', 'module')}", text.strip()))
    return units


def installed_docstrings(path: Path | None, options: dict) -> tuple[Units, list[str]]:
    """Docstrings of the scientific packages: prose about mathematics, statistics, plotting and tables."""
    return installed(options, docstring_units)


def wheel_functions(path: Path, options: dict) -> Units:
    """One unit a module of a wheel: its first run of whole definitions that fits `lead_bytes`, in `modules` order."""
    units = []
    with zipfile.ZipFile(path) as archive:
        for module in options["modules"]:
            source = strip_header(archive.read(module).decode()).expandtabs(4)
            blocks = [block for block in definitions(source, options["lead_bytes"]) if block[0]]
            runs = pack(blocks, options["lead_bytes"])
            fitting = [text for _, text in runs if 1_000 <= len(text.encode()) <= options["lead_bytes"]]
            if not fitting:
                raise error(
                    f"{path.name}: {module} has no run of definitions",
                    f"1000 to {options['lead_bytes']} bytes",
                    "choose another module",
                )
            units.append((slug(module.removesuffix(".py")), fitting[0].strip("\n").rstrip()))
    return units
