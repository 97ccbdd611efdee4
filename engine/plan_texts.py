"""How many tokens do the test texts of a configuration have? As a run counted them, or estimated from the texts.

    texts = Texts.of(["bible_test", "humaneval"], "results/published/tables")
    texts.tokens, texts.of_kind("unknown")

evals/corpora.toml has the bytes of the files that texts are made from, some of them compressed, others used in part: no
measure of a text. A text that no run counted is estimated once it is resolved, by its bytes and the bytes a token of
those that were counted; before, nothing is said of it. Tokens are those of the models of that run.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from engine.errors import error
from engine.plan_counts import FROM_EMPTY

RESOLVED = Path("results/texts")


@dataclass(frozen=True)
class Texts:
    """kinds: by text, recorded (a run counted its tokens), estimated, absent (a run skips it) or unknown."""

    kinds: dict[str, str]
    tokens: int | None  # of all but unknown ones together; None where nothing else is there
    bytes_a_token: float  # of recorded texts

    @classmethod
    def of(cls, texts: list[str], tables: str | Path, resolved: str | Path = RESOLVED) -> Texts:
        """UserError where there are no tables, or a resolved text cannot be read."""
        counted = _counted(Path(tables) / "quality.csv")
        bytes_a_token = sum(size for _, size in counted.values()) / sum(tokens for tokens, _ in counted.values())
        kinds, sum_of_tokens = {}, 0
        for text in texts:
            if text in counted:
                kinds[text], tokens = "recorded", counted[text][0]
            else:
                kinds[text], size = _resolved(Path(resolved) / f"{text}.json")
                tokens = round(size / bytes_a_token)
            sum_of_tokens += tokens
        known = set(kinds.values()) != {"unknown"}
        return cls(kinds, sum_of_tokens if known else None, bytes_a_token)

    def of_kind(self, kind: str) -> list[str]:
        return [text for text, found in self.kinds.items() if found == kind]


def _counted(path: Path) -> dict[str, tuple[int, int]]:
    """Tokens and bytes of every text that a run scored."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            found = {r["text"]: (int(r["tokens"]), int(r["bytes"])) for r in csv.DictReader(file) if r["tokens"]}
    except OSError as exc:
        raise error(f"{path}: {exc.strerror}", "tables of a run", FROM_EMPTY) from None
    if not found:
        raise error(f"{path}: no text with tokens", "a run that scored one", FROM_EMPTY)
    return found


def _resolved(path: Path) -> tuple[str, int]:
    """Its kind, and the bytes of its documents."""
    if not path.is_file():
        return "unknown", 0
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["status"] != "ok":
            return "absent", 0
        return "estimated", sum(len(document["text"].encode()) for document in value["documents"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        found = f"{path}: {type(exc).__name__} {exc}"
        raise error(found, "a text that resolve_text.py wrote", "move the file away, it is made again") from None
