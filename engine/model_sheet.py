"""The sheet of models, config/models.tsv: what is run, in which dtype, and in how many bits its experts are stored.

model = load_models("config/models.tsv")["qwen3_next_80b"]
find_config(model).config["num_experts"]            # from what lies on this machine: nothing is fetched
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import error, nearest
from engine.geometry import DTYPE_BYTES
from engine.hub import COMMIT, is_hub_id
from engine.quantisation import BITS, GROUPS
from engine.sheets import ID, read_sheet

COLUMNS = ("id", "source", "revision", "dtype", "timed_width", "timed_expert_width")
OPTIONAL = ("bits", "group")  # columns that a sheet may leave out: the dtype in every row
DTYPES = tuple(sorted(DTYPE_BYTES))
PACKED = "model.int8.safetensors"  # a source folder with this file is unpacked by a rule first
ARCHITECTURES = Path(__file__).parent.parent / "config" / "architectures"


@dataclass(frozen=True)
class Model:
    """One row. source: a folder (Hugging Face layout, or packed), or a hub id and its commit.

    timed_width, timed_expert_width: the sizes it is inflated to where it is timed, None its own. bits, group: of the
    store that its experts are read from, and from which it is scored too; None the dtype.
    """

    id: str
    source: str
    revision: str | None
    dtype: str
    timed_width: int | None = None
    timed_expert_width: int | None = None
    bits: int | None = None
    group: int | None = None

    @property
    def packed(self) -> bool:
        return (Path(self.source) / PACKED).is_file()

    @property
    def folder(self) -> str:
        """Where the pipeline has it: a rule unpacks or fetches what is not a plain folder."""
        return f"results/models/{self.id}" if self.packed or self.revision else self.source


@dataclass(frozen=True)
class Config:
    """A model's config.json as a dict, and where it was found."""

    config: dict
    found: str
    checkpoint_bytes: int | None = None  # of all its files, where that is known


def load_models(path: str | Path) -> dict[str, Model]:
    """The sheet by id, in its order. UserError names file, row and value."""
    return read_sheet(path, COLUMNS, "the sheet of models", _model, OPTIONAL)


def find_config(model: Model) -> Config | None:
    """config.json of the source folder, of the hub's cache, or the committed one of config/architectures; or None.

    Asks no network. UserError on a file that is no JSON object.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if (Path(model.source) / "config.json").is_file():
        path = Path(model.source) / "config.json"
        return Config(_read(path), str(path))
    try:
        cached = try_to_load_from_cache(model.source, "config.json", revision=model.revision)
    except HFValidationError:  # a path that is no folder
        cached = None
    if isinstance(cached, str):
        return Config(_read(Path(cached)), "config.json in the hub's cache")
    known = ARCHITECTURES / f"{model.id}.json"
    if not known.is_file():
        return None
    value = _read(known)
    if not isinstance(value.get("config"), dict):
        raise error(f"{known} without `config`", "source and config, as its neighbours have", "mend the file")
    return Config(value["config"], f"config/architectures/{known.name}", value.get("checkpoint_bytes"))


def _read(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise error(f"{path}: {exc}", "a readable config.json", "fetch it again") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds a {type(value).__name__}", "a JSON object", "fetch it again")
    return value


def _model(row: dict[str, str], where: str) -> Model:
    row = {"bits": "-", "group": "-"} | row
    if not ID.fullmatch(row["id"]):
        raise error(f"{where}: id '{row['id']}'", "letters, digits, '_' or '-'", "ids become file names: rename it")
    if not row["source"]:
        raise error(f"{where}: source is empty", "a folder or a hub id", "fill the cell")
    if row["dtype"] not in DTYPES:
        raise error(f"{where}: dtype '{row['dtype']}'", "a known dtype", nearest(row["dtype"], DTYPES))
    if row["revision"] != "-" and not (is_hub_id(row["source"]) and COMMIT.fullmatch(row["revision"])):
        found = f"{where}: source '{row['source']}' with revision '{row['revision']}'"
        expected = "a hub id with a commit of 40 digits, or a folder with '-'"
        raise error(found, expected, "a branch or tag can move: copy the commit from the model's page")
    for column in COLUMNS[4:]:
        if row[column] != "-" and not re.fullmatch("[1-9][0-9]{0,5}", row[column]):
            expected = "a whole number from 1, or '-' for its own"
            raise error(f"{where}: {column} '{row[column]}'", expected, "mend the cell")
    for column, known in (("bits", BITS), ("group", GROUPS)):
        if row[column] not in ("-", *map(str, known)):
            expected = f"{', '.join(map(str, known))}, or '-' for experts in the dtype"
            raise error(f"{where}: {column} '{row[column]}'", expected, "mend the cell")
    if (row["bits"] == "-") != (row["group"] == "-"):
        found = f"{where}: bits '{row['bits']}' and group '{row['group']}'"
        raise error(found, "both or neither", "inputs of a group share a scale: fill the other cell")
    numbers = {column: None if row[column] == "-" else int(row[column]) for column in (*COLUMNS[4:], *OPTIONAL)}
    revision = None if row["revision"] == "-" else row["revision"]
    return Model(row["id"], row["source"], revision, row["dtype"], **numbers)
