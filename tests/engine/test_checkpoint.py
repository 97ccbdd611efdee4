"""Experts in place: every record is what from_pretrained loads, from every layout, and nothing wrong goes unnamed."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checkpoint_cases import (
    LAYOUTS,
    edit,
    records,
    reference,
    save,
    tensors_of,
    write,
    write_index,
)
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, conversion_mapping
from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, Split, Transpose, WeightConverter

import engine.direct
from engine.checkpoint import CheckpointStore
from engine.errors import UserError
from engine.hook import experts_modules
from engine.host_facts import MEMORY_FILESYSTEMS, filesystem
from engine.host_probe import _cached_share
from engine.record import PAGE, check_finite, page_aligned

FILE_EACH = 1000  # more shards than tensors


def assert_agrees(folder, run):
    """Every parameter of every expert equals, to the bit, what from_pretrained makes of the folder."""
    modules = experts_modules(reference(folder, run)).values()
    with CheckpointStore(folder, run) as store:
        assert (store.layers, store.experts) == (len(modules), 16)
        for layer, module in enumerate(modules):
            views = store.layout.views(records(store, layer))
            assert set(views) == {name for name, _ in module.named_parameters()}
            for name, values in views.items():
                wants = module.get_parameter(name)
                assert values.dtype == wants.dtype == run and torch.equal(values, wants), (layer, name)


# ---- agreement with from_pretrained ---------------------------------------------------------------------------------
@pytest.mark.parametrize("shards", [1, 3, FILE_EACH], ids=["single", "sharded", "file-each"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_agreement_every_layout_of_every_family(layout, shards, family, tiny_moe, tmp_path):
    """With a file for each tensor every read ends where a file does, at no multiple of a page."""
    assert_agrees(save(tiny_moe(family), tmp_path, layout, shards), torch.float32)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"], indirect=True)
@pytest.mark.parametrize("run", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("disk", [torch.bfloat16, torch.float16, torch.float32])
def test_agreement_every_dtype_on_disk_and_of_the_run(disk, run, family, tiny_moe, tmp_path):
    assert_agrees(save(tiny_moe(family), tmp_path, "mixed", dtype=disk), run)


def test_agreement_with_what_save_pretrained_writes(family, tiny_moe, tmp_path):
    tiny_moe(family).save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_agrees(tmp_path, torch.float32)


GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
BY_EXPERT = ["mlp.experts.*.gate.w", "mlp.experts.*.up.w"]
CONVERSIONS = {  # as families use them: more than stacking and joining
    "fused_transposed": [
        WeightConverter("mlp.experts.gate_up_t", GATE_UP, [Transpose(1, 2)]),
        WeightConverter("mlp.experts.down_t", DOWN, [Transpose(1, 2)]),
    ],
    "fused_in_two": [WeightConverter(["mlp.experts.gate", "mlp.experts.up"], GATE_UP, [Concatenate(1)])],
    "interleaved": [WeightConverter("mlp.experts.w13", GATE_UP, [Interleave(1)])],
    "by_expert_transposed": [
        WeightConverter(BY_EXPERT, GATE_UP, [MergeModulelist(0), Concatenate(2), Transpose(1, 2)]),
        WeightConverter("mlp.experts.*.down.w", DOWN, [MergeModulelist(0), Transpose(1, 2)]),
    ],
    "one_for_both": [WeightConverter("mlp.experts.all", [GATE_UP, DOWN], [Split(2)])],
}


@pytest.mark.parametrize("run", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_agreement_any_conversion_runs_on_one_expert(name, run, tiny_moe, tmp_path, monkeypatch):
    """A family that stores its experts so exists or may come: no code of ours knows it."""
    model = tiny_moe("qwen3_moe")
    conversion_mapping.get_checkpoint_conversion_mapping("qwen3_moe")  # builds the table
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "qwen3_moe", CONVERSIONS[name])
    folder = save(model, tmp_path)
    assert not any(key.endswith(GATE_UP) for key in load_file(folder / "model.safetensors"))
    assert_agrees(folder, run)


@pytest.mark.parametrize("transposed", [False, True])
def test_agreement_a_conversion_that_looks_at_the_model_s_shape(transposed, tiny_moe, tmp_path, monkeypatch):
    """It transposes where the shape is not the parameter's, which for one expert begins with 1."""
    model = tiny_moe("qwen3_moe", moe_intermediate_size=24)
    conversion_mapping.get_checkpoint_conversion_mapping("qwen3_moe")
    conversions = [WeightConverter(target, target, [Transpose(1, 2, check_dims=True)]) for target in (GATE_UP, DOWN)]
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "qwen3_moe", conversions)
    tensors = tensors_of(model, "fused")
    if transposed:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    assert_agrees(write(tmp_path, model.config, tensors), torch.float32)


