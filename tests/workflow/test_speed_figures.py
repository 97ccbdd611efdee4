"""Figures of speed and of misses by slots on made-up tables: all is drawn, gaps are named, bytes repeat."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pictures import draw, legible_words, markers, module, script
from speed_cases import AHEAD, LOCAL_DISK, MACHINES, MISSES, PCIE, SDCARD, SLOTS, curves_table, speed_table

from engine.errors import UserError
from engine.files import sha256
from engine.policies import MOVING
from evals.figures import POOLED, looks, save
from evals.speed_figures import change, models_title, primary_slots, times
from evals.speed_tables import read_curves, read_speed

OF_SPEED = ("prefetch", "speedup_by_loss", "token_time")
BARGAINS = ("speedup_by_loss", "token_time")  # of all policies, lossy ones too
READERS = {"misses_by_slots": read_curves, **dict.fromkeys(OF_SPEED, read_speed)}
TABLES = {"misses_by_slots": "curves.csv", **dict.fromkeys(OF_SPEED, "speed.csv")}
ABLATION = ("gate_replay", "markov", "mlp", "spec_window", "spec_always")
LOSSY_AHEAD = ("quality_first_prefetch", "speed_first_prefetch")


def write(table: pd.DataFrame, path: Path) -> Path:
    table.to_csv(path, index=False, float_format="%.8g")
    return path


def speed(tmp_path: Path, *arguments, **keywords) -> pd.DataFrame:
    """A made-up table of speed, through its file."""
    return read_speed(write(speed_table(*arguments, **keywords), tmp_path / "speed.csv"))


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    write(speed_table(), folder / "speed.csv")
    write(curves_table(), folder / "curves.csv")
    return folder


@pytest.fixture(scope="module")
def pictures(tables) -> Path:
    """Folder of the figures, drawn by the scripts as a user runs them."""
    jobs = [
        subprocess.Popen([sys.executable, script(name), "--table", tables / table, "--out-prefix", tables / name])
        for name, table in TABLES.items()
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    return tables


# ---- the pictures ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TABLES)
def test_csv_holds_the_plotted_points_bytes_repeat_and_no_words_overlap(name, tables, pictures, tmp_path):
    figure, _ = draw(name, READERS[name](tables / TABLES[name]))
    every = legible_words(figure)
    assert "rehearsal" in every and "64,270 tokens" in every and "reference_b" in every

    save(*draw(name, READERS[name](tables / TABLES[name])), tmp_path / name)
    for suffix in ("csv", "png", "svg"):
        assert sha256(tmp_path / f"{name}.{suffix}") == sha256(pictures / f"{name}.{suffix}"), suffix
    assert "<text" in (pictures / f"{name}.svg").read_text()

    written = pd.read_csv(pictures / f"{name}.csv")
    if name == "token_time":
        bars = [(patch.get_x(), patch.get_width()) for ax in figure.axes for patch in ax.patches]
        drawn = np.array(bars).reshape(-1, 4)[:, [1, 2, 3]]  # compute from 0, then the stall from where it ends
        expected = written[["compute_ms_mean", "compute_ms_mean", "stall_ms_mean"]].to_numpy()
        np.testing.assert_allclose(drawn, expected, rtol=1e-6, atol=1e-9)
        carets = [line.get_xdata()[0] for ax in figure.axes for line in ax.lines if line.get_marker() == 7]
        np.testing.assert_allclose(carets, written["limit_token_ms"], rtol=1e-6)
        return
    if name == "prefetch":
        drawn = sorted(speedup for speedup, _ in markers(figure))
        np.testing.assert_allclose(drawn, sorted(written["speedup"]), rtol=1e-6)
        return
    xy = {"misses_by_slots": ["slots_percent", "miss_rate_percent"], "speedup_by_loss": ["delta_percent", "speedup"]}
    drawn = np.array(sorted(markers(figure)))
    np.testing.assert_allclose(drawn, written[xy[name]].sort_values(xy[name]), rtol=1e-6)


@pytest.mark.parametrize("name", OF_SPEED)
@pytest.mark.parametrize(
    ("machines", "models"),
    [((LOCAL_DISK,), ("reference",)), (MACHINES[:3], ("reference",)), ((PCIE,), ("one", "two", "three"))],
    ids=["one panel", "machines two abreast", "three models"],
)
def test_any_number_of_machines_and_models_is_legible(name, machines, models, tmp_path):
    figure, points = draw(name, speed(tmp_path, machines, models))
    every = legible_words(figure)
    assert len(figure.axes) == len(machines) * len(models)
    assert set(points["model"]) == set(models)
    for host, status, link, *_ in machines:
        assert all(f"{host}, {link} ({status} profile): {model}" in every for model in models)


def test_the_opening_figure_says_how_much_faster_at_what_loss_on_which_machine(tables):
    table = read_speed(tables / "speed.csv")
    figure, points = draw("speedup_by_loss", table)
    every = legible_words(figure)
    row = points.query("policy == 'quality_first' and slots == 's25' and host == 'local'").iloc[0]
    assert f"{row['speedup']:.2f}\u00d7 quality_first, +9.4 %" in every
    assert "1.00\u00d7 fetch_lfu_decay, exact" in every and "fetch_belady, exact (bound)" in every
    assert "local over disk (measured profile)" in every and "simulator (modelled times" in every
    faces = {line.get_markerfacecolor() for ax in figure.axes for line in ax.lines if line.get_marker() == "s"}
    assert faces == {"white"}  # modelled, also on a host whose constants were measured


def test_a_rehearsal_beside_a_large_model_is_named_alone(tmp_path):
    table = speed(tmp_path, (LOCAL_DISK,), ("small", "large"))
    table.loc[table["model"] == "large", "rehearsal"] = False
    assert models_title(table) == "small (rehearsal: a small embedded model), large"


def test_machines_share_a_scale_of_speedup_unless_one_dwarfs_another(tmp_path):
    figure, _ = draw("speedup_by_loss", speed(tmp_path, (LOCAL_DISK, PCIE)))
    assert len({ax.get_ylim() for ax in figure.axes}) == 1
    figure, _ = draw("speedup_by_loss", speed(tmp_path, (LOCAL_DISK, SDCARD), ("reference",)))
    every = legible_words(figure)
    assert len({ax.get_ylim() for ax in figure.axes}) == 2
    assert "local, sdcard (measured host, throttled link): reference" in every


def test_measured_times_are_filled(tmp_path):
    table = speed(tmp_path, (LOCAL_DISK,), ("reference",)).assign(instrument="engine")
    figure, _ = draw("speedup_by_loss", table)
    lines = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
    assert lines and all(line.get_markerfacecolor() == line.get_color() for line in lines)
    figure, _ = draw("token_time", table)
    assert not any(patch.get_hatch() for patch in figure.axes[0].patches)


def test_the_tick_of_the_link_stands_where_its_limit_would_put_the_policy(tmp_path):
    table = speed(tmp_path, (LOCAL_DISK,), ("reference",))
    _, points = draw("speedup_by_loss", table)
    base = table.query("policy == 'fetch_lfu_decay' and slots == 's25' and text == @POOLED").iloc[0]
    own = points.query("policy == 'fetch_lfu_decay' and slots == 's25'").iloc[0]
    assert own["limit_speedup"] == pytest.approx(base["token_s_mean"] / base["limit_token_s"])
    assert (points["limit_speedup"] >= points["speedup"] * (1 - 1e-6)).sum() >= len(points) - 2 * len(SLOTS)


# ---- gaps ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", BARGAINS)
def test_a_failed_cell_is_named(name, tmp_path):
    failed = ("reference", "first_choice", "s25", "rtx3090_pcie4")
    figure, points = draw(name, speed(tmp_path, (LOCAL_DISK, PCIE), ("reference",), failed=failed))
    every = legible_words(figure)
    assert "Without a result: first_choice s25 on rtx3090_pcie4, pcie (reference) (reasons: in the table)." in every
    assert points.query("policy == 'first_choice' and slots == 's25' and host == 'rtx3090_pcie4'").empty
    assert ("no result" in every) == (name == "token_time")


def test_a_host_without_its_baseline_says_so(tmp_path):
    table = speed(tmp_path, without_baseline="local")
    figure, points = draw("speedup_by_loss", table)
    every = legible_words(figure)
    assert every.count("no speedup: the baseline has no result here") == 4  # two links, two models
    assert set(points["host"]) == {"rtx3090_pcie4", "rtx3090_nvme_16gb"}
    figure, points = draw("token_time", table)
    legible_words(figure)
    assert "local" in set(points["host"])


@pytest.mark.parametrize("name", OF_SPEED)
def test_nothing_but_failures_is_drawn_as_gaps(name, tmp_path):
    table = speed_table((LOCAL_DISK, PCIE), ("reference",))
    kept = [*table.columns[: table.columns.get_loc("tokens")], "status", "reason"]
    table = table.loc[table["text"] != POOLED, kept].assign(status="failed", reason="OutOfMemoryError")
    figure, points = draw(name, read_speed(write(table, tmp_path / "s.csv")))
    every = legible_words(figure)
    assert points.empty and "Without a result" in every and "No result over all texts" in every


def test_a_policy_without_effect_is_a_cross_and_only_fetch_is_exact(tmp_path):
    table = speed_table((LOCAL_DISK,), ("reference",))
    lossy = table["policy"] == "rule_015"
    table.loc[lossy, ["delta_percent", "delta_percent_low", "delta_percent_high"]] = 0.0
    figure, points = draw("speedup_by_loss", read_speed(write(table, tmp_path / "s.csv")))
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert len(crosses) == (~points["effect"]).sum() == len(SLOTS) + 1
    every = legible_words(figure)
    exact = {*points.loc[points["lossless"], "policy"]}
    assert "rule_015, no effect" in every and every.count(", exact") == len(exact) == len(MISSES) + 2


def test_a_time_without_a_loss_is_not_drawn_but_named(tmp_path):
    table = speed_table((LOCAL_DISK,), ("reference",))
    table.loc[table["policy"] == "speed_first", ["delta_percent", "delta_percent_low", "delta_percent_high"]] = None
    figure, points = draw("speedup_by_loss", read_speed(write(table, tmp_path / "s.csv")))
    assert "speed_first" not in set(points["policy"])
    assert "Without a loss in some cell, hence not drawn there: speed_first." in legible_words(figure)


# ---- prefetching -----------------------------------------------------------------------------------------------------
def without(table: pd.DataFrame, *policies: str) -> pd.DataFrame:
    return table[~table["policy"].isin(policies)]


@pytest.mark.parametrize("name", BARGAINS)
def test_of_policies_that_prefetch_the_figures_of_all_policies_show_no_ablation(name, tmp_path):
    figure, points = draw(name, speed(tmp_path, (LOCAL_DISK,), ("reference",)))
    every = legible_words(figure)
    shown = {"spec_prefetch", "prefetch_oracle", *LOSSY_AHEAD}
    assert {policy for policy in points["policy"] if policy in AHEAD} == shown
    assert not any(policy in every for policy in ABLATION)
    assert "fetch_belady (the fewest misses" in every and "prefetch_oracle (perfect prediction" in every


def test_what_knows_the_future_is_dashed_and_told_apart_by_its_label(tmp_path):
    table = speed(tmp_path, (LOCAL_DISK,), ("reference",))
    bounds = [policy for policy, look in looks(table).items() if look.pattern == "--"]
    assert bounds == ["fetch_belady", "prefetch_oracle"]
    words = {name: legible_words(draw(name, table)[0]) for name in OF_SPEED}
    assert all(f"{bound}, exact (bound)" in words["speedup_by_loss"] for bound in bounds)
    assert all(f"{bound} (bound)" in words["token_time"] for bound in bounds)
    assert all(f"({bound})" in words["prefetch"] for bound in bounds)


def test_the_loss_of_lossy_ones_that_prefetch_names_its_tokens(tmp_path):
    every = legible_words(draw("speedup_by_loss", speed(tmp_path, (LOCAL_DISK,), ("reference",)))[0])
    assert f"Loss of {', '.join(LOSSY_AHEAD)}: of the very decisions that were timed, on 20,480 tokens" in every


@pytest.mark.parametrize("name", OF_SPEED)
def test_a_table_that_is_older_than_prefetching_is_drawn(name, tmp_path):
    figure, points = draw(name, speed(tmp_path, (LOCAL_DISK, PCIE), ("reference",), prefetch=False))
    every = legible_words(figure)
    assert set(points["policy"]) & {"fetch_lfu_decay", "fetch_belady"} and not set(points["policy"]) & set(AHEAD)
    assert every.count("no row") == (2 * 7 if name == "prefetch" else 0)  # predictors, schedules, perfect prediction


def test_prefetching_shows_exact_policies_alone_by_group_with_what_they_fetched_ahead(tmp_path):
    figure, points = draw("prefetch", speed(tmp_path, (LOCAL_DISK,), ("reference",)))
    every = legible_words(figure)
    assert set(points["policy"]) == {"fetch_lfu_decay", "fetch_belady", *AHEAD} - {*LOSSY_AHEAD}
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [
        *("none (fetch_lfu_decay)", "gate_replay", "markov", "mlp", "spec_prefetch", "whole records (spec_window)"),
        *("whole records, no window (spec_always)", "perfect prediction (prefetch_oracle)"),
        "perfect eviction (fetch_belady)",
    ]
    row = points.query("policy == 'spec_prefetch'").iloc[0]
    numbers = f"{row['speedup']:.3f}\u00d7 {row['speedup_low']:.3f} to {row['speedup_high']:.3f} 2.90 86 %"
    assert numbers in every and row["taken_share"] == pytest.approx(AHEAD["spec_prefetch"][1])
    faces = {line.get_markerfacecolor() for line in figure.axes[0].lines if line.get_marker() == "s"}
    assert faces == {"white"}  # modelled
    ticks = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() == "|"]
    np.testing.assert_allclose(sorted(set(ticks) & set(points["limit_speedup"])), sorted(points["limit_speedup"]))


def test_a_kind_without_a_policy_has_no_row_and_a_failed_one_no_result(tmp_path):
    table = without(speed_table((LOCAL_DISK,), ("reference",)), "fetch_belady", "prefetch_oracle", "markov")
    lost = table["policy"] == "mlp"
    kept = [*table.columns[: table.columns.get_loc("tokens")], "status", "reason"]
    table = pd.concat([table[~lost], table.loc[lost, kept]], ignore_index=True)
    lost = table["policy"] == "mlp"
    table.loc[lost, ["status", "reason"]] = "failed", "UserError: predictions of another text"
    figure, points = draw("prefetch", read_speed(write(table, tmp_path / "s.csv")))
    every = legible_words(figure)
    assert every.count("no row") == 3 and every.count("no result") == 1 and "none in this table" in every
    assert "Without a result: mlp s25 on local, disk (reference)" in every
    assert not {"mlp", "markov", "fetch_belady"} & set(points["policy"])


def test_a_policy_that_is_absent_on_one_machine_has_no_row_there(tmp_path):
    table = speed(tmp_path, (LOCAL_DISK, PCIE), ("reference",))
    here = (table["policy"] == "spec_prefetch") & (table["host"] == "local")
    figure, points = draw("prefetch", table[~here])
    assert legible_words(figure).count("no row") == 1
    assert set(points.loc[points["policy"] == "spec_prefetch", "host"]) == {"rtx3090_pcie4"}


def test_without_intervals_or_a_baseline_prefetching_says_so(tmp_path):
    table = speed(tmp_path, (LOCAL_DISK,), ("reference",))
    table[["speedup_low", "speedup_high"]] = np.nan
    figure, points = draw("prefetch", table)
    bars = [artist for artist in figure.axes[0].collections if artist.get_paths()]
    assert " to " not in legible_words(figure) and not bars and len(points) == 9
    figure, points = draw("prefetch", speed(tmp_path, (LOCAL_DISK, PCIE), ("reference",), without_baseline="local"))
    every = legible_words(figure)
    assert set(points["host"]) == {"rtx3090_pcie4"} and every.count("the baseline has no result here") == 1


def test_every_machine_has_its_own_scale_of_prefetching(tmp_path):
    figure, _ = draw("prefetch", speed(tmp_path, (LOCAL_DISK, SDCARD), ("reference", "reference_b")))
    legible_words(figure)
    ends = [ax.get_xlim() for ax in figure.axes]
    assert ends[0] == ends[1] != ends[2] == ends[3]


def test_prefetching_is_shown_at_the_budget_at_which_it_was_tried(tmp_path):
    table = speed(tmp_path, (LOCAL_DISK,), ("reference",))
    table.loc[table["policy"].isin([*AHEAD]), ["slots", "slots_percent", "slots_count"]] = ["s50", 50.0, 128]
    figure, points = draw("prefetch", table)
    assert set(points["slots"]) == {"s50"} and "no row" not in legible_words(figure)


def test_another_predictor_or_schedule_has_a_row_of_its_own(tmp_path):
    table = speed(tmp_path, (LOCAL_DISK,), ("reference",))
    more = table[table["policy"] == "gate_replay"]
    table = pd.concat([table, more.assign(policy="replay_window", schedule="window")], ignore_index=True)
    table = pd.concat([table, more.assign(policy="replay_again")], ignore_index=True)
    figure, points = draw("prefetch", table)
    every = legible_words(figure)
    assert "gate_replay, window (replay_window)" in every and "gate_replay (replay_again)" in every
    assert {"replay_window", "replay_again"} <= set(points["policy"])


def test_measured_prefetching_is_filled_and_a_table_without_exact_policies_is_refused(tmp_path):
    table = speed(tmp_path, (LOCAL_DISK,), ("reference",))
    figure, _ = draw("prefetch", table.assign(instrument="engine"))
    lines = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
    assert lines and all(line.get_markerfacecolor() == line.get_color() for line in lines)
    with pytest.raises(UserError, match="without an exact policy"):
        draw("prefetch", table[~table["lossless"]])


# ---- misses by slots -------------------------------------------------------------------------------------------------
def test_every_eviction_has_a_look_of_its_own_and_belady_alone_is_dashed():
    style = module(script("misses_by_slots")).LOOKS
    assert set(style) == set(MOVING) and len(set(style.values())) == len(style)
    assert [eviction for eviction, look in style.items() if look.pattern == "--"] == ["belady"]


def test_one_model_and_one_budget_are_legible(tmp_path):
    table = curves_table(("reference",)).query("slots_count == 64")
    figure, points = draw("misses_by_slots", read_curves(write(table, tmp_path / "c.csv")))
    assert "% at 25 %" in legible_words(figure) and len(points) == len(MOVING)


# ---- tables ----------------------------------------------------------------------------------------------------------
def test_numbers_in_words():
    assert [change(number) for number in (0.351, 8.44, 219.2, -0.004)] == ["+0.35 %", "+8.4 %", "+219 %", "+0.00 %"]
    assert [times(number) for number in (0.887, 1.0, 2.346, 31.42)] == [
        "0.89\u00d7",
        "1.00\u00d7",
        "2.35\u00d7",
        "31.4\u00d7",
    ]


def test_the_primary_budget_is_the_nearest_to_a_quarter(tmp_path):
    table = speed(tmp_path, (LOCAL_DISK,), ("reference",))
    assert primary_slots(table, "reference") == "s25"
    assert primary_slots(table[table["slots"] != "s25"], "reference") == "s12"


CORRUPT_SPEED = {
    "empty": lambda text: "",
    "only a header": lambda text: text.splitlines()[0],
    "not a table": lambda text: "\x00\x01" * 50,
    "column gone": lambda text: text.replace("stall_s_mean", "stalled", 1),
    "word for a number": lambda text: text.replace("12.5,32,", "12.5,many,", 1),
    "negative time": lambda text: text.replace(",64270,83,", ",64270,83,-", 1),
    "unknown miss rule": lambda text: text.replace("substitute_all,lfu_decay", "guess,lfu_decay", 1),
    "unknown link": lambda text: text.replace(",disk,disk,measured", ",disk,floppy,measured", 1),
    "unknown status": lambda text: text.replace(",ok,", ",fine,", 1),
    "unknown predictor": lambda text: text.replace(",markov,pieces,", ",guess,pieces,", 1),
    "unknown schedule": lambda text: text.replace(",markov,pieces,", ",markov,later,", 1),
    "a predictor without a schedule": lambda text: text.replace(",markov,pieces,", ",markov,,", 1),
    "more taken than brought": lambda text: text.replace(",4.5,4.5,", ",4.5,4.6,", 1),
    "row twice": lambda text: text + text.splitlines()[1] + "\n",
}
CORRUPT_CURVES = {
    "column gone": lambda text: text.replace("miss_rate", "missed", 1),
    "unknown eviction": lambda text: text.replace(",lru,", ",guess,", 1),
    "more than all": lambda text: text.replace(",64270,0.", ",64270,7.", 1),
    "row twice": lambda text: text + text.splitlines()[1] + "\n",
    "no rows over all texts": lambda text: text.replace(",all,", ",bible_test,"),
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [*(("speed.csv", d) for d in CORRUPT_SPEED.values()), *(("curves.csv", d) for d in CORRUPT_CURVES.values())],
    ids=[*CORRUPT_SPEED, *(f"curves: {d}" for d in CORRUPT_CURVES)],
)
def test_a_corrupt_table_is_a_user_error(name, damage, tables, tmp_path):
    text = (tables / name).read_text()
    assert damage(text) != text
    (tmp_path / name).write_text(damage(text))
    with pytest.raises(UserError, match=rf"{name}.*; expected .*; "):
        {"speed.csv": read_speed, "curves.csv": read_curves}[name](tmp_path / name)


def test_an_interval_that_does_not_hold_its_estimate_is_refused(tmp_path):
    table = speed_table((LOCAL_DISK,), ("reference",))
    table.loc[7, "speedup_low"] = 9.0
    with pytest.raises(UserError, match=r"s\.csv:9: speedup_low '9\.0'; expected at most the estimate, column speedup"):
        read_speed(write(table, tmp_path / "s.csv"))


def test_a_missing_table_leaves_one_line_exit_code_2_and_nothing_written(tmp_path):
    command = [sys.executable, script("token_time"), "--table", tmp_path / "none.csv", "--out-prefix", tmp_path / "x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
