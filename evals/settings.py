"""The configuration of a run, read and checked before the first job: config.yaml, its sheets and its schema.

settings = load("config/config.yaml")           # or check(config) of an already parsed mapping
settings.models["reference"].source
"""

from __future__ import annotations

import csv
import json
import os
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import yaml

from engine.errors import error, nearest
from engine.policies import BASELINE, ID, Policy, find_policy, load_policies
from evals.corpora import row_of

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
    except FileNotFoundError:
        raise error(f"{path} does not exist", "a configuration", "copy config/config.yaml") from None
    except yaml.YAMLError as exc:
        raise error(f"{path}: {exc}", "valid YAML", "mend the file") from None
    return check(config, str(path))


def check(config: object, where: str = "config/config.yaml") -> Settings:
    """Validate a parsed configuration and everything it names. UserError names file, key and value."""
    _check_schema(config, where)
    policies = load_policies(config["policies_sheet"])
    if config["policies"] != "all":
        policies = {name: find_policy(policies, name) for name in config["policies"]}
    if BASELINE not in policies:
        raise error(
            f"{where}: policies without {BASELINE}", "the baseline among them", "add it: losses are paired with it"
        )
    sheet = load_models(config["models_sheet"])
    for name in config["models"]:
        if name not in sheet:
            raise error(f"{where}: model '{name}'", f"an id of {config['models_sheet']}", nearest(name, sheet))
    for role in ("calibration", "test"):
        for text in config["texts"][role]:
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
        context_tokens=config["context_tokens"],
        delay_tokens=config["delay_tokens"],
        threads=os.cpu_count() if config["threads"] == "all" else config["threads"],
        documents=config.get("documents"),
        statistics=dict(config["statistics"]),
    )


def load_models(path: str | Path) -> dict[str, Model]:
    try:
        with open(path, newline="", encoding="utf-8") as handle:
            rows = list(csv.reader(handle, delimiter="\t"))
    except FileNotFoundError:
        raise error(f"{path} does not exist", "the sheet of models", "check `models_sheet`") from None
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
        if dtype not in DTYPES:
            raise error(f"{where}: dtype '{dtype}'", "a known dtype", nearest(dtype, DTYPES))
        models[name] = Model(name, source, None if revision == "-" else revision, dtype)
    return models


def _check_schema(config: object, where: str) -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    wrong = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(config))
    if wrong is None:
        return
    key = ".".join(str(part) for part in wrong.absolute_path) or "the file"
    if wrong.validator == "additionalProperties":
        known = wrong.schema.get("properties", {})
        extra = sorted(set(wrong.instance) - set(known))[0]
        raise error(f"{where}: {key} has a key '{extra}'", "a known key", nearest(extra, known))
    hint = "see config/README.md"
    if isinstance(wrong.instance, bool):
        hint = "YAML reads yes, no, on and off as booleans: put the word in quotes"
    raise error(f"{where}: {key} is {json.dumps(wrong.instance)}", wrong.message, hint)