@pytest.mark.parametrize("run", [torch.bfloat16, torch.float32])
def test_agreement_where_tensors_begin_at_odd_bytes(run, tiny_moe, tmp_path):
    """Nothing in the format forbids it."""
    folder = save(tiny_moe("qwen3_moe"), tmp_path)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :])
    assert_agrees(folder, run)


# ---- reads ----------------------------------------------------------------------------------------------------------
def test_law_threads_read_the_same_bytes(tiny_moe, tmp_path):
    with CheckpointStore(save(tiny_moe("gpt_oss"), tmp_path, "mixed", shards=3), torch.float32) as store:
        wants = [records(store, layer) for layer in range(store.layers)]

        def read(place):
            layer, expert = place
            target = page_aligned(1, store.layout.record_bytes)[0].fill_(0xAA)
            store.read(layer, expert, memoryview(target.numpy()))
            return torch.equal(target, wants[layer][expert])

        places = [(layer, expert) for layer in range(store.layers) for expert in range(store.experts)] * 20
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, places))
        assert 1 <= len(store._buffers) <= 4


def test_law_what_belongs_to_no_parameter_is_zero(tiny_moe, tmp_path):
    """So that the record of an expert is one string of bytes, and a checksum of it means something."""
    with CheckpointStore(save(tiny_moe("gpt_oss"), tmp_path), torch.bfloat16) as store:
        found = records(store, 0)
        covered = torch.zeros(store.layout.record_bytes, dtype=torch.bool)
        for at, size in zip(store.layout.offsets, store.layout.part_bytes, strict=True):
            covered[at : at + size] = True
        assert not covered.all() and not found[:, ~covered].any() and found[:, covered].any()


@pytest.fixture
def preads(monkeypatch):
    """The (offset, length, result) of every os.preadv."""
    calls, real = [], os.preadv

    def preadv(fd, buffers, offset):
        count = real(fd, buffers, offset)
        calls.append((offset, sum(len(buffer) for buffer in buffers), count))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return calls


def test_golden_neighbours_come_with_one_read_of_whole_pages(tiny_moe, tmp_path, preads):
    """An expert of 3 x 64 x 32 floats is 24,576 bytes: its three tensors are neighbours in the file, in one read of six
    or seven pages. Fused, its two parts are far from another: two reads of 4 to 5 and of 2 to 3 pages."""
    model = tiny_moe("qwen3_moe")
    for layout, reads, most in (("original", 1, 7), ("fused", 2, 8)):
        with CheckpointStore(save(model, tmp_path / layout, layout), torch.float32) as store:
            target = memoryview(page_aligned(1, store.layout.record_bytes)[0].numpy())
            preads.clear()
            count = store.read(1, 5, target)
        assert len(preads) == reads
        assert all(offset % PAGE == length % PAGE == 0 for offset, length, _ in preads)
        assert count == sum(result for *_, result in preads) and 6 * PAGE <= count <= most * PAGE


def test_the_last_page_of_a_file_may_be_short(tiny_moe, tmp_path, preads):
    with CheckpointStore(save(tiny_moe("qwen3_moe"), tmp_path, shards=FILE_EACH), torch.float32) as store:
        preads.clear()
        store.read(0, 0, memoryview(page_aligned(1, store.layout.record_bytes)[0].numpy()))
    assert len(preads) == 3 and all(result < length for _, length, result in preads)


def test_disk_reads_leave_the_page_cache_as_it_was(tiny_moe, tmp_path):
    model = tiny_moe("qwen3_moe", moe_intermediate_size=512)
    folder = save(model, tmp_path)
    path = folder / "model.safetensors"
    size = path.stat().st_size // PAGE * PAGE
    with CheckpointStore(folder, torch.float32) as store:
        if store.cached:
            pytest.skip(f"{filesystem(tmp_path)} has no O_DIRECT, and the store says so")
        fd = os.open(path, os.O_RDWR)  # mincore wants to be asked by an owner
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            for layer in range(store.layers):
                records(store, layer)
            assert _cached_share(fd, size) < 0.05
            os.pread(fd, size, 0)
            assert _cached_share(fd, size) > 0.95
        finally:
            os.close(fd)


