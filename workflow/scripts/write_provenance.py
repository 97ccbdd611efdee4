"""Where a run's results come from, as one page: commit, versions, weights, texts, licences, hosts, configuration.

python workflow/scripts/write_provenance.py --records results/quality/*/*/perplexity.json --texts results/texts/*.json \
    --hosts results/hosts/local.yaml --preregistration config/preregistration.yaml --config '{...}' --out provenance.md

Nothing is asked of the machine that writes the page: the records say what they were made with.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import yaml

from engine.errors import error, main_guard
from engine.files import sha256, write_text

MADE_WITH = ("commit", "python", "machine", "versions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", nargs="+", required=True, help="JSON with `provenance`")
    parser.add_argument("--texts", nargs="+", required=True, help="results/texts/<text>.json")
    parser.add_argument("--hosts", nargs="*", default=[], help="host profiles")
    parser.add_argument("--measured", nargs="*", default=[], help="records of timed runs, of any machine")
    parser.add_argument("--preregistration", required=True)
    parser.add_argument("--config", required=True, help="the configuration in effect, as JSON")
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    records, measured = ({path: read(path) for path in paths} for paths in (a.records, a.measured))
    parts = [
        "# Where these results come from",
        made_with("Records of this run", records),
        weights(records),
        texts([read(path) for path in a.texts]),
        hosts({path: read(path) for path in a.hosts}),
        made_with("Timed runs of hosts", measured),
        f"## Rules of the claims\n\n`{Path(a.preregistration).name}`, sha256 {sha256(a.preregistration)}.",
        f"## Configuration\n\n```yaml\n{yaml.safe_dump(json.loads(a.config), sort_keys=False, width=110)}```",
    ]
    write_text(a.out, "\n\n".join(part for part in parts if part) + "\n")


def read(path: str) -> dict:
    """A JSON or YAML file; JSON is YAML, but its reader is a hundred times faster."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        value = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as exc:
        raise error(f"{path}: {type(exc).__name__} {exc}", "a record", "delete it and run again") from None
    if not isinstance(value, dict):
        raise error(f"{path} is a {type(value).__name__}", "a record with keys", "delete it and run again")
    return value


# ---- parts of the page -----------------------------------------------------------------------------------------------
def made_with(title: str, records: dict[str, dict]) -> str:
    """One row for all records that were made by the same code with the same versions."""
    groups = defaultdict(list)
    for path, record in records.items():
        facts = record.get("provenance", {})
        groups[tuple(facts.get(name, "not recorded") for name in MADE_WITH)].append(path)
    return table(title, ("records", *MADE_WITH), [(in_short(paths), *facts) for facts, paths in groups.items()])


def in_short(paths: list[str]) -> str:
    """Their number and the folders under results/."""
    folders = dict.fromkeys("/".join(Path(path).parts[1:3]).removesuffix(".json") for path in paths)
    return f"{len(paths)}: {', '.join(folders)}"


def weights(records: dict[str, dict]) -> str:
    """The weights every model computed with. Records without the name of a model say the same in their path."""
    rows = {}
    for record in records.values():
        facts = record.get("provenance", {})
        if "model" in record and "model" in facts:
            row = (record["model"], facts["model"], facts.get("dtype", ""), facts.get("score_rule", ""))
            rows[row[:2]] = tuple(new or old for new, old in zip(row, rows.get(row[:2], row), strict=True))
    return table("Weights", ("model", "sha256 (first 16)", "dtype", "score rule"), list(rows.values()))


def texts(resolved: list[dict]) -> str:
    columns = ("text", "role", "topic", "licence", "documents", "source", "sha256 (first 16)")
    rows = []
    for text in resolved:
        if text.get("status") == "ok":
            sources = text.get("provenance", {}).get("source", [])
            where = ", ".join(":".join(source.split(":")[:2]) for source in sources)  # not the file in a wheel
            last = (len(text["documents"]), where, text["sha256"][:16])
        else:
            last = ("absent", " ".join(str(text.get("reason", "")).split()), "")
        rows.append((*(text.get(name, "") for name in ("id", "role", "topic", "licence")), *last))
    return table("Texts", columns, rows)


def hosts(profiles: dict[str, dict]) -> str:
    rows = []
    for path, host in profiles.items():
        facts = "; ".join(f"{name} {value}" for name, value in (host.get("facts") or {}).items())
        rows.append((host.get("id", ""), host.get("status", ""), ", ".join(host.get("links") or {}), facts, path))
    return table("Hosts", ("host", "status", "links", "facts", "profile"), rows)


def table(title: str, columns: tuple, rows: list[tuple]) -> str:
    """A heading and a table in Markdown; nothing where there are no rows."""
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *rows]
    words = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([f"## {title}", "", *words])


if __name__ == "__main__":
    main_guard(main)
