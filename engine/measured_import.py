"""May a measured folder from another machine be accepted? Everything that its own numbers can contradict is checked.

    python -m engine.host import FOLDER                # into results/measured/<id>, or nothing at all

* the profile: valid, measured, under the folder's own name; no second folder of that id or fingerprint
* records: schema, one machine, profile, store, weights and text throughout; finished; versions named
* runs: whole, with the sha256 and the facts that the record names; seconds and bytes that can be; no link faster than
  the profile's limit ("page cache")
* decision logs: what the policy's own row allows, and loads that fit the decisions (`check_log`)
* the emulator's scores: of this very record, a loss for every token

What it cannot see is whether a run was honestly timed. Only files that a record names are copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml
from safetensors import SafetensorError
from safetensors.numpy import load_file

from engine.decision import ARRIVED, DROP, FETCH, FETCHED, HIT, ISSUED, MOVE, PROMOTED, SUBSTITUTE, TAKEN
from engine.demand import load_demand
from engine.errors import UserError, error
from engine.files import atomic_folder, copy, sha256
from engine.host_times import Host
from engine.log import DecisionLog
from engine.measured_run import (
    AGAIN,
    DEMAND,
    PEERS_FILES,
    PREFETCH,
    PROFILE,
    SHORTEST_S,
    Cell,
    Run,
    cell_of,
    check_rates,
    hosts,
    load_run,
    policy_of,
    predictor_key,
    read_peers,
    read_rescored,
    records,
)
from engine.policies import PAYING, Policy, parse_row
from engine.record import PAGE

NOT_A_NAME = "local"  # every machine's own, until it is given one
VERSIONS = ("torch", "transformers", "numpy", "numba")
KINDS = {  # miss rule: kinds that it can lead to; a miss without a stand-in is fetched
    "drop": (HIT, FETCH, DROP),
    "fetch": (HIT, FETCH),
    "few_heavy": (HIT, FETCH, SUBSTITUTE),
    "many_light": (HIT, FETCH, SUBSTITUTE),
    "mass_budget": (HIT, FETCH, SUBSTITUTE),
    "substitute_all": (HIT, FETCH, SUBSTITUTE),
    "threshold": (HIT, FETCH, SUBSTITUTE),
}
SLACK = 1e-5  # of sums in float32


def accept(folder: Path, into: Path, parse: Callable[[object, Path, str], Host]) -> str:
    """Check `folder` and copy it to into/<id>; says in a line what was accepted. UserError names file and value.

    parse: engine.host.parse_host.
    """
    host = check_profile(folder, parse)
    for other in hosts(into):
        held = yaml.safe_load((other / PROFILE).read_text(encoding="utf-8")).get("fingerprint")
        if other.name == host.id or held == host.fingerprint:
            found = f"{folder}: host {host.id} with fingerprint {host.fingerprint}"
            raise error(found, f"another than {other} ({held})", "move that folder away to replace it")
    found, peers = list(records(folder)), sorted(folder.glob(PEERS_FILES))
    if not found and not peers:
        raise error(f"{folder}: no record", "<model>/<size>.json at least", "copy the whole folder")
    check_together(folder, found)
    files = {folder / PROFILE, *peers}
    for path in peers:
        check_peers(path, host)
    runs = 0
    for record in found:
        files |= check_size(folder, host, record)
        runs += sum(row["status"] == "ok" for row in record["cells"])
    with atomic_folder(into / host.id, sum(path.stat().st_size for path in files)) as building:
        for path in sorted(files):
            copy(path, building / path.relative_to(folder))
    sizes = ", ".join([f"{record['model']} {record['size']}" for record in found] + [path.stem for path in peers])
    return f"{host.id} ({host.fingerprint}): {runs} runs of {sizes}, accepted into {into / host.id}"


# ---- host and records ------------------------------------------------------------------------------------------------
def check_profile(folder: Path, parse: Callable[[object, Path, str], Host]) -> Host:
    path = folder / PROFILE
    if not path.is_file():
        raise error(f"{folder}: no {PROFILE}", "the folder of a measured host", "give results/measured/<id>")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise error(f"{path}: {' '.join(str(exc).split())}", "a host profile", "copy it again") from None
    name = folder.resolve().name
    host = parse(data, path, name)
    if host.status != "measured":
        raise error(f"{path}: status {host.status}", "a measured host", "probe the machine (engine.host probe)")
    if name == NOT_A_NAME:
        todo = "there: python -m engine.host probe --id NAME, then measure again"
        raise error(f"{folder}: host '{name}'", "a name of its own, as every machine is 'local' to itself", todo)
    return host


def check_together(folder: Path, found: list[dict]) -> None:
    """One machine and profile, one hash of every text, one set of weights of every model."""
    profile = sha256(folder / PROFILE)
    texts: dict[str, str] = {}
    weights: dict[str, str] = {}
    for record in found:
        where = f"{folder / record['model'] / record['size']}.json"
        facts = record["provenance"]
        if facts["host_sha256"] != profile:
            raise error(
                f"{where}: host_sha256 {facts['host_sha256'][:16]}", f"that of {PROFILE}, {profile[:16]}", AGAIN
            )
        pairs = [(texts, name, text["sha256"]) for name, text in record["texts"].items()]
        for known, name, value in [*pairs, (weights, record["model"], facts["model"])]:
            if known.setdefault(name, value) != value:
                raise error(
                    f"{where}: {name} of {value[:16]}", f"{known[name][:16]}, as elsewhere in the folder", AGAIN
                )


def check_peers(path: Path, host: Host) -> None:
    """Other programs that were run on this machine, with this profile."""
    record = read_peers(path)
    if record["host"] != {"id": host.id, "fingerprint": host.fingerprint}:
        raise error(f"{path}: of host {record['host']['id']}", f"{host.id} ({host.fingerprint})", AGAIN)
    if record["provenance"]["host_sha256"] != sha256(path.with_name(PROFILE)):
        raise error(f"{path}: of another profile", f"that of {PROFILE} beside it", AGAIN)


def check_size(folder: Path, host: Host, record: dict) -> set[Path]:
    """One record with all that belongs to it. Returns the files."""
    path = folder / record["model"] / f"{record['size']}.json"
    _check_header(path, host, record)
    demand = path.parent / DEMAND
    load_demand(demand)
    if sha256(demand) != record["provenance"]["demand_sha256"]:
        raise error(f"{demand}: sha256 {sha256(demand)[:16]}", record["provenance"]["demand_sha256"][:16], AGAIN)
    files, tokens = {path, demand}, {}
    for row in record["cells"]:
        if row["status"] == "ok":
            cell = cell_of(record, row)
            run_path = cell.path(folder)
            if not run_path.is_file() or sha256(run_path) != row["sha256"]:
                held = sha256(run_path)[:16] if run_path.is_file() else "absent"
                raise error(
                    f"{run_path}: {held}", f"the run of the record, sha256 {row['sha256'][:16]}", "copy it again"
                )
            run = load_run(run_path)
            check_facts(run_path, run, cell, record)
            check_times(run_path, run, host, cell, record)
            check_log(run_path, run, cell, record)
            tokens[cell.name] = len(run.token_s)
            files.add(run_path)
    return files | check_scores(folder, path, record, tokens)


def _check_header(path: Path, host: Host, record: dict) -> None:
    own = (host.id, host.fingerprint, host.quick)
    held = tuple(record["host"][name] for name in ("id", "fingerprint", "quick"))
    if held != own:
        raise error(f"{path}: host {held}", f"{own}, as in {PROFILE}", AGAIN)
    says = record["geometry"] or {}
    for name in ("dtype", "expert_bytes", "experts", "layers", "top_k"):
        if says.get(name, record[name]) != record[name]:
            raise error(f"{path}: {name} {record[name]}", f"{says[name]}, as its geometry says", AGAIN)
    room = record["record_bytes"] - record["expert_bytes"]
    if record["record_bytes"] % PAGE or not 0 <= room < 2 * PAGE:
        found = f"{path}: experts of {record['expert_bytes']} bytes in records of {record['record_bytes']}"
        raise error(found, f"whole pages of {PAGE} bytes that just hold them", AGAIN)
    missing = [name for name in VERSIONS if f"{name}=" not in record["provenance"]["versions"]]
    if missing:
        raise error(f"{path}: no version of {', '.join(missing)}", "all that the numbers depend on", AGAIN)
    for name in record["policies"]:
        if parse_row(record["policies"][name], f"{path}: policy {name}").id != name:
            raise error(f"{path}: policy {name} with the row of another", "its own row", AGAIN)
    if len(record["cells"]) != record["planned"]:
        found = f"{path}: {len(record['cells'])} of {record['planned']} runs"
        raise error(found, "a finished measurement", f"there: snakemake --cores 1 results/measured/{host.id}")
    names = [cell_of(record, row).name for row in record["cells"]]
    if len(set(names)) < len(names):
        raise error(f"{path}: a cell twice", "one row a run", AGAIN)
    for row in record["cells"]:
        known = (("link", "links"), ("policy", "policies"), ("slots", "slots"), ("text", "texts"))
        for key, where in known:
            if row[key] not in record[where]:
                raise error(f"{path}: a cell of {key} '{row[key]}'", f"one of its {where}", AGAIN)
        if row["link"] not in host.links or row["text"] not in record["passages"].get(row["link"], {}):
            raise error(
                f"{path}: a cell over {row['link']}, {row['text']}", "a link of the profile, with passages", AGAIN
            )


# ---- one run ---------------------------------------------------------------------------------------------------------
def check_facts(path: Path, run: Run, cell: Cell, record: dict) -> None:
    """What the run says it is of, against its place and its record."""
    wanted = {name: getattr(cell, name) for name in ("model", "size", "link", "policy", "slots", "text", "repeat")}
    wanted |= {name: record["provenance"][name] for name in ("store", "host_sha256", "demand_sha256")}
    wanted |= {
        "host": record["host"]["fingerprint"],
        "policy_row": json.dumps(record["policies"][cell.policy]),
        "slots_count": record["slots"][cell.slots]["count"],
        "text_sha256": record["texts"][cell.text]["sha256"],
        "passages": json.dumps(record["passages"][cell.link][cell.text]),
    }
    trained = predictor_key(policy_of(record, cell.policy))
    if trained in record["provenance"]:
        wanted["predictor_sha256"] = record["provenance"][trained]
    for name, value in wanted.items():
        if run.facts.get(name) != str(value):
            raise error(f"{path}: {name} {str(run.facts.get(name))[:80]}", str(value)[:80], AGAIN)
    tokens = [n for _, _, n in record["passages"][cell.link][cell.text]]
    if len(run.token_s) != sum(tokens) or run.starts.tolist() != np.cumsum([0, *tokens[:-1]]).tolist():
        raise error(f"{path}: {len(run.token_s)} tokens from {run.starts.tolist()}", f"passages of {tokens}", AGAIN)


def check_times(path: Path, run: Run, host: Host, cell: Cell, record: dict) -> None:
    """Seconds that can be, and records that came no faster than the link can bring them."""
    finite = all(np.isfinite(array).all() for array in (run.token_s, run.stall_s, run.losses))
    if not finite or (run.token_s <= 0).any() or (run.stall_s < 0).any() or (run.stall_s > run.token_s).any():
        raise error(f"{path}: seconds or losses that cannot be", "0 <= stall_s <= token_s, finite losses", AGAIN)
    journal = run.journal
    times = np.isfinite(journal["begin_s"]).all() and np.isfinite(journal["end_s"]).all()
    if not times or (journal["end_s"] <= journal["begin_s"]).any():
        raise error(f"{path}: records that end before they begin", "end_s after begin_s", AGAIN)
    _check_sizes(path, journal, record, policy_of(record, cell.policy))
    link = host.link(cell.link)
    check_rates(link, journal, str(path))
    waited_s = max(float(run.stall_s.sum()), SHORTEST_S)
    link.check_observed(run.bytes(foreground=True), waited_s, f"{path}, what was waited for")


def _check_sizes(path: Path, journal: dict[str, np.ndarray], record: dict, policy: Policy) -> None:
    """Whole records; where a policy prefetches, of what did not come in the background also parts, in whole pages."""
    size, whole, ahead = journal["bytes"], record["record_bytes"], journal[PREFETCH].astype(bool)
    if not policy.prefetch and ahead.any():
        raise error(f"{path}: {ahead.sum()} pieces came ahead", f"none of policy {policy.id}", AGAIN)
    in_parts = (ahead | journal["foreground"].astype(bool)) if policy.prefetch else ahead
    part = (size % PAGE == 0) & (size > 0) & (size < whole)
    if ((size != whole) & ~(in_parts & part)).any():
        raise error(f"{path}: records of other sizes", f"{whole} bytes each", AGAIN)


def check_log(path: Path, run: Run, cell: Cell, record: dict) -> None:
    """Decisions that the policy's row allows, as far as numbers tell without the model."""
    log, policy = run.log, policy_of(record, cell.policy)
    for wrong, found, expected in _faults(log, policy, record, record["slots"][cell.slots]["count"]):
        if wrong:
            raise error(f"{path}: {found}", expected, AGAIN)
    cause = log.moves[:, 1 + MOVE.names.index("cause")]
    fetched, promoted = (int((cause == kind).sum()) for kind in (FETCHED, PROMOTED))
    foreground = int(run.journal["foreground"].astype(bool).sum())
    if policy.prefetch:  # whose last piece may have come after the decision
        fetched, promoted = 0, fetched + promoted
    if not fetched <= foreground <= fetched + promoted:
        raise error(f"{path}: {foreground} records fetched", f"{fetched} to {fetched + promoted}, by its log", AGAIN)


