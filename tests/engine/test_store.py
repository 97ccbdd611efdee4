"""Stores. Golden: where a record lies. Laws: a packed or a RAM store gives what the store it was made from gives, the
same input gives the same bytes, whatever goes wrong leaves no store. Each fault has its message. gpu: pinned memory.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from store_cases import (
    EXPERTS,
    LAYERS,
    OURS,
    PLAIN,
    Made,
    read_weights,
    same,
    target_of,
    write_source,
)

from engine import direct
from engine import pack as pack_module
from engine import store as store_module
from engine.errors import UserError
from engine.pack import pack
from engine.record import PAGE, divisible, page_aligned, pieces_of
from engine.store import DTYPES, PackedStore, RamStore, is_packed, verify

ALL = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
FACTS = {"model": "made-up", "revision": "1f2e"}


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source")


@pytest.fixture
def packed(tmp_path, source):
    pack(Made(), tmp_path / "packed", source=source, leave_out=OURS, facts=FACTS)
    return tmp_path / "packed"


def left_behind(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "source")


# ---- a store gives what it was made from ----------------------------------------------------------------------------
@pytest.mark.parametrize("chunk", [1, 2 * PAGE, 1 << 20])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_packed_store_gives_the_weights_it_was_made_from(tmp_path, source, monkeypatch, dtype, chunk):
    monkeypatch.setattr(pack_module, "CHUNK_BYTES", chunk)  # one record a write, two, all
    made, steps = Made(DTYPES[dtype]), []
    pack(made, tmp_path / "packed", source=source, leave_out=OURS, facts=FACTS, progress=lambda *n: steps.append(n))
    store = PackedStore(tmp_path / "packed")
    assert (store.layers, store.experts, store.layout) == (LAYERS, EXPERTS, made.layout)
    for place in ALL:
        assert same(read_weights(store, *place), made.weights(*place)), place
    assert store.read(1, 1, target_of(store)[1]) == store.layout.record_bytes
    assert steps == sorted(steps) and steps[-1] == (len(ALL), len(ALL))
    store.close()


def test_a_record_lies_at_its_number_times_its_size(packed):
    store, raw = PackedStore(packed), (packed / "experts.bin").read_bytes()
    size = store.layout.record_bytes
    assert size % PAGE == 0 and len(raw) == LAYERS * EXPERTS * size
    buffer, target = target_of(store)
    for layer, expert in ALL:
        store.read(layer, expert, target)
        assert bytes(target) == raw[(layer * EXPERTS + expert) * size :][:size]
    covered = torch.zeros(size, dtype=torch.bool)
    for at, part in zip(store.layout.offsets, store.layout.part_bytes, strict=True):
        covered[at : at + part] = True
    assert 0 < int(covered.sum()) < size and not buffer[0][~covered].any()  # gaps hold zeros
    store.close()


def test_records_are_read_past_the_page_cache_or_say_cached(packed):
    store = PackedStore(packed)
    flags = fcntl.fcntl(store._fd, fcntl.F_GETFL)
    assert store.cached == (not flags & os.O_DIRECT)
    store.close()


@pytest.mark.parametrize("why", ["memory", "refused"])
def test_a_file_system_without_o_direct_is_read_all_the_same_and_says_so(packed, monkeypatch, why):
    if why == "memory":
        monkeypatch.setattr(direct, "filesystem", lambda _: "tmpfs")
    else:
        honest = os.open

        def refuse(path, flags, *mode):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            return honest(path, flags, *mode)

        monkeypatch.setattr(store_module.os, "open", refuse)
    store = PackedStore(packed)
    assert store.cached and same(read_weights(store, 1, 2), Made().weights(1, 2))
    store.close()


@pytest.mark.parametrize("shards", [1, 3])
def test_the_folder_has_every_other_tensor_as_it_was_and_what_a_model_needs(tmp_path, shards):
    source = write_source(tmp_path / "source", shards=shards)
    pack(Made(), tmp_path / "packed", source=source, leave_out=OURS, facts=FACTS)
    with safe_open(tmp_path / "packed" / "model.safetensors", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"} and set(handle.keys()) == set(PLAIN)
        for name, tensor in PLAIN.items():
            found = handle.get_tensor(name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
    names = {"config.json", "generation_config.json", "tokenizer.json", "merges.txt"}
    for name in names:
        assert (tmp_path / "packed" / name).read_bytes() == (source / name).read_bytes()
    found = {path.name for path in (tmp_path / "packed").iterdir()}
    assert found == names | {"experts.bin", "store.json", "model.safetensors"}
    assert is_packed(tmp_path / "packed") and not is_packed(source)
    assert left_behind(tmp_path) == ["packed"]


def test_the_same_weights_give_the_same_bytes_and_others_another_identity(tmp_path, source, packed):
    def manifest_of(name, store, facts):
        pack(store, tmp_path / name, source=source, leave_out=OURS, facts=facts)
        return PackedStore(tmp_path / name).manifest

    first = PackedStore(packed).manifest
    again = manifest_of("again", Made(), {"revision": "another"})
    for name in ("experts.bin", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (packed / name).read_bytes()
    assert first.identity == again.identity and (first.facts, again.facts) == (FACTS, {"revision": "another"})
    one_more = {(1, 3): lambda weights: weights["down_proj"].view(-1)[-1].add_(1)}
    other = manifest_of("other", Made(change=one_more), FACTS)
    differ = [place for place, a, b in zip(ALL, first.checksums, other.checksums, strict=True) if a != b]
    assert differ == [(1, 3)] and other.identity != first.identity


def test_a_packed_store_can_be_packed_again(tmp_path, packed):
    store = PackedStore(packed)
    pack(store, tmp_path / "second", source=packed, leave_out=(), facts=FACTS)
    store.close()
    assert PackedStore(tmp_path / "second").manifest == PackedStore(packed).manifest


def test_a_ram_store_gives_the_weights_of_the_other(packed):
    disk = PackedStore(packed)
    ram = RamStore(disk, readers=3)
    disk.close()
    assert (ram.layers, ram.experts, ram.layout) == (disk.layers, disk.experts, disk.layout)
    for place in ALL:
        assert same(read_weights(ram, *place), Made().weights(*place)), place
        assert ram.record(*place).data_ptr() % PAGE == 0
    assert ram.read(0, 0, target_of(ram)[1]) == ram.layout.record_bytes
    ram.close()


@pytest.mark.gpu
def test_a_pinned_ram_store_is_copied_to_the_device(packed):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    ram = RamStore(PackedStore(packed), pin=True)
    assert ram.record(1, 2).is_pinned()
    record = ram.record(1, 2).to("cuda", non_blocking=True).cpu()
    weights = {name: view[0] for name, view in ram.layout.views(record[None]).items()}
    assert same(weights, Made().weights(1, 2))
    ram.close()


def test_experts_that_do_not_fit_into_ram_stay_on_the_disk(packed, monkeypatch):
    monkeypatch.setattr(store_module.psutil, "virtual_memory", lambda: SimpleNamespace(available=PAGE))
    with pytest.raises(UserError, match=r"4,096 bytes of memory free; expected [\d,]+ for all experts; leave them"):
        RamStore(PackedStore(packed))


# ---- whole or not at all --------------------------------------------------------------------------------------------
def test_an_existing_target_is_refused_and_left_alone(tmp_path, source):
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "mine").write_text("x")
    with pytest.raises(UserError, match=r"packed exists; expected a new folder; remove it"):
        pack(Made(), tmp_path / "packed", source=source, leave_out=OURS, facts=FACTS)
    assert left_behind(tmp_path) == ["packed"] and os.listdir(tmp_path / "packed") == ["mine"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["gate_up_proj_bias", "down_proj"])
@pytest.mark.parametrize("place", [(0, 0), (1, 3)])
def test_weights_that_are_not_finite_are_refused_by_layer_and_expert(tmp_path, source, value, part, place):
    spoiled = {place: lambda weights: weights[part].view(-1)[-1].fill_(value)}
    message = rf"layer {place[0]}, expert {place[1]}: {part} is not finite; expected finite weights"
    with pytest.raises(UserError, match=message):
        pack(Made(change=spoiled), tmp_path / "packed", source=source, leave_out=OURS, facts=FACTS)
    assert left_behind(tmp_path) == []


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, source, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=PAGE))
    monkeypatch.setattr(Made, "read", lambda *_: pytest.fail("an expert was read"))
    with pytest.raises(UserError, match=r"4,096 bytes free for .*; expected [\d,]+; free some"):
        pack(Made(), tmp_path / "packed", source=source, leave_out=OURS, facts=FACTS)
    assert left_behind(tmp_path) == []


def _limited(monkeypatch):
    """No file of this process may grow beyond two records."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * Made().layout.record_bytes, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _full(name, call):
    """The disk is full at the `call`th call of os.`name`."""

    def install(monkeypatch):
        honest, calls = getattr(os, name), []

        def fail(*arguments):
            calls.append(name)
            if len(calls) == call:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return honest(*arguments)

        monkeypatch.setattr(pack_module.os, name, fail)
        return lambda: None

    return install


