"""A file against its JSON schema, with errors that a user can mend: file, key, value, what was expected.

jsonschema's messages say what was found; ours say what was expected, by the keyword that failed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import jsonschema

from engine.errors import error, nearest

EXPECTED = {
    "anyOf": lambda branches: "'all' or " + ("a whole number from 1" if "type" in branches[1] else "a list of ids"),
    "const": lambda value: json.dumps(value),
    "enum": lambda values: "one of " + ", ".join("null" if value is None else value for value in values),
    "exclusiveMaximum": lambda value: f"a number below {value}",
    "exclusiveMinimum": lambda value: f"a number above {value}",
    "maximum": lambda value: f"a number up to {value}",
    "minItems": lambda value: "at least one",
    "minLength": lambda value: f"words of at least {value} letters",
    "minProperties": lambda value: "at least one",
    "minimum": lambda value: f"a number from {value}",
    "pattern": lambda value: "letters, digits, '_' or '-' (ids become file names)",
    "type": lambda value: " or ".join(TYPES.get(name, f"a {name}") for name in _as_list(value)),
    "uniqueItems": lambda value: "every id once",
}
TYPES = {"array": "a list", "integer": "a whole number", "null": "null", "object": "keys with values"}


def _as_list(value: object) -> list:
    return value if isinstance(value, list) else [value]


class Origin(dict):
    """The file that a top-level key comes from."""

    def __init__(self, where: str | Mapping[str, str]) -> None:
        super().__init__({} if isinstance(where, str) else where)
        self.all = where if isinstance(where, str) else " + ".join(dict.fromkeys(where.values()))

    def __missing__(self, key: str) -> str:
        return self.all


def check_schema(value: object, where: str | Origin, schema_path: Path, manual: str) -> None:
    """UserError on the first thing wrong; unknown keys first, as the likeliest reason that another is missing."""
    where = where if isinstance(where, Origin) else Origin(where)
    schema = json.loads(schema_path.read_text(encoding="utf-8"))
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(value))
    for wrong in errors:
        if wrong.validator == "additionalProperties":
            known = wrong.schema["properties"]
            extra = next(key for key in wrong.instance if key not in known)
            origin = where[_top(wrong, extra)]
            raise error(f"{origin}: {_key(wrong)} has a key '{extra}'", "a known key", nearest(extra, known))
    wrong = jsonschema.exceptions.best_match(errors)
    if wrong is not None:
        if wrong.validator == "required":
            missing = next(key for key in wrong.validator_value if key not in wrong.instance)
            origin = where[_top(wrong, missing)]
            raise error(f"{origin}: {_key(wrong)} has no key '{missing}'", f"all keys of {manual}", "add it")
        expected = EXPECTED.get(wrong.validator, lambda _: wrong.message)(wrong.validator_value)
        hint = f"see {manual}"
        if isinstance(wrong.instance, bool):
            hint = "YAML reads yes, no, on and off as booleans: put the word in quotes"
        raise error(f"{where[_top(wrong)]}: {_key(wrong)} is {_shown(wrong.instance)}", expected, hint)
    for path, number in _numbers(value):
        if not math.isfinite(number):  # NaN passes every limit of a schema
            origin = where[path.partition(".")[0]]
            raise error(f"{origin}: {path} is {number}", "a finite number", f"see {manual}")


def _top(wrong: jsonschema.ValidationError, key: str = "") -> str:
    """The top-level key that is wrong; `key` where the file as a whole has or lacks it."""
    return str(wrong.absolute_path[0]) if wrong.absolute_path else key


def _key(wrong: jsonschema.ValidationError) -> str:
    name = ".".join(str(part) for part in wrong.absolute_path) or "the file"
    return f"a key of {name}" if "propertyNames" in wrong.absolute_schema_path else name


def _shown(value: object) -> str:
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _numbers(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Every float of a parsed configuration with its key."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _numbers(part, f"{path}.{key}".lstrip("."))
    if isinstance(value, float):
        yield path, value
