"""How far are a plan's times from what the engine measured on a host? Predicted over measured, for every policy.

    rows = compare(Path("results/measured/epyc_2core_vm"), tables, policies)
    python -m engine.plan --check results/measured/epyc_2core_vm

Two predictions stand beside each measured time. `published` is the plan's own: counts of whole texts. `own` has the
counts of the very runs, so that what is left is the error of the times: the runs decode the first tokens of documents
from the warm start, where policies miss more than over whole texts.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import error
from engine.geometry import Geometry
from engine.host import parse_host, read_profile
from engine.measured_run import PROFILE, Cell, Run, cell_of, load_run, policy_of, records
from engine.plan_counts import Counts, Published
from engine.plan_time import expect
from engine.policies import Policy
from engine.timing import Timing


@dataclass(frozen=True)
class Compared:
    """One policy of one model and size over one link; ratios are predicted over measured."""

    model: str
    size: str
    link: str
    policy: str
    measured_s: float
    own: float
    published: float | None  # None: no published counts of this policy


def compare(folder: Path, tables: str | Path, sheet: Mapping[str, Policy]) -> list[Compared]:
    """Every policy that was timed in the folder of a host; failed cells are left out. UserError: no such folder."""
    if not (folder / PROFILE).is_file():
        raise error(f"{folder}: no {PROFILE}", "results/measured/<host>", "measure a host, or name its folder")
    host = parse_host(read_profile(folder / PROFILE), folder / PROFILE, folder.name)
    rows = []
    for record in records(folder):
        if record["geometry"] is None:
            continue
        geometry, counts = Geometry(**record["geometry"]), Published(tables, record["model"])
        groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
        for row in record["cells"]:
            if row["status"] == "ok":
                cell = cell_of(record, row)
                groups[cell.link, cell.slots, cell.policy].append(cell)
        for (link, slots, name), cells in groups.items():
            runs, policy = [load_run(cell.path(folder)) for cell in cells], policy_of(record, name)
            timing = Timing.of(host, link, geometry, record["slots"][slots]["count"])
            measured_s = float(sum(run.token_s.sum() for run in runs) / sum(len(run.token_s) for run in runs))
            own_s = expect(timing, geometry, _counts(runs, record), policy).token_s
            found = counts.of(policy, record["slots"][slots]["percent"], geometry.top_k, sheet)
            published = expect(timing, geometry, found, policy).token_s / measured_s if found else None
            ids = (record["model"], record["size"], link, name)
            rows.append(Compared(*ids, measured_s, own_s / measured_s, published))
    return rows


def _counts(runs: list[Run], record: dict) -> Counts:
    """What the link of these runs brought, by event. What came early was not fetched: no prefetch is foretold."""
    events = record["layers"] * sum(len(run.token_s) for run in runs)
    size = record["record_bytes"]
    fetched = sum(run.bytes(foreground=True) for run in runs) / size
    beside = sum(run.bytes(foreground=False) + run.prefetch_bytes for run in runs) / size
    return Counts(fetched / events, beside / events)


def page(rows: list[Compared]) -> str:
    """A table for a terminal, and the worst and the median ratio of every size."""
    lines = [f"{'model':<12} {'size':<10} {'link':<7} {'policy':<23} {'measured ms':>11} {'own':>6} {'published':>10}"]
    for row in rows:
        published = f"{row.published:10.2f}" if row.published is not None else f"{'-':>10}"
        lines.append(
            f"{row.model:<12} {row.size:<10} {row.link:<7} {row.policy:<23} {1e3 * row.measured_s:11.2f} "
            f"{row.own:6.2f} {published}"
        )
    for size, link in sorted({(row.size, row.link) for row in rows}):
        for name in ("own", "published"):
            ratios = [getattr(r, name) for r in rows if (r.size, r.link) == (size, link)]
            ratios = [ratio for ratio in ratios if ratio is not None]
            if ratios:
                worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio))
                near = sum(0.75 <= ratio <= 1.25 for ratio in ratios)
                lines.append(
                    f"{size} over {link}, {name} counts: median {statistics.median(ratios):.2f}, "
                    f"worst {worst:.2f}, {near} of {len(ratios)} within 25 %"
                )
    return "\n".join(lines)