@pytest.mark.parametrize(
    "full",
    [_limited, _full("posix_fallocate", 1), _full("pwritev", 3), _full("fsync", 1), _full("fsync", 3)],
    ids=["file too large", "no room for the records", "third write", "records not synced", "tokenizer not synced"],
)
def test_a_disk_that_fills_up_leaves_nothing(tmp_path, source, monkeypatch, full):
    monkeypatch.setattr(pack_module, "CHUNK_BYTES", 1)
    with monkeypatch.context() as patch:
        undo = full(patch)
        try:
            with pytest.raises(UserError, match=r"writing .*(No space left|too large).*; expected a disk with room"):
                pack(Made(), tmp_path / "packed", source=source, leave_out=OURS, facts=FACTS)
        finally:
            undo()
    assert left_behind(tmp_path) == []
    pack(Made(), tmp_path / "packed", source=source, leave_out=OURS, facts=FACTS)
    verify(tmp_path / "packed")


def test_a_read_error_while_packing_names_the_expert_and_leaves_nothing(tmp_path, source):
    class Broken(Made):
        def read(self, layer, expert, target):
            if (layer, expert) == (1, 1):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(layer, expert, target)

    with pytest.raises(UserError, match=r"layer 1, expert 1: Input/output error; expected a device"):
        pack(Broken(), tmp_path / "packed", source=source, leave_out=OURS, facts=FACTS)
    assert left_behind(tmp_path) == []


