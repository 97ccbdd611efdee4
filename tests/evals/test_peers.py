"""Programs beside the engine: the sheet, the memory group, the lines they print, the record and its table."""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.errors import UserError
from engine.files import write_json
from engine.measured_run import read_peers
from evals.peers import llama_cpp
from evals.peers.memory import MemoryGroup, cached_share, evict
from evals.peers.runs import Outcome, read_lines, run
from evals.peers.sheet import COLUMNS, load_sheet
from evals.peers.tables import AGAINST, EXACT, documents, rows
from evals.peers.workload import Document, as_text, digest, read_ids, write_ids

ROOT = Path(__file__).parents[2]
SHEET = ROOT / "config" / "peers.tsv"
OPTIONS = {"level": 0.95, "replicates": 199, "seed": 3}
MEGABYTE = 1 << 20


def memory_groups() -> str:
    """Why there are none here."""
    try:
        with MemoryGroup(None):
            return ""
    except UserError as exc:
        return str(exc)


limited = pytest.mark.skipif(bool(memory_groups()), reason=memory_groups())


# ---- the sheet -------------------------------------------------------------------------------------------------------
def test_the_ratios_denominators_are_in_the_sheet_in_the_memory_they_stand_for():
    peers = load_sheet(SHEET)
    for names in (AGAINST, EXACT):
        assert all(peers[name].memory == memory and peers[name].tokens is None for memory, name in names.items())
    assert {peer.program for peer in peers.values()} == {
        "accelerate", "engine", "llama_bench", "llama_cpp", "transformers"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("id", "a b", "id 'a b'"),
        ("program", "llama", "program 'llama'"),
        ("memory", "2GB", "memory '2GB'"),
        ("policy", "-", "policy '-' of program engine"),
        ("load_mode", "mmap", "load_mode 'mmap' of program engine"),
        ("slots", "101", "slots '101'"),
        ("slots", "25%", "slots '25%'"),
        ("threads", "0", "threads '0'"),
        ("tokens", "1", "tokens '1'"),
    ],
)
def test_a_row_that_cannot_be_is_refused_by_line_column_and_value(tmp_path, column, value, says):
    cells = dict(zip(COLUMNS, ["mine", "engine", "limit", "rule_015", "25", "all", "-", "all", "-"], strict=True)) | {
        column: value
    }
    path = tmp_path / "peers.tsv"
    path.write_text("\t".join(COLUMNS) + "\n" + "\t".join(cells.values()) + "\n")
    with pytest.raises(UserError) as caught:
        load_sheet(path)
    assert says in str(caught.value) and f"{path}:2" in str(caught.value) and "\n" not in str(caught.value)


# ---- documents -------------------------------------------------------------------------------------------------------
DOCUMENTS = [Document("t", "code", name, tuple(range(n, n + 6))) for n, name in enumerate("abc")]


def test_law_what_is_written_is_read_cut_to_the_tokens(tmp_path):
    for tokens in (None, 1, 5):
        write_ids(tmp_path / "ids", DOCUMENTS, tokens)
        cut = [list(one.ids[: (tokens or 5) + 1]) for one in DOCUMENTS]
        assert read_ids(tmp_path / "ids") == cut
    assert digest(DOCUMENTS) != digest(DOCUMENTS[1:]) and as_text(DOCUMENTS, 5) == as_text(DOCUMENTS)


# ---- memory ----------------------------------------------------------------------------------------------------------
def test_a_file_is_brought_into_the_page_cache_and_taken_out(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 * MEGABYTE))
    with open(path, "rb") as handle:
        handle.read()
        if not cached_share(handle.fileno()):
            pytest.skip("this file system does not say what is cached")
        assert cached_share(handle.fileno()) == 1
        evict([path])
        assert cached_share(handle.fileno()) < 0.02


def test_a_file_that_stays_in_the_cache_is_named(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 * MEGABYTE))
    with open(path, "rb") as handle, mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) as held:
        sum(held[at] for at in range(0, len(held), mmap.PAGESIZE))
        if not cached_share(handle.fileno()):
            pytest.skip("this file system does not say what is cached")
        with pytest.raises(UserError, match="stay in the page cache"):
            evict([path])


@limited
def test_a_program_is_held_to_its_memory_with_its_pages(tmp_path):
    """It allocates, or reads a file, of twice the limit: the one is ended, the other goes on, at most at the limit."""
    limit = 64 * MEGABYTE
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * limit))
    read = f"{ONE_LINE}; data = open({str(path)!r}, 'rb')\nwhile data.read({MEGABYTE}): pass"
    done = run([sys.executable, "-c", read], [path], limit_bytes=limit, documents=1, timeout_s=60)
    assert not done.reason and limit / 2 < done.peak_bytes <= limit
    held = run(
        [sys.executable, "-c", f"{ONE_LINE}; x = bytearray({2 * limit})"],
        [path],
        limit_bytes=limit,
        documents=1,
        timeout_s=60,
    )
    assert "for want of memory, after 1 tokens" in held.reason and held.losses == [[1.5]]


ONE_LINE = "print('0 0.5 1.5', flush=True)"


@limited
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"{ONE_LINE}; raise SystemExit('no such model')", "status 1, after 1 tokens: no such model"),
        ("pass", "status 0, after 0 tokens: it said nothing"),
        (f"{ONE_LINE}; import time; time.sleep(60)", "not done after 1 s, 1 tokens"),
    ],
)
def test_a_program_that_does_not_decode_everything_has_its_reason(code, reason):
    outcome = run([sys.executable, "-c", code], [], limit_bytes=None, documents=2, timeout_s=1)
    assert outcome.reason == reason


