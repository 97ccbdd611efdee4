"""Laws and golden: what a job asks a cluster for, and which nodes are hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from engine.cluster import (
    ATTEMPTS,
    SMALL_MB,
    SMALL_MINUTES,
    UNKNOWN_BYTES,
    Ask,
    Node,
    nodes,
    of_policy,
    weight_bytes,
)
from engine.errors import UserError
from engine.host import load_hosts
from engine.model_sheet import Model

ROOT = Path(__file__).parents[2]


def model(folder, dtype="float32", published="float32", name="model.safetensors", size=4_000_000) -> Model:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"dtype": published}))
    (folder / name).write_bytes(bytes(size))
    return Model("m", str(folder), None, dtype)


@pytest.mark.parametrize(
    ("dtype", "published", "name", "weights"),
    [
        ("float32", "float32", "model.safetensors", 4_000_000),
        ("float32", "bfloat16", "model.safetensors", 8_000_000),
        ("bfloat16", "float32", "model-00001-of-00001.safetensors", 2_000_000),
        ("float32", "float32", "model.int8.safetensors", 16_000_000),
    ],
)
def test_weights_are_counted_in_the_dtype_they_run_in(tmp_path, dtype, published, name, weights):
    assert weight_bytes(model(tmp_path, dtype, published, name)) == weights


def test_an_attempt_asks_for_that_many_times_as_much(tmp_path):
    small = model(tmp_path / "small")
    first, third = Ask.of(small), Ask.of(small, attempt=3)
    assert first.mem_mb > 4 and (third.mem_mb, third.runtime) == (3 * first.mem_mb, 3 * first.runtime)
    larger = Ask.of(model(tmp_path / "larger", size=100_000_000))
    assert larger.mem_mb == first.mem_mb + 96 and larger.runtime > first.runtime


def test_a_hub_model_is_sized_from_its_config_and_an_unknown_one_guessed():
    olmoe = Model("olmoe_1b_7b", "nobody/olmoe", None, "bfloat16")  # config/architectures has its config
    assert 13e9 < weight_bytes(olmoe) < 15e9  # 6.9 billion parameters
    assert weight_bytes(Model("m", "nobody/m", None, "float32")) == UNKNOWN_BYTES


def test_an_inflated_size_asks_for_what_its_files_weigh():
    """6.29 MB an expert, 1,024 of them."""
    reference = Model("reference", str(ROOT / "models" / "reference"), None, "float32")
    own, wide = Ask.of(reference), Ask.of(reference, 1, "1024x1024")
    assert 6_300 < wide.mem_mb - own.mem_mb < 6_600 and wide.runtime > own.runtime


def test_after_the_last_attempt_a_policy_asks_for_no_model(tmp_path):
    large = model(tmp_path, size=100_000_000)
    assert of_policy(large, ATTEMPTS) == Ask.of(large, ATTEMPTS)
    assert of_policy(large, ATTEMPTS + 1) == Ask(SMALL_MB, SMALL_MINUTES)


def profile(tmp_path, slurm: dict, source: str = "results/measured/epyc_2core_vm/host.yaml"):
    data = yaml.safe_load((ROOT / source).read_text(encoding="utf-8")) | {"slurm": slurm}
    path = tmp_path / f"{data['id']}.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def test_a_profile_names_its_node_with_the_threads_it_was_probed_with(tmp_path):
    path = profile(tmp_path, {"constraint": "gpu&fast", "gres": "gpu:1"})
    load_hosts(tmp_path)
    (node,) = nodes({path.stem: path, "local": tmp_path / "not_probed_yet.yaml"}).values()
    assert node == Node("gpu&fast", "gpu:1", threads=2)


@pytest.mark.parametrize("slurm", [{}, {"constraint": "a; rm"}, {"constraint": "a", "partition": "b"}])
def test_a_node_that_no_cluster_has_is_refused_with_its_file(tmp_path, slurm):
    path = profile(tmp_path, slurm)
    with pytest.raises(UserError, match=path.name):
        load_hosts(tmp_path)


def test_a_modelled_host_is_no_node(tmp_path):
    path = profile(tmp_path, {"constraint": "a"}, "config/hosts/rtx3090_pcie4.yaml")
    with pytest.raises(UserError, match="modelled"):
        nodes({path.stem: path})