def _faults(log: DecisionLog, policy: Policy, record: dict, slots: int):
    """(is it wrong, what was found, what was expected), in an order in which each may rely on those before."""
    shape = (len(log.kind), record["layers"], record["top_k"])
    yield log.kind.shape != shape, f"decisions {log.kind.shape}", f"{shape}"
    kinds = set(np.unique(log.kind).tolist())
    yield not kinds <= set(KINDS[policy.miss_rule]), f"kinds {sorted(kinds)}", f"those of miss rule {policy.miss_rule}"
    counted = sum(int((log.kind == kind).sum()) for kind in (HIT, FETCH, SUBSTITUTE, DROP))
    demands = record["top_k"] * log.events
    yield counted != demands, f"{counted} hits, fetches, substitutions and drops", f"K x events = {demands}"
    run = log.executed[log.executed >= 0]
    yield ((log.executed < 0) != (log.kind == DROP)).any(), "an expert dropped and executed", "one of both"
    yield (run >= record["experts"]).any(), f"expert {run.max(initial=0)}", f"below {record['experts']}"
    ordered = np.sort(log.executed, axis=-1)
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()
    yield twice, "an expert executed twice by one event", "each once"
    numbers = np.isfinite(log.weights).all() and np.isfinite(log.g).all() and (log.g >= 0).all()
    yield not numbers, "weights that are not finite", "finite weights"
    yield np.abs(log.g.sum(-1) - 1).max(initial=0) > SLACK, "gate weights that do not sum to 1", "1 an event"
    first = ((log.first >= 0) & (log.first < record["top_k"])).all()
    yield not first, "a first choice out of range", f"below K = {record['top_k']}"
    if policy.miss_rule in ("threshold", *PAYING):
        of_first = np.take_along_axis(log.kind, log.first[..., None].astype(np.int64), axis=-1)
        yield (of_first == SUBSTITUTE).any(), "a first choice substituted", "first choices are fetched"
    if policy.miss_rule == "threshold":
        tau = math.inf if policy.tau is None else float(np.float32(policy.tau))
        heavy = (log.kind == SUBSTITUTE) & (log.g >= tau)
        yield heavy.any(), f"a substituted weight of {log.g[heavy].max(initial=0):.3f}", f"below tau = {tau:g}"
    yield from _move_faults(log, policy, record, slots)