def test_bytes_are_those_of_the_documents_that_count():
    outcome = Outcome()
    read_lines('0 0.5 1\n0 0.25 2\nbytes 100\n1 0.5 3\nbytes 350\ncounts {"hits": 3}\n', outcome)
    assert outcome.seconds == [[0.5, 0.25], [0.5]] and outcome.losses == [[1, 2], [3]]
    assert outcome.read_bytes == 250 and outcome.counts == {"hits": 3}


@pytest.mark.parametrize("normalised", [True, False])
def test_llama_cpp_is_not_given_a_model_that_it_would_compute_as_another(normalised, tmp_path):
    """The converter itself, which this source does not have, is the next reason."""
    write_json(tmp_path / "model" / "config.json", {"model_type": "qwen3_moe", "norm_topk_prob": normalised})
    write_json(tmp_path / "source" / llama_cpp.STATUS, {})
    llama_cpp.convert(tmp_path / "source", tmp_path / "model", tmp_path / "gguf")
    assert ("norm_topk_prob" in llama_cpp.failure(tmp_path / "gguf")) == (not normalised)
    assert not (tmp_path / "gguf" / llama_cpp.MODEL).exists()


# ---- the record and its table ----------------------------------------------------------------------------------------
def record(**peers) -> dict:
    """Warm-up and four documents of two topics, 5 tokens each. peers: (seconds a token, loss, tokens, settings)."""
    names = [[f"t{n % 2}", f"topic {n % 2}", f"d{n}", 5] for n in range(5)]
    found = []
    for name, (seconds, loss, tokens, settings) in peers.items():
        took = [[seconds * (1 + document)] * tokens for document in range(5)]
        base = {"program": "engine", "memory": "limit", "policy": None, "slots": None, "threads": None}
        settings = (
            base | {"load_mode": None, "read_ahead_kb": None, "tokens": None if tokens == 5 else tokens} | settings
        )
        losses = [[loss + 0.1 * document] * tokens for document in range(5)]
        row = {"id": name, "settings": settings, "status": "ok", "seconds": took, "losses": losses}
        found.append(row | {"read_bytes": 2000, "peak_bytes": 10, "counts": {"substitutions": 3}})
    facts = {"schema": "peers-1", "host": {"id": "h", "fingerprint": "f"}, "model": "m", "size": "own", "threads": 2}
    facts |= {"dtype": "bfloat16", "rehearsal": True, "experts_bytes": 7, "memory_bytes": 5, "documents": names}
    facts |= {"read_ahead_kb": 64}
    return facts | {"provenance": {"documents": "x", "host_sha256": "y", "store": "z"}, "peers": found}


def test_golden_ratios_and_losses_are_over_the_tokens_that_both_decoded():
    found = record(
        llama_cpp=(1.0, 2.0, 5, {"program": "llama_cpp"}),
        fetch_lfu_decay=(0.25, 2.0, 5, {"slots": 25}),
        rule_015=(0.125, 2.1, 5, {"slots": 25}),
        slow=(4.0, 2.5, 3, {"program": "accelerate"}),
    )
    table = {row["peer"]: row for row in rows(found, **OPTIONS)}
    assert [table[name]["speedup"] for name in table] == pytest.approx([1, 4, 8, 0.25])
    assert [table[name]["tokens"] for name in table] == [16, 16, 16, 8]  # first tokens are not timed
    assert table["rule_015"]["delta_percent"] == pytest.approx(100 * np.expm1(0.1), rel=1e-6)
    assert table["fetch_lfu_decay"]["delta_percent"] == 0
    assert table["llama_cpp"]["token_s_mean"] == pytest.approx((2 + 3 + 4 + 5) / 4)  # the first is the warm-up
    assert table["slow"]["read_bytes_per_token"] == 2000 / 12
    lines = [line for line in documents(found) if line["policy"] == "rule_015"]
    assert len(lines) == 4 and {line["slots"] for line in lines} == {"s25"}
    assert lines[0]["time_s"] == pytest.approx(4 * 0.125 * 2) and lines[0]["loss_nats"] == pytest.approx(5 * 2.2)


def test_without_llama_cpp_there_is_no_ratio_and_the_rest_stands():
    found = record(fetch_lfu_decay=(0.25, 2.0, 5, {"slots": 25}))
    found["peers"].append(
        {"id": "llama_cpp", "settings": found["peers"][0]["settings"], "status": "not run", "reason": "x"}
    )
    own, lost = rows(found, **OPTIONS)
    assert "speedup" not in own and own["tokens_per_s"] > 0 and lost["reason"] == "x"


@pytest.mark.parametrize("fault", ["a token less", "another schema", "a negative time", "another name"])
def test_a_record_that_is_not_whole_is_refused(tmp_path, fault):
    found, path = record(fetch_lfu_decay=(0.25, 2.0, 5, {"slots": 25})), tmp_path / "peers_m.json"
    path.write_text(json.dumps(found))
    assert read_peers(path)["model"] == "m"
    if fault == "a token less":
        found["peers"][0]["seconds"][2].pop()
    elif fault == "another schema":
        found["schema"] = "peers-0"
    elif fault == "a negative time":
        found["peers"][0]["seconds"][2][0] = -1.0
    else:
        path = tmp_path / "peers_other.json"
    path.write_text(json.dumps(found))
    with pytest.raises(UserError) as caught:
        read_peers(path)
    assert path.name in str(caught.value) and "\n" not in str(caught.value)