def test_the_store_says_where_it_is_cached(tiny_moe, tmp_path, monkeypatch):
    """On a filesystem in memory, and on one that refuses the flag: read all the same."""
    folder, real, asked = save(tiny_moe("qwen3_moe"), tmp_path), os.open, []
    wants = filesystem(tmp_path) in MEMORY_FILESYSTEMS
    with CheckpointStore(folder, torch.float32) as store:
        assert store.cached == wants
    monkeypatch.setattr(engine.direct, "filesystem", lambda _: "tmpfs")
    with CheckpointStore(folder, torch.float32) as store:
        assert store.cached
        in_memory = records(store, 1)
    monkeypatch.setattr(engine.direct, "filesystem", lambda _: "ext4")

    def refuse(path, flags, *args, **kwargs):
        asked.append(flags & os.O_DIRECT)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with CheckpointStore(folder, torch.float32) as store:
        assert store.cached and asked[0]
        assert torch.equal(records(store, 1), in_memory)


def test_close_gives_the_files_back(tiny_moe, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    store = CheckpointStore(save(tiny_moe("qwen3_moe"), tmp_path, shards=3), torch.float32)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- faults while reading -------------------------------------------------------------------------------------------
def test_a_read_error_is_the_device_s_and_the_store_goes_on(tiny_moe, tmp_path, monkeypatch):
    with CheckpointStore(save(tiny_moe("qwen3_moe"), tmp_path), torch.float32) as store:
        wants = records(store, 0)
        with monkeypatch.context() as patch:

            def fail(*_):
                raise OSError(errno.EIO, "Input/output error")

            patch.setattr(os, "preadv", fail)
            with pytest.raises(OSError, match="Input/output"):
                store.read(0, 3, memoryview(page_aligned(1, store.layout.record_bytes)[0].numpy()))
        assert torch.equal(records(store, 0), wants)
        assert len(store._buffers) == 1


def test_a_file_cut_short_after_it_was_opened_is_named(tiny_moe, tmp_path):
    folder = save(tiny_moe("qwen3_moe"), tmp_path)
    with CheckpointStore(folder, torch.float32) as store:
        os.truncate(folder / "model.safetensors", 3 * PAGE + 5)
        with pytest.raises(UserError, match=rf"model.safetensors ends at byte {3 * PAGE + 5:,}; expected at least"):
            store.read(0, 0, memoryview(page_aligned(1, store.layout.record_bytes)[0].numpy()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("run", [torch.bfloat16, torch.float16, torch.float32])
def test_an_expert_that_is_not_finite_is_named(run, value, tiny_moe, tmp_path):
    folder = save(tiny_moe("gpt_oss"), tmp_path, "fused", dtype=run)
    edit(folder, lambda tensors: tensors["model.layers.1.mlp.experts.down_proj_bias"][5, 63:].fill_(value))
    with CheckpointStore(folder, run) as store:
        found = records(store, 1)
        for expert in range(16):
            if expert != 5:
                check_finite(store.layout, found[expert], store.name(1, expert))
        with pytest.raises(UserError, match=r"expert 5 of model\.layers\.1\.mlp\.experts: down_proj_bias is not fin"):
            check_finite(store.layout, found[5], store.name(1, 5))


# ---- bad checkpoints ------------------------------------------------------------------------------------------------
UP = "model.layers.1.mlp.experts.5.up_proj.weight"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def header(folder, change, file=SHARD):
    """change(header) -> header or bytes, the tensors left as they are."""
    content = (folder / file).read_bytes()
    length = int.from_bytes(content[:8], "little")
    new = change(json.loads(content[8 : 8 + length]))
    new = new if isinstance(new, bytes) else json.dumps(new).encode()
    (folder / file).write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])


def first_of(found):
    return next(name for name in found if name != "__metadata__")


def change_entry(**fields):
    return lambda found: found | {first_of(found): found[first_of(found)] | fields}


def change_index(folder, change):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    change(weight_map)
    write_index(folder, weight_map)


def twice_in_a_header(found):
    name = first_of(found)
    return json.dumps(found)[:-1].encode() + f", {json.dumps(name)}: {json.dumps(found[name])}}}".encode()


def in_two_shards(folder):
    home = json.loads((folder / INDEX).read_text())["weight_map"][UP]
    other = next(path.name for path in sorted(folder.glob("*.safetensors")) if path.name != home)
    tensor = load_file(folder / home)[UP]
    edit(folder, lambda tensors: tensors.update({UP: tensor}), other)


SHARDED = {  # name: (fault, what the message must hold): three shards, one tensor an expert
    "shard_missing": (lambda f: (f / SHARD).unlink(), [SHARD, "is missing", "every shard"]),
    "shard_cut": (lambda f: os.truncate(f / SHARD, 5000), [SHARD, "has 5,000 bytes"]),
    "shard_one_byte_short": (lambda f: os.truncate(f / SHARD, (f / SHARD).stat().st_size - 1), [SHARD, "bytes"]),
    "shard_too_long": (lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes() + b"\0"), [SHARD, "bytes"]),
    "shard_empty": (lambda f: (f / SHARD).write_bytes(b""), [SHARD, "has 0 bytes and no whole header"]),
    "shard_pointer": (lambda f: (f / SHARD).write_bytes(POINTER), [SHARD, "is a Git LFS pointer", "git lfs pull"]),
    "shard_zeros": (lambda f: (f / SHARD).write_bytes(bytes(9000)), [SHARD, "broken header"]),
    "shard_no_header": (lambda f: (f / SHARD).write_bytes(b"\xff" * 9000), [SHARD, "no whole header"]),
    "shard_folder": (lambda f: ((f / SHARD).unlink(), (f / SHARD).mkdir()), [SHARD, "Is a directory"]),
    "header_no_json": (lambda f: header(f, lambda _: b"{nothing"), [SHARD, "broken header"]),
    "header_list": (lambda f: header(f, lambda _: b"[1, 2]"), [SHARD, "broken header"]),
    "header_no_shape": (lambda f: header(f, change_entry(shape=None)), [SHARD, "broken header"]),
    "header_twice": (lambda f: header(f, twice_in_a_header), [SHARD, "broken header", "twice"]),
    "bytes_unlike_shape": (lambda f: header(f, change_entry(shape=[7, 9])), [SHARD, "of shape [7, 9], F32, has"]),
    "offsets_backwards": (lambda f: header(f, change_entry(data_offsets=[64, 0])), [SHARD, "has -64 bytes"]),
    "index_no_json": (lambda f: (f / INDEX).write_text("{"), [INDEX, "is broken"]),
    "index_pointer": (lambda f: (f / INDEX).write_bytes(POINTER), [INDEX, "is a Git LFS pointer"]),
    "index_no_map": (lambda f: (f / INDEX).write_text('{"metadata": {}}'), [INDEX, "weight_map"]),
    "index_empty": (lambda f: write_index(f, {}), [INDEX, "names no tensor"]),
    "index_elsewhere": (lambda f: change_index(f, lambda m: m.update({UP: "../x"})), [INDEX, "'../x'"]),
    "index_number": (lambda f: change_index(f, lambda m: m.update({UP: 3})), [INDEX, "names the shard 3"]),
    "index_wrong_shard": (
        lambda f: change_index(f, lambda m: m.update({UP: sorted(set(m.values()) - {m[UP]})[0]})),
        [UP, "lacks tensor", ".safetensors"],
    ),
    "index_unknown_tensor": (
        lambda f: change_index(f, lambda m: m.update({"x.y": SHARD})),
        [SHARD, "lacks tensor x.y"],
    ),
    "expert_in_two_shards": (in_two_shards, [UP, "lies in model-0000", "every tensor once"]),
    "no_index": (lambda f: (f / INDEX).unlink(), ["has neither model.safetensors nor", "model-00001-of-00003"]),
}


