"""Host profiles. Golden: interpolation and batches worked out by hand. Laws: what a profile may not say, each with its
message; identity. End to end: a quick probe of this machine, read back. No test asserts a time.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from engine import host as host_module
from engine.errors import UserError
from engine.host import describe, load_host, load_hosts, this_host
from engine.host_facts import fingerprint
from engine.host_times import Affine, Table, Throttle

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "config" / "hosts"
MARK = "0123456789abcdef"


def rows(*cells):
    """rows((bytes, seconds...), ...) as a profile has them."""
    return [{"bytes": b, "seconds": list(s), "spread": [0.01] * len(s)} for b, *s in cells]


def measured(**fields) -> dict:
    """A small measured profile of round numbers."""
    one = {"counts": [1], "rows": rows((1000, 0.001), (3000, 0.002))}
    dtype = {
        "slot_s": {"value": 1e-6, "spread": 0.1},
        "token": copy.deepcopy(one),
        "layers": copy.deepcopy(one),
        "experts": {"counts": [1, 4], "rows": rows((1000, 0.001, 0.0025), (2000, 0.002, 0.005))},
    }
    cpu = {"threads": 2, "wait_policy": "passive", "experts_implementation": "grouped_mm", "slots": 64}
    cpu |= {"event_s": {"value": 1e-4, "spread": 0.1}, "dtypes": {"float32": dtype}}
    disk = {"kind": "disk", "limit_bytes_per_s": 4e6, "counts": [1, 2, 4]}
    disk["rows"] = rows((1000, 0.001, 0.0012, 0.0016), (5000, 0.003, 0.005, 0.009))
    return {
        "id": "box",
        "status": "measured",
        "fingerprint": MARK,
        "facts": {"cpu": "x", "cores": 2, "ram_bytes": 2**34, "gpus": []},
        "probe": {"quick": False, "seconds": 50.0, "file_bytes": 2**29, "other_cores": 0.1},
        "compute": {"cpu": cpu},
        "links": {"disk": disk},
    } | fields


def modelled() -> dict:
    return yaml.safe_load((SHIPPED / "rtx3090_nvme_16gb.yaml").read_text(encoding="utf-8"))


def write(folder: Path, data: dict, stem: str | None = None) -> Path:
    path = folder / f"{stem or data['id']}.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture
def box(tmp_path):
    return load_host(write(tmp_path, measured()))


# ---- golden: times --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "count", "seconds"),
    [
        (1000, 1, 0.001),  # a cell
        (3000, 1, 0.002),  # halfway between the rows
        (3000, 2, 0.0031),  # in the second column
        (1000, 3, 0.0014),  # halfway between the columns
        (3000, 3, 0.0042),  # both: between 0.0014 and 0.007
        (10, 1, 0.001),  # less than the first row costs the first row
        (7000, 1, 0.004),  # beyond the last row its slope goes on: 0.0005 s a thousand bytes
        (1000, 6, 0.002),  # beyond the last column too: 0.0002 s a record
    ],
)
def test_a_table_is_linear_between_its_cells(box, size, count, seconds):
    assert box.link("disk").time.total_s(size, count) == pytest.approx(seconds)


def test_a_table_never_falls_beyond_its_last_row():
    noisy = Table((1000, 2000), (1,), ((0.002,), (0.001,)))
    assert noisy.total_s(5000) == 0.001


def test_a_table_of_one_column_has_no_overlap():
    assert Table((1000, 2000), (1,), ((0.001,), (0.002,))).total_s(2000, 3) == pytest.approx(0.006)


@pytest.mark.parametrize(
    ("count", "depth", "seconds"),
    [
        (0, None, 0.0),
        (1, None, 0.001),
        (2, None, 0.0012),
        (4, None, 0.0016),
        (8, None, 0.0032),  # never deeper than measured: twice four
        (10, None, 0.0040),
        (8, 2, 0.0048),  # four times two
        (8, 100, 0.0032),
        (3, 1, 0.003),
    ],
)
def test_a_batch_is_served_in_rounds_of_its_depth(box, count, depth, seconds):
    assert box.link("disk").batch_s(1000, count, depth) == pytest.approx(seconds)


def test_a_kept_queue_serves_a_record_every_so_often(box):
    disk = box.link("disk")
    assert disk.transfer_s(1000) == pytest.approx(0.001)
    assert disk.transfer_s(1000, depth=4) == disk.transfer_s(1000, depth=64) == pytest.approx(0.0004)
    assert disk.batch_s(1000, 400) == pytest.approx(400 * disk.transfer_s(1000, 4))


def test_modelled_latencies_overlap_and_bandwidth_is_shared():
    link = Affine(0.001, 1e6)
    assert link.total_s(1000, 1) == pytest.approx(0.002)
    assert link.total_s(1000, 4) == pytest.approx(0.005)


def test_a_throttle_is_never_faster_than_what_it_slows_down(tmp_path):
    slow = {"kind": "disk", "of": "disk", "latency_s": 0.001, "bandwidth_bytes_per_s": 1e6}
    data = measured()
    data["links"] |= {"a_card": slow, "no_limit": slow | {"latency_s": 0, "bandwidth_bytes_per_s": 2.2e6}}
    host = load_host(write(tmp_path, data))
    card = host.link("a_card")
    assert (card.status, card.kind, card.limit_bytes_per_s) == ("throttled", "disk", 1e6)
    assert card.transfer_s(1000) == pytest.approx(0.002)
    assert card.batch_s(1000, 4) == pytest.approx(0.005)
    assert host.link("no_limit").transfer_s(1000) == host.link("disk").transfer_s(1000)
    for count in range(1, 9):
        assert card.batch_s(3000, count) >= host.link("disk").batch_s(3000, count)
    assert Throttle(Affine(0.0, 5.0), Affine(0.0, 2.0)).peak_bytes_per_s == 2.0


def test_compute_reads_its_tables(box):
    cpu = box.device
    assert cpu.device == "cpu" and cpu.event_s == 1e-4
    assert cpu.token_s(2000, "float32") == pytest.approx(0.0015)
    assert cpu.layer_s(3000, "float32") == pytest.approx(0.002)
    assert cpu.experts_s(1500, 4, "float32") == pytest.approx(0.00375)
    assert cpu.experts_s(1000, 8, "float32") == pytest.approx(0.0045)  # 0.0005 s an expert more
    assert cpu.experts_s(1000, 0, "float32") == 0.0
    assert cpu.experts_s(1000, 4, "float32", slots=164) == pytest.approx(0.0026)
    assert cpu.experts_s(1000, 4, "float32", slots=64) == cpu.experts_s(1000, 4, "float32")
    with pytest.raises(UserError, match=r"dtype 'float23' on cpu; .* did you mean 'float32'"):
        cpu.layer_s(1, "float23")
    with pytest.raises(UserError, match=r"link 'dik' of host box; .* did you mean 'disk'"):
        box.link("dik")


def test_an_observation_above_the_limit_is_the_page_cache(box):
    box.link("disk").check_observed(4000, 0.001, "run 3")
    with pytest.raises(UserError, match=r"run 3: 4.01e\+06 bytes/s over link disk; .*; the page cache answered"):
        box.link("disk").check_observed(4010, 0.001, "run 3")


# ---- laws: what is refused ------------------------------------------------------------------------------------------
def _set(*path_and_value):
    *path, last, value = path_and_value

    def change(data):
        for key in path:
            data = data[key]
        if value is None:
            del data[last]
        else:
            data[last] = value

    return change


THROTTLE = {"kind": "disk", "of": "disk", "latency_s": 0.001, "bandwidth_bytes_per_s": 1e6}
WRONG = {
    "field missing": (measured, _set("links", "disk", "kind", None), r"links.disk lacks 'kind'"),
    "section missing": (measured, _set("compute", None), r"box.yaml: lacks 'compute'"),
    "no fingerprint": (measured, _set("fingerprint", None), r"lacks 'fingerprint'"),
    "no disk": (measured, _set("links", {}), r"links lacks 'disk'"),
    "unknown field": (measured, _set("linkz", 1), r"has a field 'linkz'; .* did you mean 'links'"),
    "unknown field of a link": (
        measured,
        _set("links", "disk", "row", 1),
        r"links.disk has a field 'row'; .* did you mean 'rows'",
    ),
    "negative": (measured, _set("links", "disk", "limit_bytes_per_s", -1.0), r"links.disk.limit_bytes_per_s is -1.0"),
    "zero seconds": (measured, _set("links", "disk", "rows", 0, "seconds", 0, 0.0), r"rows.0.seconds.0 is 0.0"),
    "infinite": (
        measured,
        _set("links", "disk", "limit_bytes_per_s", float("inf")),
        r"limit_bytes_per_s is inf; .*finite",
    ),
    "not a number": (
        measured,
        _set("links", "disk", "rows", 1, "seconds", 2, float("nan")),
        r"rows.1.seconds.2 is nan",
    ),
    "impossible": (
        measured,
        _set("links", "disk", "limit_bytes_per_s", 1e12),
        r"links.disk.limit_bytes_per_s is 1e\+12; expected at most 6.4e\+10 for kind disk",
    ),
    "page cache": (
        measured,
        _set("links", "disk", "limit_bytes_per_s", 2e6),
        r"links.disk: 2.5e\+06 bytes/s; .*page cache",
    ),
    "impossible compute": (
        measured,
        _set("compute", "cpu", "dtypes", "float32", "layers", "rows", 1, "seconds", 0, 1e-12),
        r"compute.cpu.dtypes.float32.layers: 3e\+15 bytes/s",
    ),
    "text for a number": (
        measured,
        _set("links", "disk", "limit_bytes_per_s", "25e9"),
        r"is \"25e9\"; .*25_000_000_000",
    ),
    "a cell short": (
        measured,
        _set("links", "disk", "rows", 0, "spread", [0.1]),
        r"links.disk.rows.0: 3 seconds, 1 spreads",
    ),
    "rows unsorted": (measured, _set("links", "disk", "rows", 0, "bytes", 9000), r"links.disk: counts .* both rising"),
    "counts from two": (measured, _set("links", "disk", "counts", [2, 3, 4]), r"counts \[2, 3, 4\].*counts from 1"),
    "throttle of nothing": (
        measured,
        _set("links", "card", THROTTLE | {"of": "disc"}),
        r"links.card.of is 'disc'; .* did you mean 'disk'",
    ),
    "throttle of another kind": (
        measured,
        _set("links", "card", THROTTLE | {"kind": "pcie"}),
        r"kind pcie of measured disk",
    ),
    "throttle that is none": (
        measured,
        _set("links", "card", THROTTLE | {"bandwidth_bytes_per_s": 9e6}),
        r"links.card.bandwidth_bytes_per_s is 9e\+06; expected at most the 2.5e\+06 of 'disk'",
    ),
    "throttle without latency": (
        measured,
        _set("links", "card", {"kind": "disk", "of": "disk", "bandwidth_bytes_per_s": 1e6}),
        r"links.card lacks 'latency_s'",
    ),
    "no source": (modelled, _set("links", "pcie", "latency_s", "source", None), r"links.pcie.latency_s lacks 'source'"),
    "bare constant": (modelled, _set("links", "pcie", "latency_s", 6e-6), r"links.pcie.latency_s is 6e-06"),
    "modelled above its limit": (
        modelled,
        _set("links", "pcie", "bandwidth_bytes_per_s", "value", 4e10),
        r"links.pcie: 4e\+10 bytes/s; expected at most its limit",
    ),
    "modelled with a fingerprint": (modelled, _set("fingerprint", MARK), r"a modelled host with a fingerprint"),
    "status": (measured, _set("status", "guessed"), r"status is \"guessed\""),
    "dot in the id": (measured, _set("id", "my.box"), r"id is \"my.box\""),
    "space in the id": (measured, _set("id", "my box"), r"id is \"my box\""),
    "another name": (measured, _set("id", "crate"), r"id 'crate'; expected the name of the file, 'box'"),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_a_wrong_profile_is_refused_by_field(tmp_path, case):
    build, change, message = WRONG[case]
    data = build()
    stem = data["id"]
    change(data)
    with pytest.raises(UserError, match=message) as caught:
        load_host(write(tmp_path, data, stem))
    assert stem in str(caught.value) and len(str(caught.value).split("; ")) >= 3


def test_what_is_no_profile_is_refused(tmp_path):
    for text, message in (("[1, 2]", "is"), ("a: [", "valid YAML"), ("", "is null")):
        (tmp_path / "box.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=message):
            load_host(tmp_path / "box.yaml")
    with pytest.raises(UserError, match="does not exist"):
        load_host(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="is no folder"):
        load_hosts(tmp_path / "none")


def test_two_hosts_with_one_fingerprint_are_refused(tmp_path):
    write(tmp_path, measured())
    assert list(load_hosts(tmp_path)) == ["box"]
    write(tmp_path, measured(id="second"))
    with pytest.raises(UserError, match=rf"second.yaml: fingerprint {MARK}, as in .*box.yaml; expected one profile"):
        load_hosts(tmp_path)


def test_a_modelled_host_is_what_its_constants_say(tmp_path):
    data = modelled()
    write(tmp_path, data)
    data["id"] = "copy"
    data["links"]["pcie"]["latency_s"]["source"] = "another document"
    write(tmp_path, data)
    with pytest.raises(UserError, match="one profile a machine"):
        load_hosts(tmp_path)
    data["links"]["pcie"]["latency_s"]["value"] *= 2
    write(tmp_path, data)
    assert list(load_hosts(tmp_path)) == ["copy", "rtx3090_nvme_16gb"]


def test_this_machine_is_found_by_its_fingerprint(tmp_path):
    write(tmp_path, measured())
    with pytest.raises(UserError, match="no profile with this machine's fingerprint"):
        this_host(load_hosts(tmp_path))
    write(tmp_path, measured(id="here", fingerprint=fingerprint()))
    assert this_host(load_hosts(tmp_path)).id == "here"
    assert fingerprint() == fingerprint()


# ---- the shipped profiles -------------------------------------------------------------------------------------------
def test_shipped_profiles_load_and_name_their_sources():
    hosts = load_hosts(SHIPPED)
    assert {"rtx3090_nvme_16gb", "rtx3090_pcie4"} <= set(hosts) and list(hosts) == sorted(hosts)
    for name, host in hosts.items():
        assert describe(host).startswith(f"{name}: {host.status}")
        for link in host.links.values():
            assert 0 < link.transfer_s(6_291_456, 8) <= link.transfer_s(6_291_456) < 1
            link.check_observed(6_291_456, link.transfer_s(6_291_456), name)
    assert "disk" in hosts["rtx3090_nvme_16gb"].links and "disk" not in hosts["rtx3090_pcie4"].links


# ---- the probe ------------------------------------------------------------------------------------------------------
def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["host", *map(str, arguments)])
    host_module.main()


def test_a_quick_probe_writes_a_profile_that_loads(tmp_path, monkeypatch, capsys):
    scratch, out = tmp_path / "disk", tmp_path / "hosts" / "my-box.yaml"
    command = ["probe", "--quick", "--id", "my-box", "--out", out, "--dir", scratch, "--threads", 1]
    try:
        run(monkeypatch, *command)
    except UserError as exc:
        if "O_DIRECT" in str(exc):
            pytest.skip(str(exc))
        raise
    shown = capsys.readouterr()
    assert "] disk: writing" in shown.err and shown.out.startswith("my-box: measured by a quick probe")
    assert list(scratch.iterdir()) == [] and [path.name for path in out.parent.iterdir()] == ["my-box.yaml"]
    host = load_hosts(out.parent)["my-box"]
    assert host.status == "measured" and host.fingerprint == fingerprint() and host.quick
    assert {"disk", "memory"} <= set(host.links) and set(host.device.times) == {"bfloat16", "float32"}
    for link in host.links.values():
        assert link.slowdown_compute >= 1 and link.slowdown_transfer >= 1
        assert 0 < link.batch_s(1_000_000, 1) < link.batch_s(1_000_000, 9)
    text = out.read_text(encoding="utf-8")
    assert os.uname().nodename not in text.split() and str(tmp_path) not in text
    (tmp_path / "again").mkdir()
    assert load_host(write(tmp_path / "again", yaml.safe_load(text))) == host  # round trip

    other = ["probe", "--quick", "--out", out.parent / "second.yaml", "--dir", scratch]
    with pytest.raises(UserError, match="this machine is already 'my-box'"):
        run(monkeypatch, *other)
    out.write_text(text.replace(host.fingerprint, MARK), encoding="utf-8")
    with pytest.raises(UserError, match=f"is the profile of another machine .{MARK}"):
        run(monkeypatch, *command)
    assert MARK in out.read_text(encoding="utf-8")


def test_a_new_probe_keeps_the_throttled_links(tmp_path, monkeypatch):
    from engine import host_probe

    old = measured(fingerprint=fingerprint())
    old["links"]["usb_stick"] = THROTTLE | {"bandwidth_bytes_per_s": 1.5e6}
    path = write(tmp_path, old)
    fresh = measured()
    parts = {key: fresh[key] for key in ("facts", "probe", "compute", "links")}
    monkeypatch.setattr(host_probe, "measure", lambda *_: copy.deepcopy(parts))
    run(monkeypatch, "probe", "--id", "box", "--out", path)
    assert load_host(path).link("usb_stick").limit_bytes_per_s == 1.5e6
    # a disk that is slower than its old throttle: refused, and the old file stays
    for row in parts["links"]["disk"]["rows"]:
        row["seconds"] = [10 * s for s in row["seconds"]]
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"links.usb_stick.bandwidth_bytes_per_s"):
        run(monkeypatch, "probe", "--id", "box", "--out", path)
    assert path.read_bytes() == before


def test_a_disk_that_cannot_be_read_past_the_cache_is_refused(tmp_path, monkeypatch):
    from engine import host_probe

    command = ("probe", "--quick", "--out", tmp_path / "box.yaml", "--dir", tmp_path / "disk", "--threads", 1)
    monkeypatch.setattr(host_probe, "_measure_link", lambda *_: {})

    with monkeypatch.context() as patch:
        patch.setattr(host_probe, "filesystem", lambda _: "tmpfs")
        with pytest.raises(UserError, match=r"is on tmpfs; .*O_DIRECT.*; .*`cached` is not accepted"):
            run(patch, *command)

    def refuse(path, *_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)

    with monkeypatch.context() as patch:
        patch.setattr(host_probe.os, "open", refuse)
        with pytest.raises(UserError, match=r"no file with O_DIRECT .Invalid argument.; .*`cached` is not accepted"):
            run(patch, *command)

    with monkeypatch.context() as patch:
        patch.setattr(host_probe, "_cached_share", lambda *_: 0.5)
        with pytest.raises(
            UserError, match=r"the page cache holds what O_DIRECT read|no file with O_DIRECT|is on tmpfs"
        ):
            run(patch, *command)
    assert not (tmp_path / "box.yaml").exists() and list((tmp_path / "disk").iterdir()) == []


def test_a_busy_machine_is_refused():
    from engine import host_probe

    calm = [measured()["links"], measured()["compute"]]  # sixteen spreads
    host_probe._check_quiet(calm, 0.1, 2, 2)
    calm[0]["disk"]["rows"][0]["spread"] = [0.9, 0.1, 0.1]
    host_probe._check_quiet(calm, 0.1, 2, 2)
    calm[0]["disk"]["rows"][0]["spread"] = [0.9, 0.9, 0.1]
    with pytest.raises(UserError, match=r"% of the measured cells spread .*; .*idle machine; .*--threads"):
        host_probe._check_quiet(calm, 0.1, 2, 2)
    with pytest.raises(UserError, match="idle machine"):
        host_probe._check_quiet({"value": 1.0, "spread": 1000.0}, 0.0, 1, 2)
    host_probe._check_quiet({"value": 1.0, "spread": 0.1}, 1.2, 1, 2)
    with pytest.raises(
        UserError, match=r"2 threads were measured while other work kept 1.2 of 2 cores busy; .*--threads"
    ):
        host_probe._check_quiet({"value": 1.0, "spread": 0.1}, 1.2, 2, 2)


def test_cells_take_turns_in_changing_order():
    from engine.host_sample import sample

    seen = []
    cells = {name: (lambda name=name: seen.append(name) or 1.0) for name in "abc"}
    found = sample(cells, 1e-9, 5)
    assert seen[:3] == ["a", "b", "c"]  # warming up
    turns = ["".join(seen[i : i + 3]) for i in range(3, len(seen), 3)]
    assert {"".join(sorted(turn)) for turn in turns} == {"abc"} and len(set(turns)) > 1
    assert [len(values) for values in found.values()] == [len(turns)] * 3


def test_the_page_cache_is_seen(tmp_path):
    from engine import host_probe

    with open(tmp_path / "file", "w+b") as handle:
        handle.write(b"x" * 2**20)
        handle.flush()
        assert host_probe._cached_share(handle.fileno(), 2**20) == 1.0


# ---- the command ----------------------------------------------------------------------------------------------------
def test_commands(tmp_path, monkeypatch, capsys):
    write(tmp_path, measured())
    run(monkeypatch, "check", tmp_path)
    assert capsys.readouterr().out == f"box: measured, {MARK}, links disk\n"
    run(monkeypatch, "show", "box", "--folder", tmp_path)
    assert "link disk (disk, measured)" in capsys.readouterr().out
    for arguments, message in (
        (["show", "bax", "--folder", tmp_path], "host 'bax'; .* did you mean 'box'"),
        (["probe"], "neither --id nor --out"),
        (["probe", "--id", "my.box"], "id 'my.box'"),
        (["probe", "--id", "a", "--out", tmp_path / "b.yaml"], "id 'a' in b.yaml"),
        (["probe", "--id", "a", "--threads", "0"], "--threads 0"),
    ):
        with pytest.raises(UserError, match=message):
            run(monkeypatch, *arguments)


def test_profiles_are_read_without_torch_and_errors_are_one_line(tmp_path):
    write(tmp_path, measured(status="guessed"))
    code = (
        "import sys; from engine.errors import main_guard; from engine.host import main\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        f"sys.argv = ['host', 'check', {json.dumps(str(tmp_path))}]; main_guard(main)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ") and "status is" in done.stderr
