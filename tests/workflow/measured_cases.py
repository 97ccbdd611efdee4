"""A host that was measured: the tiny model packed, timed over two links, scored and tabulated, in this process.

case = measure(tmp_path)                    # every script by hand, as its --help says
case.folder                                 # results/measured/box
rename(case.folder, "other", "f" * 16)      # the same runs as if another machine had taken them
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from hosts import write_profile
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny import CALIBRATION, CONTEXT, ROOT, TEST, TOPICS, Ended, documents, run_script, write_model, write_text_file

from engine.checkpoint import CheckpointStore
from engine.files import sha256, write_json
from engine.inflate import inflate
from engine.offload import model_dtype
from engine.pack import pack
from engine.store import PackedStore

POLICIES = ("fetch_lfu_decay", "rule_015", "first_choice", "quality_first")
SIZES = {"own": {}, "512x64": {"width": 512, "expert_width": 64}}
LINKS = {"disk": (3, 6, 2), "sdcard": (3, 4, 1)}  # documents, tokens, repeats
RUNS = {"disk": 2 * len(POLICIES) * len(TEST), "sdcard": len(POLICIES) * len(TEST)}  # of one size


@dataclass(frozen=True)
class Case:
    """Where everything of a measured host lies."""

    root: Path
    profile: Path

    @property
    def folder(self) -> Path:
        return self.root / "measured" / self.profile.stem

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def texts(self) -> list[Path]:
        return [self.root / "texts" / f"{text}.json" for text in TEST]

    def store(self, size: str) -> Path:
        return self.root / "packed" / size

    def record(self, size: str) -> dict:
        return json.loads((self.folder / "tiny" / f"{size}.json").read_text(encoding="utf-8"))

    def measure(self, size: str, *, names=POLICIES, links=LINKS, slots: str = "s50=50", **flags) -> Ended:
        """measure_host.py of the policies `names`; flags replace its own."""
        own = {"model": "tiny", "model-dir": self.model, "store": self.store(size), "host": self.profile, "threads": 1}
        own |= {"policies": ROOT / "config" / "policies.tsv", "demand": self.root / "demand.safetensors"}
        own |= {name.replace("_", "-"): number for name, number in SIZES[size].items()} | {"out": self.folder}
        own |= {name.replace("_", "-"): value for name, value in flags.items()}
        values = {name: value if isinstance(value, tuple) else (value,) for name, value in own.items()}
        words = [word for name, value in values.items() for word in (f"--{name}", *value)]
        words += [word for name, numbers in links.items() for word in ("--link", name, *numbers)]
        words += ["--slots", slots, "--policy", *names, "fetch_belady", "--texts", *self.texts]
        return run_script("measure_host.py", *words)

    def score(self, size: str) -> Ended:
        record = self.folder / "tiny" / size
        flags = ("--record", f"{record}.json", "--store", self.store(size), "--texts", *self.texts, "--threads", 1)
        return run_script("rescore_runs.py", *flags, "--out", f"{record}_rescored.json")

    def tabulate(self, *folders: Path, traces: bool = True) -> Ended:
        flags = ["--hosts", *(folders or [self.folder]), "--replicates", 199]
        flags += ["--traces", self.root / "traces" / "tiny"] if traces else []
        outs = {"out": "measured", "out-documents": "measured_documents", "out-errors": "engine_simulator"}
        flags += [word for flag, name in outs.items() for word in (f"--{flag}", self.root / "tables" / f"{name}.csv")]
        return run_script("tabulate_measured.py", *flags)

    def table(self, name: str) -> Path:
        return self.root / "tables" / f"{name}.csv"

    def copy(self, root: Path) -> Case:
        """The same in another place, where a test may damage it. Stores, traces and model stay where they are."""
        for name in ("model", "texts", "packed", "traces", "demand.safetensors"):
            (root / name).symlink_to(self.root / name)
        shutil.copytree(self.root / "measured", root / "measured")
        shutil.copytree(self.profile.parent, root / "hosts")
        return Case(root, root / "hosts" / self.profile.name)


def made(ended: Ended) -> Ended:
    assert ended.code == 0, ended.err
    return ended


def prepare(root: Path) -> Case:
    """All that measuring needs. Skips where the file system cannot be read past the page cache."""
    case = Case(root, write_profile(root / "hosts"))
    write_model(case.model)
    for number, (text, topic) in enumerate(TOPICS.items()):
        role = "calibration" if text == CALIBRATION else "test"
        write_text_file(root / "texts" / f"{text}.json", text, topic, documents(topic, 5, first=5 * number), role)
    inflate(case.model, root / "inflated", **SIZES["512x64"])
    for size, source, dtype in (("own", case.model, "float32"), ("512x64", root / "inflated", "bfloat16")):
        with CheckpointStore(source, model_dtype(source, dtype)) as store:
            pack(store, case.store(size), source=source, leave_out=store.tensor_names, facts={})
    store = PackedStore(case.store("own"))
    cached = store.cached
    store.close()
    if cached:
        pytest.skip(f"{root} is on a file system without O_DIRECT: no run may be timed there")
    common = ("--model", "tiny", "--model-dir", case.model, "--context", CONTEXT, "--threads", 1)
    calibrated = ("--texts", root / "texts" / f"{CALIBRATION}.json", "--out-demand", root / "demand.safetensors")
    made(run_script("calibrate_model.py", *common[2:], *calibrated, "--out", root / "calibration.json"))
    made(run_script("record_routing.py", *common, "--texts", *case.texts, "--out", root / "traces" / "tiny"))
    return case


def measure(root: Path) -> Case:
    case = prepare(root)
    for size in SIZES:
        made(case.measure(size))
        made(case.score(size))
    return case


# ---- another machine -------------------------------------------------------------------------------------------------
def rewrite_json(path: Path, change) -> None:
    """change(value) edits what a JSON file holds, in place."""
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    write_json(path, value)


def rewrite_run(path: Path, change) -> None:
    """change(arrays, facts) edits a run in place."""
    with safe_open(path, framework="numpy") as file:
        facts = json.loads(file.metadata()["expertmiss"])
    arrays = {name: array.copy() for name, array in load_file(path).items()}
    change(arrays, facts)
    save_file(arrays, path, metadata={"expertmiss": json.dumps(facts, sort_keys=True)})


def renew_hashes(folder: Path) -> None:
    """Records and scores name the files as they are now."""
    for path in sorted(folder.glob("*/*.json")):
        if path.stem.endswith("_rescored"):
            continue

        def of_runs(record, path=path):
            for row in record["cells"]:
                name = "/".join(str(row[part]) for part in ("link", "policy", "slots", "text", "repeat"))
                run = path.parent / record["size"] / f"{name}.safetensors"
                if row["status"] == "ok" and run.is_file():
                    row["sha256"] = sha256(run)

        rewrite_json(path, of_runs)
        scores = path.with_name(f"{path.stem}_rescored.json")
        if scores.is_file():
            facts = {"record_sha256": sha256(path), "losses_sha256": sha256(scores.with_suffix(".safetensors"))}
            rewrite_json(scores, lambda found, facts=facts: found["provenance"].update(facts))


def rename(folder: Path, name: str, fingerprint: str) -> Path:
    """The folder as if a machine of that id and fingerprint had measured it."""
    target = folder.with_name(name)
    os.rename(folder, target)
    profile = yaml.safe_load((target / "host.yaml").read_text(encoding="utf-8"))
    (target / "host.yaml").write_text(yaml.safe_dump(profile | {"id": name, "fingerprint": fingerprint}), "utf-8")
    facts = {"host": fingerprint, "host_sha256": sha256(target / "host.yaml")}
    for path in target.glob("*/*/*/*/*/*/*.safetensors"):
        rewrite_run(path, lambda arrays, own: own.update(facts))
    for path in target.glob("*/*.json"):
        if not path.stem.endswith("_rescored"):

            def change(record):
                record["host"] |= {"id": name, "fingerprint": fingerprint}
                record["provenance"]["host_sha256"] = facts["host_sha256"]

            rewrite_json(path, change)
    renew_hashes(target)
    return target