def drop(*names):
    return lambda folder: edit(folder, lambda tensors: [tensors.pop(name) for name in names])


def put(name, tensor):
    return lambda folder: edit(folder, lambda tensors: tensors.update({name: tensor}))


def every(part, change):
    """change(tensor) on every tensor whose name holds `part`."""
    return lambda folder: edit(
        folder, lambda ts: ts.update({n: change(t).contiguous() for n, t in ts.items() if part in n})
    )


LAST = "model.layers.1.mlp.experts.15."
ORIGINAL = {  # one file, one tensor an expert
    "tensor_missing": (drop(UP), [f"tensor {UP} is missing (1 such)", "16 experts"]),
    "expert_missing": (
        drop(*(f"{LAST}{part}.weight" for part in ("gate_proj", "up_proj", "down_proj"))),
        [f"tensor {LAST}gate_proj.weight is missing (1 such)"],
    ),
    "one_too_many": (
        put(LAST.replace("15", "16") + "up_proj.weight", torch.zeros(32, 64)),
        ["17 tensors like model.layers.1.mlp.experts.0.up_proj.weight", "each of 16 experts"],
    ),
    "projection_missing": (
        drop(*(f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(16))),
        ["model.layers.1.mlp.experts.0.gate_proj.weight [32, 64] does not make", FUSED, "[64, 64] an expert"],
    ),
    "layer_missing": (
        drop(*(f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(16))),
        ["model.layers.1.mlp.experts.down_proj is missing"],
    ),
    "fused_too": (put(FUSED, torch.zeros(16, 64, 64)), [f"{FUSED} is there twice", "experts.0.gate_proj.weight"]),
    "shape_of_one": (put(UP, torch.zeros(31, 64)), [f"tensor {UP} has shape [31, 64]", "[32, 64]"]),
    "shape_of_all": (every("layers.1.mlp.experts", lambda t: t[:, :-1]), ["does not make", "layers.1", "model.safet"]),
    "shape_transposed": (every(".up_proj", lambda t: t.T), ["[64, 32] does not make", "gate_up_proj"]),
    "float8": (
        put(UP, torch.zeros(32, 64).to(torch.float8_e5m2)),
        [f"tensor {UP} is stored as F8_E5M2", "BF16, F16, F32"],
    ),
    "integers": (put(UP, torch.zeros(32, 64, dtype=torch.int8)), [f"tensor {UP} is stored as I8"]),
    "unheard_of": (
        lambda f: header(f, lambda h: h | {UP: h[UP] | {"dtype": "X7"}}, "model.safetensors"),
        [f"tensor {UP} is stored as X7"],
    ),
    "pointer": (lambda f: (f / "model.safetensors").write_bytes(POINTER), ["model.safetensors is a Git LFS pointer"]),
}
FUSED_FAULTS = {  # one file, all experts of a layer in one tensor
    "missing": (drop(FUSED), [f"{FUSED} is missing"]),
    "too_few": (put(FUSED, torch.zeros(15, 64, 64)), [f"tensor {FUSED} has shape [15, 64, 64]", "16 experts"]),
    "wrong_width": (put(FUSED, torch.zeros(16, 64, 63)), [f"{FUSED} [16, 64, 63] does not make", "[64, 64] an expert"]),
    "no_axis": (put(FUSED, torch.zeros(())), [f"tensor {FUSED} has shape []"]),
    "two_names": (
        put(FUSED.removeprefix("model."), torch.zeros(16, 64, 64)),
        [f"{FUSED} is there twice", "as layers.1.mlp", f"as {FUSED}"],
    ),
    "by_expert_too": (put(UP, torch.zeros(32, 64)), [f"{FUSED} is there twice", UP]),
}
FAULTS = {
    f"{group}-{name}": (layout, shards, *fault)
    for group, layout, shards, faults in (
        ("sharded", "original", 3, SHARDED),
        ("original", "original", 1, ORIGINAL),
        ("fused", "fused", 1, FUSED_FAULTS),
    )
    for name, fault in faults.items()
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_checkpoint_is_refused_before_a_weight_is_read(name, tiny_moe, tmp_path, preads):
    """One line in three parts that names file or tensor; neither weights nor memory for them were touched."""
    layout, shards, fault, parts = FAULTS[name]
    folder = save(tiny_moe("qwen3_moe"), tmp_path, layout, shards)
    CheckpointStore(folder, torch.float32).close()  # without the fault it opens
    fault(folder)
    preads.clear()
    with pytest.raises(UserError) as raised:
        CheckpointStore(folder, torch.float32)
    message = str(raised.value)
    assert all(part in message for part in parts), message
    assert str(folder) in message and "; expected " in message and message.count("; ") == 2 and "\n" not in message
    assert not preads


@pytest.mark.parametrize("files", [[], ["pytorch_model.bin"], ["weights.gguf"]])
def test_a_folder_without_safetensors_is_refused(files, tmp_path):
    for file in files:
        (tmp_path / file).write_bytes(b"weights")
    with pytest.raises(UserError, match="has neither model") as raised:
        CheckpointStore(tmp_path, torch.float32)
    assert all(file in str(raised.value) for file in files)


def test_no_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="nowhere has neither"):
        CheckpointStore(tmp_path / "nowhere", torch.float32)


def test_a_dense_model_is_refused(tmp_path):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="has no routed experts"):
        CheckpointStore(tmp_path, torch.float32)


def test_more_experts_in_the_configuration_than_in_the_file(tiny_moe, tmp_path):
    folder = save(tiny_moe("qwen3_moe"), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"num_local_experts": 20}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"tensor model\.layers\.0\.mlp\.experts\.16\..* is missing \(4 such\)"):
        CheckpointStore(folder, torch.float32)