PACK_AND_HANG = """
import sys, time
sys.path.insert(0, {tests!r})
import store_cases
from engine import pack as pack_module
pack_module.CHUNK_BYTES = 1  # a write a record

class Hanging(store_cases.Made):
    def read(self, layer, expert, target):
        if (layer, expert) == {place}:
            print("there", flush=True)
            time.sleep(600)
        return super().read(layer, expert, target)

pack_module.pack(Hanging(), {folder!r}, source={source!r}, leave_out=store_cases.OURS, facts={{}})
"""


def test_a_process_killed_while_packing_leaves_no_store_and_does_not_block_the_next(tmp_path, source):
    root, folder = Path(__file__).parents[2], tmp_path / "packed"
    code = PACK_AND_HANG.format(tests=str(Path(__file__).parent), place=(1, 3), folder=str(folder), source=str(source))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "there\n"
        with pytest.raises(UserError, match=r"another process writes .*; expected one at a time"):
            pack(Made(), folder, source=source, leave_out=OURS, facts=FACTS)
        assert process.poll() is None and left_behind(tmp_path) == [".packed.building"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    half = tmp_path / ".packed.building"
    assert (half / "experts.bin").exists() and not folder.exists()
    with pytest.raises(UserError, match=r"no store\.json in .*; expected a packed store"):
        PackedStore(half)
    pack(Made(), folder, source=source, leave_out=OURS, facts=FACTS)
    verify(folder)
    assert left_behind(tmp_path) == ["packed"]


# ---- what is no store -----------------------------------------------------------------------------------------------
def _edit(**fields):
    def change(folder):
        path = folder / "store.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def _without(field):
    def change(folder):
        path = folder / "store.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != field}))

    return change


def _cut(name, by=1):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - by)


