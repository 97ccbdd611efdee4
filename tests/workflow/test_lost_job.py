"""End to end, by hand: a policy whose job was killed too often is a gap in the table, and the others are there."""

from __future__ import annotations

import json

import pandas as pd
import tiny
from tiny import CALIBRATION, TEST, TOPICS, run_script, write_model, write_text_file


def ran(name: str, *arguments) -> None:
    ended = run_script(name, *arguments)
    assert ended.code == 0, ended.err


def test_a_job_that_was_lost_too_often_is_a_gap_and_the_rest_is_drawn(tmp_path):
    write_model(tmp_path / "model")
    for number, (text, topic) in enumerate(TOPICS.items()):
        docs = tiny.documents(topic, 3, first=5 * number)
        write_text_file(tmp_path / f"{text}.json", text, topic, docs, "calibration" if text == CALIBRATION else "test")
    model = ("--model-dir", tmp_path / "model", "--context", tiny.CONTEXT, "--threads", 1)
    texts, demand = ("--texts", *(tmp_path / f"{text}.json" for text in TEST)), tmp_path / "demand.safetensors"
    kept = ("--out-demand", demand, "--out", tmp_path / "calibration.json")
    ran("calibrate_model.py", *model, "--texts", tmp_path / f"{CALIBRATION}.json", *kept)
    ran("record_routing.py", "--model", "tiny", *model, *texts, "--out", tmp_path / "traces")
    for policy, attempt in (("fetch_lfu_decay", 3), ("rule_015", 4)):
        out = ("--out", tmp_path / "quality/tiny" / policy / "perplexity.json")
        out += ("--out-losses", tmp_path / "losses/tiny" / f"{policy}.safetensors")
        ran(
            *("score_policy.py", "--model", "tiny", *model, *texts, "--policy", policy, "--attempt", attempt),
            *("--policies", tiny.ROOT / "config/policies.tsv", "--slots", "s50=50", "--demand", demand),
            *("--traces", tmp_path / "traces", *out, "--out-decisions", tmp_path / "decisions" / policy),
        )
    records = [tmp_path / "quality/tiny" / name / "perplexity.json" for name in ("fetch_lfu_decay", "rule_015")]
    lost = json.loads(records[1].read_text(encoding="utf-8"))["cells"]
    assert len(lost) == len(TEST) and all("ended 3 times" in cell["reason"] for cell in lost)

    tables = [f"--out-{name}={tmp_path}/{name}.csv" for name in ("quality", "differences", "bundles")]
    ran("tabulate_quality.py", "--records", *records, "--replicates", 99, "--seed", 1, *tables)
    table = pd.read_csv(tmp_path / "quality.csv")
    assert set(table[table.policy == "rule_015"].status) == {"failed"}
    assert set(table[table.policy == "fetch_lfu_decay"].status) == {"ok"}
