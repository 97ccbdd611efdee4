"""The configuration of a run, read and checked before the first job: config.yaml, its sheets and its schema.

settings = load("config/config.yaml")           # or check(config) of an already parsed mapping
settings.models["reference"].source
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import yaml

from engine.errors import error, nearest
from engine.policies import BASELINE, ID, Policy, load_policies
from evals.corpora import available, row_of, table

SCHEMA = Path(__file__).parent.parent / "workflow" / "schemas" / "config.schema.json"
MODEL_COLUMNS = ("id", "source", "revision", "dtype")
DTYPES = ("bfloat16", "float16", "float32")
PACKED = "model.int8.safetensors"  # a source folder with this file is unpacked by a rule first


@dataclass(frozen=True)
class Model:
    """One row of the sheet of models. source: a folder (Hugging Face layout, or packed) or a hub id."""

    id: str
    source: str
    revision: str | None
    dtype: str

    @property
    def packed(self) -> bool:
        return (Path(self.source) / PACKED).is_file()


@dataclass(frozen=True)
class Settings:
    models: dict[str, Model]
    policies: dict[str, Policy]
    calibration_texts: tuple[str, ...]
    test_texts: tuple[str, ...]
    slots: dict[str, float]  # id: percent of E
    context_tokens: int
    delay_tokens: int
    threads: int
    documents: int | None  # the first documents of each text alone
    statistics: dict[str, float | int]


def load(path: str | Path) -> Settings:
    path = Path(path)
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise error(f"{path}: {exc.strerror}", "a configuration", "copy config/config.yaml") from None
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise error(f"{path}: {exc}", "valid YAML in UTF-8", "mend the file") from None
    return check(config, str(path))


def check(config: object, where: str = "config/config.yaml") -> Settings:
    """Validate a parsed configuration and everything it names. UserError names file, key and value."""
    check_schema(config, where, SCHEMA, "config/README.md")
    policies = load_policies(config["policies_sheet"])
    if config["policies"] != "all":
        for name in config["policies"]:
            if name not in policies:
                raise error(
                    f"{where}: policies names '{name}'", f"ids of {config['policies_sheet']}", nearest(name, policies)
                )
        policies = {name: policies[name] for name in config["policies"]}
    if BASELINE not in policies:
        raise error(
            f"{where}: policies without {BASELINE}", "the baseline among them", "add it: losses are paired with it"
        )
    sheet = load_models(config["models_sheet"])
    for name in config["models"]:
        if name not in sheet:
            raise error(f"{where}: models names '{name}'", f"ids of {config['models_sheet']}", nearest(name, sheet))
    for role in ("calibration", "test"):
        for text in config["texts"][role]:
            if text not in table():
                raise error(
                    f"{where}: texts.{role} names '{text}'",
                    f"ids of evals/corpora.toml of role {role}",
                    nearest(text, available(role=role)),
                )
            if row_of(text)["role"] != role:
                raise error(
                    f"{where}: texts.{role} names '{text}', whose role is {row_of(text)['role']}",
                    f"texts of role {role}",
                    "no text is both calibrated and tested on",
                )
    return Settings(
        models={name: sheet[name] for name in config["models"]},
        policies=policies,
        calibration_texts=tuple(config["texts"]["calibration"]),
        test_texts=tuple(config["texts"]["test"]),
        slots=dict(config["slots"]),
        context_tokens=int(config["context_tokens"]),  # a schema takes 1024.0 for an integer
        delay_tokens=int(config["delay_tokens"]),
        threads=usable_cores() if config["threads"] == "all" else int(config["threads"]),
        documents=int(config["documents"]) if "documents" in config else None,
        statistics={
            "level": config["statistics"]["level"],
            "replicates": int(config["statistics"]["replicates"]),
            "seed": int(config["statistics"]["seed"]),
        },
    )


def usable_cores() -> int:
    """Cores this process may run on; a job scheduler or container may leave fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_models(path: str | Path) -> dict[str, Model]:
    try:
        with open(path, newline="", encoding="utf-8") as handle:
            rows = list(csv.reader(handle, delimiter="\t"))
    except OSError as exc:
        raise error(f"{path}: {exc.strerror}", "the sheet of models", "check `models_sheet`") from None
    except UnicodeDecodeError as exc:
        raise error(f"{path}: byte {exc.start} is no UTF-8", "a sheet in UTF-8", "save it as UTF-8") from None
    if not rows or tuple(rows[0]) != MODEL_COLUMNS:
        raise error(
            f"{path}:1: {rows[0] if rows else 'empty'}", f"columns {', '.join(MODEL_COLUMNS)}", "mend the header"
        )
    models: dict[str, Model] = {}
    for number, cells in enumerate(rows[1:], start=2):
        where = f"{path}:{number}"
        if len(cells) != len(MODEL_COLUMNS):
            raise error(f"{where}: {len(cells)} cells", f"{len(MODEL_COLUMNS)} separated by tabs", "mend the row")
        name, source, revision, dtype = cells
        if not ID.fullmatch(name):
            raise error(f"{where}: id '{name}'", "letters, digits, '_' or '-'", "ids become file names: rename it")
        if name in models:
            raise error(f"{where}: id '{name}' a second time", "one row an id", "rename or remove one")
        if not source:
            raise error(f"{where}: source is empty", "a folder or a hub id", "fill the cell")
        if dtype not in DTYPES:
            raise error(f"{where}: dtype '{dtype}'", "a known dtype", nearest(dtype, DTYPES))
        models[name] = Model(name, source, None if revision == "-" else revision, dtype)
    return models


# ---- the schema, in words -------------------------------------------------------------------------------------------
# jsonschema's messages say what was found; ours say what was expected, by the keyword that failed
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


def check_schema(value: object, where: str, schema_path: Path, manual: str) -> None:
    """UserError on the first thing wrong; unknown keys first, as the likeliest reason that another is missing."""
    schema = json.loads(schema_path.read_text(encoding="utf-8"))
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(value))
    for wrong in errors:
        if wrong.validator == "additionalProperties":
            known = wrong.schema["properties"]
            extra = next(key for key in wrong.instance if key not in known)
            raise error(f"{where}: {_key(wrong)} has a key '{extra}'", "a known key", nearest(extra, known))
    wrong = jsonschema.exceptions.best_match(errors)
    if wrong is not None:
        if wrong.validator == "required":
            missing = next(key for key in wrong.validator_value if key not in wrong.instance)
            raise error(f"{where}: {_key(wrong)} has no key '{missing}'", f"all keys of {manual}", "add it")
        expected = EXPECTED.get(wrong.validator, lambda _: wrong.message)(wrong.validator_value)
        hint = f"see {manual}"
        if isinstance(wrong.instance, bool):
            hint = "YAML reads yes, no, on and off as booleans: put the word in quotes"
        raise error(f"{where}: {_key(wrong)} is {_shown(wrong.instance)}", expected, hint)
    for path, number in _numbers(value):
        if not math.isfinite(number):  # NaN passes every limit of a schema
            raise error(f"{where}: {path} is {number}", "a finite number", f"see {manual}")


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
