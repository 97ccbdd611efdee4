"""Host profiles: what a machine needs for the parts of a decoding step. One file a machine, read and checked here.

A profile holds measured tables (`python -m engine.host probe`), or constants from documents, each with its source
(`modelled`). A link moves experts; a throttled link is a measured one slowed down, not a second host.
config/hosts/README.md explains every field; the arithmetic stands in engine/host_times.py.

    host = load_hosts("config/hosts")["my_box"]
    host.link("disk").batch_s(6_291_456, count=3)       # three experts fetched by one event
    host.device.experts_s(6_291_456, 8, "bfloat16")     # eight resident ones computed

    python -m engine.host probe --id my_box | show my_box | check | import FOLDER

torch is imported by the probe alone.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import jsonschema
import yaml

from engine.errors import error, main_guard, nearest
from engine.host_facts import digest, fingerprint
from engine.host_times import Affine, Compute, Host, Link, Table, Throttle, Time
from engine.sheets import ID

FOLDER = "config/hosts"
SCHEMA = Path(__file__).parent.parent / "workflow" / "schemas" / "host.schema.json"
README = "see config/hosts/README.md"
# Nothing a user can buy is faster [bytes/s]: PCIe 5.0 x16 of disks, eight sockets of DDR5, PCIe 6.0 x16, HBM3e twice
LIMITS = {"compute": 2e13, "disk": 6.4e10, "memory": 4e12, "pcie": 1.28e11}


# ---- reading --------------------------------------------------------------------------------------------------------
def load_hosts(folder: str | Path = FOLDER) -> dict[str, Host]:
    """Every `*.yaml` of a folder by id, alphabetically. UserError names file and field."""
    folder = Path(folder)
    if not folder.is_dir():
        raise error(f"{folder} is no folder", "a folder of host profiles", "check the path")
    hosts: dict[str, Host] = {}
    owner: dict[str, Path] = {}
    for path in sorted(folder.glob("*.yaml")):
        host = load_host(path)
        if host.fingerprint in owner:
            raise error(
                f"{path}: fingerprint {host.fingerprint}, as in {owner[host.fingerprint]}",
                "one profile a machine",
                "remove one; another link or a throttle is an entry under `links`, not a second host",
            )
        owner[host.fingerprint] = path
        hosts[host.id] = host
    return hosts


def this_host(hosts: dict[str, Host]) -> Host:
    """The profile of the machine we are on."""
    here = fingerprint()
    for host in hosts.values():
        if host.fingerprint == here:
            return host
    raise error(f"no profile with this machine's fingerprint {here}", f"one of {len(hosts)}", "probe it first")


def load_host(path: str | Path) -> Host:
    """One profile, checked against the schema and against what is physically possible."""
    path = Path(path)
    return parse_host(read_profile(path), path)


def parse_host(data: object, path: Path, name: str | None = None) -> Host:
    """The same, from what the file holds. name: the id it must have; default the stem of the file."""
    _check_finite(data, str(path), "")
    _check_schema(data, path)
    if data["id"] != (name or path.stem):
        expected = f"the name of the {'folder' if name else 'file'}, '{name or path.stem}'"
        raise error(f"{path}: id '{data['id']}'", expected, "rename one of them")
    modelled = data["status"] == "modelled"
    if modelled and "fingerprint" in data:
        raise error(f"{path}: a modelled host with a fingerprint", "none: its constants are its identity", "remove it")
    links: dict[str, Link] = {}
    for name, entry in sorted(data["links"].items(), key=lambda item: "of" in item[1]):  # throttled ones last
        links[name] = _link(name, entry, links, modelled, f"{path}: links.{name}")
    compute = {name: _compute(name, entry, f"{path}: compute.{name}") for name, entry in data["compute"].items()}
    # a modelled machine is what its facts and constants say, whoever says so
    says = [_unsourced(data[part]) for part in ("facts", "compute", "links")]
    mark = digest(says) if modelled else data["fingerprint"]
    quick = not modelled and data["probe"]["quick"]
    offload = tuple(data["offload"]) if "offload" in data else None
    for name in offload or ():
        if name not in links:
            raise error(f"{path}: offload names '{name}'", "a link of this profile", nearest(name, links))
    return Host(data["id"], data["status"], mark, quick, data["facts"], compute, dict(sorted(links.items())), offload)


def read_profile(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path} does not exist", "a host profile", "probe this machine, or check the id") from None
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise error(f"{path}: {exc}", "valid YAML", "mend the file") from None


def _check_schema(data: object, path: Path) -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    wrong = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(data))
    if wrong is None:
        return
    field = ".".join(str(part) for part in wrong.absolute_path)
    where = f"{path}: {field}" if field else f"{path}:"
    if wrong.validator == "additionalProperties":
        known = wrong.schema.get("properties", {})
        extra = sorted(set(wrong.instance) - set(known))[0]
        raise error(f"{where} has a field '{extra}'", "a known field", nearest(extra, known))
    if wrong.validator == "required":
        missing = next(name for name in wrong.validator_value if name not in wrong.instance)
        raise error(f"{where} lacks '{missing}'", f"all of {', '.join(wrong.validator_value)}", README)
    hint = README
    if wrong.validator == "type" and isinstance(wrong.instance, str):
        hint = "YAML reads 25e9 as text: write 25.0e+9 or 25_000_000_000"
    raise error(f"{where} is {json.dumps(wrong.instance)[:80]}", f"what the schema says ({wrong.message[:120]})", hint)


def _check_finite(value: object, path: str, field: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise error(f"{path}: {field} is {value}", "a finite number", "measure again, or mend the field")
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        _check_finite(part, path, f"{field}.{name}" if field else str(name))


def _unsourced(value: object) -> object:
    if isinstance(value, dict):
        return {name: _unsourced(part) for name, part in value.items() if name not in ("note", "source")}
    return value


def _number(node: float | dict) -> float:
    """A constant stands alone or as {value, spread | source}."""
    return float(node["value"] if isinstance(node, dict) else node)


def _link(name: str, entry: dict, links: dict[str, Link], modelled: bool, where: str) -> Link:
    kind, slow = entry["kind"], entry.get("slowdown", {})
    slow = {f"slowdown_{part}": _number(node) for part, node in slow.items()}
    if "of" in entry:
        if entry["of"] not in links:
            raise error(f"{where}.of is '{entry['of']}'", "a link of this profile", nearest(entry["of"], links))
        base = links[entry["of"]]
        if base.kind != kind or base.status == "throttled":
            raise error(f"{where}: kind {kind} of {base.status} {base.kind}", f"kind {base.kind}, measured", README)
        limits = Affine(_number(entry["latency_s"]), _number(entry["bandwidth_bytes_per_s"]))
        if limits.bytes_per_s > base.time.peak_bytes_per_s:
            raise error(
                f"{where}.bandwidth_bytes_per_s is {limits.bytes_per_s:.3g}",
                f"at most the {base.time.peak_bytes_per_s:.3g} of '{base.name}'",
                "a throttle slows a link down: lower it or remove the link",
            )
        status = "modelled" if modelled else "throttled"
        return Link(name, kind, status, Throttle(base.time, limits), limits.bytes_per_s, **slow)
    limit = _number(entry["limit_bytes_per_s"])
    if limit > LIMITS[kind]:
        raise error(
            f"{where}.limit_bytes_per_s is {limit:.3g}",
            f"at most {LIMITS[kind]:.3g} for kind {kind}",
            "no machine is that fast: mend the number (bytes, not bits)",
        )
    time = _time(entry, where, ("latency_s", "bandwidth_bytes_per_s"))
    _check_peak(time, limit, where, "read with O_DIRECT: the page cache answered" if kind == "disk" else "mend one")
    return Link(name, kind, "modelled" if modelled else "measured", time, limit, **slow)


def _compute(device: str, entry: dict, where: str) -> Compute:
    times: dict[str, dict[str, Time]] = {}
    for dtype, parts in entry["dtypes"].items():
        times[dtype] = {}
        for part in ("token", "layers", "experts"):
            here = f"{where}.dtypes.{dtype}.{part}"
            times[dtype][part] = _time(parts[part], here, ("overhead_s", "bytes_per_s"))
            _check_peak(times[dtype][part], LIMITS["compute"], here, "mend the number")
    slot_s = {dtype: _number(parts["slot_s"]) for dtype, parts in entry["dtypes"].items()}
    return Compute(device, _number(entry["event_s"]), times, entry.get("slots", 0), slot_s)


def _check_peak(time: Time, limit: float, where: str, todo: str) -> None:
    if time.peak_bytes_per_s > limit:
        raise error(f"{where}: {time.peak_bytes_per_s:.3g} bytes/s", f"at most its limit of {limit:.3g} bytes/s", todo)


def _time(entry: dict, where: str, names: tuple[str, str]) -> Time:
    if "rows" not in entry:
        return Affine(*(_number(entry[name]) for name in names))
    counts, rows = entry["counts"], entry["rows"]
    sizes = [row["bytes"] for row in rows]
    if counts != sorted(set(counts)) or sizes != sorted(set(sizes)) or counts[0] != 1:
        raise error(f"{where}: counts {counts}, bytes {sizes}", "both rising, counts from 1", "sort the table")
    for number, row in enumerate(rows):
        if not len(counts) == len(row["seconds"]) == len(row["spread"]):
            raise error(
                f"{where}.rows.{number}: {len(row['seconds'])} seconds, {len(row['spread'])} spreads",
                f"{len(counts)} of each, one a count",
                "measure again",
            )
    return Table(tuple(sizes), tuple(counts), tuple(tuple(row["seconds"]) for row in rows))


# ---- commands -------------------------------------------------------------------------------------------------------
def describe(host: Host) -> str:
    """A profile on one screen."""
    facts = ", ".join(f"{key} {value}" for key, value in host.facts.items() if value not in ([], None))
    quick = " by a quick probe" if host.quick else ""
    lines = [f"{host.id}: {host.status}{quick}, fingerprint {host.fingerprint}", f"  {facts}"]
    for link in host.links.values():
        lines.append(
            f"  link {link.name} ({link.kind}, {link.status}), at most {link.limit_bytes_per_s / 1e9:.3g} GB/s"
        )
        for size in (65_536, 1_048_576, 6_291_456):
            times = ", ".join(f"{link.transfer_s(size, d) * 1e3:.3g} at {d}" for d in (1, 2, 4, 8))
            lines.append(f"    {size:>9,} bytes: ms a record by depth: {times}")
    for device, compute in host.compute.items():
        lines.append(f"  {device}: {compute.event_s * 1e6:.3g} us a decision")
        for dtype in compute.times:
            experts = ", ".join(f"{compute.experts_s(6_291_456, n, dtype) * 1e3:.3g} for {n}" for n in (1, 8))
            lines.append(
                f"    {dtype}: ms {compute.token_s(0, dtype) * 1e3:.3g} a token, {compute.layer_s(0, dtype) * 1e3:.3g} "
                f"a small layer; 6,291,456-byte experts: ms {experts}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.host", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("probe", help="measure this machine, in under a minute")
    one.add_argument("--id", help="name of the host; default: the stem of --out")
    one.add_argument("--out", help=f"file to write; default {FOLDER}/<id>.yaml")
    one.add_argument("--dir", help="folder on the disk to measure; default EXPERTMISS_CACHE or ~/.cache/expertmiss")
    one.add_argument("--threads", type=int, help="threads of torch; default all logical cores")
    one.add_argument("--quick", action="store_true", help="a few seconds, coarse: to try the command, not to publish")
    two = commands.add_parser("show", help="print one profile")
    two.add_argument("id")
    two.add_argument("--folder", default=FOLDER)
    three = commands.add_parser("check", help="check every profile of a folder")
    three.add_argument("folder", nargs="?", default=FOLDER)
    four = commands.add_parser("import", help="check a measured folder of another machine, then copy it")
    four.add_argument("measured", type=Path, metavar="FOLDER", help="results/measured/<id> of that machine")
    four.add_argument("--into", type=Path, default=Path("results/measured"))
    a = parser.parse_args()
    if a.command == "import":
        from engine.measured_import import accept

        print(accept(a.measured, a.into, parse_host))
    elif a.command == "probe":
        if not (a.id or a.out):
            raise error("neither --id nor --out", "a name for this host", "python -m engine.host probe --id my_box")
        if a.threads is not None and a.threads < 1:
            raise error(f"--threads {a.threads}", "1 or more", "leave it out for all cores")
        path = Path(a.out) if a.out else Path(FOLDER) / f"{a.id}.yaml"
        name = path.stem if a.id is None else a.id
        if not ID.fullmatch(name) or path.name != f"{name}.yaml":
            raise error(
                f"id '{name}' in {path.name}", "letters, digits, '_' or '-', and <id>.yaml", "choose another id"
            )
        from engine.host_probe import write_profile  # imports torch

        write_profile(name, path, folder=a.dir, threads=a.threads, quick=a.quick, check=parse_host)
        print(describe(load_host(path)))
    elif a.command == "show":
        hosts = load_hosts(a.folder)
        if a.id not in hosts:
            raise error(f"host '{a.id}'", f"a profile of {a.folder}", nearest(a.id, hosts))
        print(describe(hosts[a.id]))
    else:
        here = fingerprint()
        for host in load_hosts(a.folder).values():
            mark = " (this machine)" if host.fingerprint == here else ""
            print(f"{host.id}{mark}: {host.status}, {host.fingerprint}, links {', '.join(host.links)}")


if __name__ == "__main__":
    main_guard(main)