def _move_faults(log: DecisionLog, policy: Policy, record: dict, slots: int):
    layer, step, expert, slot, victim, cause = log.moves.T
    ends = {"layer": record["layers"], "step": len(log.kind), "expert": record["experts"], "slot": slots}
    for (name, end), column in zip(ends.items(), (layer, step, expert, slot), strict=True):
        wrong = (column < 0) | (column >= end)
        yield wrong.any(), f"a move of {name} {column[wrong][:1].tolist()}", f"0 to {end - 1}"
    yield ((victim < -1) | (victim >= record["experts"])).any(), "a victim out of range", "an expert or -1"
    known = np.isin(cause, (FETCHED, PROMOTED, ISSUED, ARRIVED, TAKEN))
    yield (
        not known.all(),
        f"a move of cause {cause[~known][:1].tolist()}",
        "fetched, promoted, issued, arrived or taken",
    )
    taken = int((cause == TAKEN).sum())
    yield policy.prefetch is None and taken > 0, f"{taken} prefetched experts", f"none of policy {policy.id}"
    background = int(np.isin(cause, (PROMOTED, ISSUED, ARRIVED)).sum())
    yield policy.beta is None and background > 0, f"{background} background loads", f"none of policy {policy.id}"
    arrived, issued = int(np.isin(cause, (PROMOTED, ARRIVED)).sum()), int((cause == ISSUED).sum())
    yield arrived > issued, f"{arrived} loads ended", f"at most the {issued} that were issued"
    fetches, moved = int((log.kind == FETCH).sum()), int(np.isin(cause, (FETCHED, PROMOTED, TAKEN)).sum())
    yield fetches != moved, f"{fetches} fetches", f"as many as the {moved} moves for them"


