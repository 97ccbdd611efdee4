"""Programs beside the engine, by hand: workload, runs under a memory limit, tables, picture, page, import.

On the tiny model, without llama.cpp, whose build takes minutes: its rows say so. No time is asserted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from measured_cases import Case, made, prepare, rewrite_json
from pictures import draw, legible_words
from tiny import ROOT, TEST, run_script

from engine.files import write_json
from engine.host import main as host_main
from engine.measured_run import read_peers
from evals.peers import checkpoint
from evals.peers.sheet import COLUMNS
from evals.peers.tables import read_table

SHEET = (
    ("llama_cpp", "llama_cpp", "limit", "-", "-", "all", "mmap", "all", "-"),
    ("system", "transformers", "limit", "-", "-", "all", "-", "2", "-"),
    ("fetch_lfu_decay", "engine", "limit", "fetch_lfu_decay", "50", "all", "-", "all", "-"),
    ("speed_first", "engine", "limit", "speed_first", "50", "all", "-", "all", "-"),
)
LIMIT = 4_000_000_000
DOCUMENTS, TOKENS = 2, 4
NO_COMPILER = "llama.cpp does not compile: no cc; expected a compiler; install one"


class Peers:
    def __init__(self, root: Path) -> None:
        self.case: Case = prepare(root)
        self.root, self.out = root, self.case.folder / "peers_tiny.json"
        self.sheet(SHEET)
        write_json(root / "llama" / "status.json", {"requirement": "x", "failed": NO_COMPILER})

    def sheet(self, rows) -> None:
        lines = ["\t".join(row) for row in (COLUMNS, *rows)]
        (self.root / "peers.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def workload(self, **flags):
        own = {"model": "tiny", "model-dir": self.case.model, "size": "own", "store": self.case.store("own")}
        own |= {"host": self.case.profile, "documents": DOCUMENTS, "tokens": TOKENS, "threads": 1}
        own |= {"demand": self.root / "demand.safetensors", "out": self.root / "workload.json"} | flags
        words = [word for name, value in own.items() for word in (f"--{name}", value)]
        return run_script("make_workload.py", *words, "--texts", *self.case.texts)

    def run(self, memory: int = LIMIT):
        flags = {"workload": self.root / "workload.json", "sheet": self.root / "peers.tsv", "memory": memory}
        flags |= {"timeout": 120, "llama": self.root / "llama", "gguf": self.root / "gguf", "out": self.out}
        flags |= {"store": self.case.store("own"), "checkpoint": self.root / "checkpoint"}
        flags |= {"demand": self.root / "demand.safetensors", "predictors": self.root, "host": self.case.profile}
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        return run_script("run_peers.py", *words, "--policies", ROOT / "config" / "policies.tsv")

    def tabulate(self):
        outs = ("--out", self.root / "peers.csv", "--out-documents", self.root / "documents.csv")
        options = ("--level", 0.95, "--replicates", 199, "--seed", 1)
        return run_script("tabulate_peers.py", "--records", self.out, *options, *outs)


@pytest.fixture(scope="module")
def peers(tmp_path_factory) -> Peers:
    found = Peers(tmp_path_factory.mktemp("peers"))
    checkpoint.write(found.case.model, found.root / "checkpoint")
    made(found.workload())
    made(found.run())
    made(found.tabulate())
    return found


def rows(peers: Peers) -> dict[str, dict]:
    return {row["id"]: row for row in read_peers(peers.out)["peers"]}


def test_every_row_of_the_sheet_is_there_with_its_result_or_its_reason(peers):
    found = rows(peers)
    if "memory control group" in found["system"].get("reason", ""):
        pytest.skip(found["system"]["reason"])
    assert list(found) == [row[0] for row in SHEET]
    assert (found["llama_cpp"]["status"], found["llama_cpp"]["reason"]) == ("not run", NO_COMPILER)
    documents = DOCUMENTS * len(TEST) + 1  # and the warm-up
    assert [len(x) for x in found["fetch_lfu_decay"]["seconds"]] == [TOKENS] * documents
    assert [len(x) for x in found["system"]["seconds"]] == [2] * documents
    assert all(0 < row["peak_bytes"] <= LIMIT for row in found.values() if row["status"] == "ok")
    assert found["speed_first"]["counts"]["substitutions"] > 0


def test_the_exact_programs_agree_and_the_table_says_what_the_others_lose(peers):
    table = read_table(peers.root / "peers.csv").set_index("peer")
    if table.loc["system", "status"] != "ok":
        pytest.skip(table.loc["system", "reason"])
    assert abs(table.loc["system", "delta_percent"]) < 5 and table.loc["fetch_lfu_decay", "delta_percent"] == 0
    assert table["speedup"].isna().all()  # no llama.cpp, no ratio
    assert table.loc["llama_cpp", "status"] == "not run"
    documents = pd.read_csv(peers.root / "documents.csv")
    assert len(documents[documents["policy"] == "fetch_lfu_decay"]) == DOCUMENTS * len(TEST)


def test_the_picture_names_every_row_and_the_page_too(peers):
    table = read_table(peers.root / "peers.csv")
    figure, points = draw("peers", table)
    words = legible_words(figure)
    made(run_script("write_peers.py", "--table", peers.root / "peers.csv", "--out", peers.root / "page"))
    page = (peers.root / "page").read_text(encoding="utf-8")
    assert all(name in words and name in page for name in table["peer"]) and len(points) == len(table)


def test_the_picture_of_no_record_says_how_to_make_one(peers):
    figure, points = draw("peers", read_table(peers.root / "peers.csv").iloc[:0])
    assert "snakemake --cores 1 results/peers" in legible_words(figure) and points.empty


def test_what_is_there_is_kept_and_a_new_row_is_run_alone(peers):
    before = rows(peers)
    if before["system"]["status"] != "ok":
        pytest.skip(before["system"]["reason"])
    new = ("system_again", "transformers", "limit", "-", "-", "1", "-", "2", "-")
    peers.sheet((*SHEET, new))
    made(peers.run())
    after = rows(peers)
    assert {name: after[name] for name in before} == before and after["system_again"]["status"] == "ok"


def test_another_memory_is_refused_and_nothing_is_replaced(peers):
    before = peers.out.read_bytes()
    ended = peers.run(memory=LIMIT + 1)
    assert ended.code == 2 and "one of each in a record" in ended.err and peers.out.read_bytes() == before
    assert ": memory_bytes differ" in ended.err


@pytest.mark.parametrize("what", ["llama_cpp", "read_ahead_kb"])
def test_another_program_or_setting_of_the_disk_is_refused(peers, what):
    before = peers.out.read_bytes()

    def change(record):
        if what == "llama_cpp":
            record["provenance"][what] += "0"
        else:
            record[what] += 1

    try:
        rewrite_json(peers.out, change)
        ended = peers.run()
    finally:
        peers.out.write_bytes(before)
    assert ended.code == 2 and "one of each in a record" in ended.err and f": {what} differ" in ended.err


def test_another_machine_s_profile_is_refused(peers, tmp_path):
    ended = peers.workload(host=ROOT / "config" / "hosts" / "rtx3090_pcie4.yaml", out=tmp_path / "w.json")
    assert ended.code == 2 and "probe this machine" in ended.err and not (tmp_path / "w.json").exists()


@pytest.mark.parametrize("fault", ["another host", "another profile", "a token less"])
def test_a_host_is_imported_with_its_peers_or_refused_by_file(peers, fault, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "copied" / "box"
    folder.mkdir(parents=True)
    for name in ("host.yaml", "peers_tiny.json"):
        (folder / name).write_bytes((peers.out.parent / name).read_bytes())
    monkeypatch.setattr("sys.argv", ["host", "import", str(folder)])
    host_main()
    assert "peers_tiny" in capsys.readouterr().out
    assert (tmp_path / "results" / "measured" / "box" / "peers_tiny.json").is_file()

    def change(record):
        if fault == "another host":
            record["host"]["fingerprint"] = "f" * 16
        elif fault == "another profile":
            record["provenance"]["host_sha256"] = "0" * 64
        else:
            done = [row for row in record["peers"] if row["status"] == "ok"]
            (done[0]["seconds"] if done else record["documents"][0]).pop()

    rewrite_json(folder / "peers_tiny.json", change)
    (tmp_path / "results").rename(tmp_path / "old")
    with pytest.raises(Exception, match=r"peers_tiny\.json"):
        host_main()
    assert not (tmp_path / "results" / "measured" / "box").exists()
    assert json.loads((tmp_path / "old" / "measured" / "box" / "peers_tiny.json").read_text())["model"] == "tiny"