WRONG = {
    "records missing": (lambda f: (f / "experts.bin").unlink(), r"no experts.bin in .*; expected the files that pack"),
    "records cut short": (_cut("experts.bin", PAGE), r"experts.bin of [\d,]+ bytes; expected [\d,]+, as it was packed"),
    "weights missing": (lambda f: (f / "model.safetensors").unlink(), r"no model.safetensors in"),
    "tokenizer cut short": (_cut("tokenizer.json"), r"tokenizer.json of 25 bytes; expected 26, as it was packed"),
    "no folder": (shutil.rmtree, r"no store.json in .*; expected a packed store; check the path, or pack one"),
    "manifest cut short": (_cut("store.json", 9), r"store.json: .*; expected the JSON that pack wrote; pack it again"),
    "manifest of nothing": (lambda f: (f / "store.json").write_text("[]"), r"schema None; expected 'expert-store-1'"),
    "foreign schema": (_edit(schema="expert-store-2"), r"schema 'expert-store-2'; expected 'expert-store-1'"),
    "field missing": (_without("layout"), r"KeyError 'layout'; expected the fields that pack wrote"),
    "unknown dtype": (_edit(layout={"names": ["a"], "shapes": [[1]], "dtype": "int3"}), r"KeyError 'int3'"),
    "shapes that are none": (_edit(layout={"names": ["a"], "shapes": [1], "dtype": "float32"}), r"TypeError"),
    "fewer layers": (_edit(layers=1), r"store.json does not agree with its own identity; .*; pack it again"),
    "another record size": (_edit(record_bytes=PAGE * 9), r"does not agree with its own identity"),
    "another checksum": (_edit(checksums=[0] * len(ALL)), r"does not agree with its own identity"),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_what_is_not_a_whole_store_is_refused(packed, case):
    damage, message = WRONG[case]
    damage(packed)
    for check in (PackedStore, verify):
        with pytest.raises(UserError, match=message):
            check(packed)


def test_verify_names_the_first_record_that_changed(packed):
    steps = []
    verify(packed, lambda *n: steps.append(n))
    assert steps == [(n + 1, len(ALL)) for n in range(len(ALL))]
    size = PackedStore(packed).layout.record_bytes
    for number in (9, 8):  # the last bit of a record, in a gap, is part of it too
        with open(packed / "experts.bin", "r+b") as handle:
            handle.seek((number + 1) * size - 1)
            handle.write(b"\x01")
        found = rf"layer {number // EXPERTS}, expert {number % EXPERTS} has another checksum; expected the bytes"
        with pytest.raises(UserError, match=found):
            verify(packed)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_verify_names_a_file_that_changed(packed, name):
    data = bytearray((packed / name).read_bytes())
    data[-1] ^= 1
    (packed / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"{name} has another checksum; expected the bytes that were packed"):
        verify(packed)


@pytest.mark.parametrize("change", ["target too small", "target too large", "file cut short"])
def test_a_short_read_is_an_error(packed, change):
    store = PackedStore(packed)
    size = store.layout.record_bytes
    if change == "file cut short":
        os.truncate(packed / "experts.bin", (len(ALL) - 1) * size)
    wanted = size + {"target too small": -PAGE, "target too large": PAGE}.get(change, 0)
    place = (0, 0) if change.startswith("target") else (1, 4)
    target = memoryview(page_aligned(1, wanted)[0].numpy())
    with pytest.raises(UserError, match=rf"bytes of layer {place[0]}, expert {place[1]}; expected a record of {size}"):
        store.read(*place, target)
    store.close()


@pytest.mark.parametrize("number", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["packed", "ram"])
def test_the_pieces_of_a_record_are_the_record(packed, kind, number):
    """Equal parts in whole pages, as many as there are pages at most, that cover it."""
    store = PackedStore(packed)
    read = RamStore(store) if kind == "ram" else store
    size = store.layout.record_bytes
    parts = pieces_of(size, number)
    lengths = [stop - first for first, stop in parts]
    assert len(parts) == min(number, size // PAGE) and sum(lengths) == size and max(lengths) - min(lengths) <= PAGE
    assert divisible(read) and all(first % PAGE == 0 for first, _ in parts)
    for layer, expert in ALL:
        whole, found = (page_aligned(1, size)[0] for _ in range(2))
        store.read(layer, expert, memoryview(whole.numpy()))
        for first, stop in reversed(parts):
            assert read.read_part(layer, expert, memoryview(found.numpy())[first:stop], first) == stop - first
        assert torch.equal(found, whole)
    store.close()


def test_a_part_beyond_the_end_of_a_record_is_an_error(packed):
    """It would be the next expert's."""
    store = PackedStore(packed)
    target = memoryview(page_aligned(1, 2 * PAGE)[0].numpy())
    with pytest.raises(UserError, match=r"bytes of layer 0, expert 1; expected a record of"):
        store.read_part(0, 1, target, store.layout.record_bytes - PAGE)
    store.close()


# ---- what cannot be packed ------------------------------------------------------------------------------------------
def _pointer(folder):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4000\n"
    (folder / "model.safetensors").write_text(text, encoding="utf-8")


BAD_SOURCES = {
    "no configuration": (1, lambda f: (f / "config.json").unlink(), r"no config.json in .*; expected a model folder"),
    "no weights": (1, lambda f: (f / "model.safetensors").unlink(), r"has neither model.safetensors nor"),
    "a shard missing": (
        3,
        lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
        r"00002-of.* is missing; expected every shard",
    ),
    "weights cut short": (
        1,
        _cut("model.safetensors"),
        r"bytes; expected [\d,]+, as its header says; fetch the checkpoint",
    ),
    "an index that is none": (
        3,
        _cut("model.safetensors.index.json", 30),
        r"index.json is broken .*; expected JSON with a weight_map",
    ),
    "an lfs pointer": (1, _pointer, r"is a Git LFS pointer; expected the file"),
    "an empty file": (1, lambda f: (f / "model.safetensors").write_bytes(b""), r"0 bytes and no whole header"),
}


@pytest.mark.parametrize("case", sorted(BAD_SOURCES))
def test_a_source_that_is_not_whole_is_refused(tmp_path, case):
    shards, damage, message = BAD_SOURCES[case]
    source = write_source(tmp_path / "source", shards=shards)
    damage(source)
    with pytest.raises(UserError, match=message):
        pack(Made(), tmp_path / "packed", source=source, leave_out=OURS, facts=FACTS)
    assert left_behind(tmp_path) == []


def test_an_expert_tensor_that_is_not_there_and_a_dtype_that_is_none_are_refused(tmp_path, source):
    with pytest.raises(UserError, match=r"no tensor 'expert.9' in .*; expected every tensor of an expert"):
        pack(Made(), tmp_path / "packed", source=source, leave_out=[*OURS, "expert.9"], facts=FACTS)
    with pytest.raises(UserError, match=r"experts in torch.float64; expected bfloat16 or float16 or float32"):
        pack(Made(torch.float64), tmp_path / "packed", source=source, leave_out=OURS, facts=FACTS)
    with pytest.raises(TypeError):
        pack(Made(), tmp_path / "packed", source=source, leave_out=OURS, facts={"model": object()})
    assert left_behind(tmp_path) == []