# ---- what the emulator said ------------------------------------------------------------------------------------------
def check_scores(folder: Path, record_path: Path, record: dict, tokens: dict[str, int]) -> set[Path]:
    """The scores belong to the record and cover every run. tokens: of every run, by its name. Returns the files."""
    losses_path, found = read_rescored(folder, record)
    path = losses_path.with_suffix(".json")
    if found is None:
        raise error(f"{path} is not there", "every run scored by the emulator", "there: finish the measurement")
    try:
        facts = found["provenance"]
        if facts["record_sha256"] != sha256(record_path):
            raise error(f"{path}: scores of record {facts['record_sha256'][:16]}", sha256(record_path)[:16], AGAIN)
        losses = load_file(losses_path)
        if facts["losses_sha256"] != sha256(losses_path):
            raise error(
                f"{losses_path}: sha256 {sha256(losses_path)[:16]}", facts["losses_sha256"][:16], "copy it again"
            )
        scored = {cell_of(record, row).name: row for row in found["cells"]}
        for name, number in tokens.items():
            row = scored[name]
            whole = name in losses and losses[name].shape == (number,) and np.isfinite(losses[name]).all()
            if row["status"] != "ok" or not whole or not 0 <= row["differences"] <= row["events"]:
                raise error(f"{path}: {name} {row.get('reason', 'without whole losses')}", f"{number} losses", AGAIN)
    except UserError:
        raise
    except (KeyError, OSError, SafetensorError, TypeError, ValueError) as exc:
        raise error(f"{path}: {type(exc).__name__} {exc}", "the scores of this record", "copy it again") from None
    return {path, losses_path}
