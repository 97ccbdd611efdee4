"""Does a configuration give the same files on one machine and on a cluster of two nodes? By hand, some ten minutes.

Two clones of the last commit make the target: one with `snakemake --cores 1`, the other through Slurm on loopback, as
root. This machine is probed once, in the first: the second takes that profile, because a probe is a measurement.

    python tests/workflow/same_on_cluster.py --configfile config/small.yaml
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from slurm import Cluster, why_not

ROOT = Path(__file__).parents[2]
SUFFIXES = (".csv", ".json", ".md", ".safetensors")
MEASURED_HERE = re.compile(r'"(wall_s|tokens_per_s)": [^,\n]+|^.*,tokens_per_s,.*$', re.MULTILINE)
PROFILE = "results/hosts/local.yaml"


def contents(results: Path, names: Iterable[str]) -> dict[str, object]:
    """What files under these folders hold, but for how long it took and the order of a header's keys."""
    found: dict[str, object] = {}
    for path in sorted(path for name in names for path in (results / name).rglob("*") if path.suffix in SUFFIXES):
        name = path.relative_to(results).as_posix()
        if path.suffix in (".json", ".csv"):
            found[name] = MEASURED_HERE.sub("", path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:  # numpy has no bfloat16
                tensors = {key: file.get_tensor(key) for key in sorted(file.keys())}
                values = {key: tensor.reshape(-1).view(torch.uint8).numpy() for key, tensor in tensors.items()}
                found[name] = (file.metadata(), {key: value.tobytes() for key, value in values.items()})
        else:
            found[name] = path.read_bytes()
    return found


def run(clone: Path, environment: dict[str, str], *arguments: str) -> float:
    """Seconds of a run of Snakemake in the clone, which must succeed."""
    environment = os.environ | environment | {"PYTHONPATH": str(clone)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    begin = time.monotonic()
    command = [sys.executable, "-m", "snakemake", *arguments]
    with (clone / "run.log").open("wb") as log:
        code = subprocess.run(command, cwd=clone, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        sys.exit("\n".join((clone / "run.log").read_text(encoding="utf-8").splitlines()[-40:]))
    return time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--configfile", default="config/small.yaml")
    parser.add_argument("--target", default="results/all")
    parser.add_argument("--cpus", type=int, default=os.cpu_count(), help="of a node")
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"error: {reason}")
    with TemporaryDirectory() as folder:
        local, remote = Path(folder) / "local", Path(folder) / "remote"
        for clone in (local, remote):
            subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        asked = (options.target, "--configfile", options.configfile)
        print(f"{run(local, {}, '--cores', '1', *asked):6.0f} s on one machine", flush=True)
        if (local / PROFILE).is_file():  # the target asks for it
            (remote / PROFILE).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(local / PROFILE, remote / PROFILE)
        with Cluster(Path(folder) / "cluster", cpus=options.cpus) as cluster:
            profile = ("--profile", "workflow/profiles/slurm", "--slurm-status-command", "squeue")
            seconds = run(remote, cluster.environment, *profile, *asked)
            jobs = cluster.ended()
        print(f"{seconds:6.0f} s on two nodes, {jobs} jobs", flush=True)
        names = sorted(path.name for path in (local / "results").iterdir() if path.is_dir())
        names = [name for name in names if name not in ("logs", "published", "stamps")]
        wanted, found = contents(local / "results", names), contents(remote / "results", names)
        files = sorted(wanted.keys() | found.keys())
        other = [file for file in files if found.get(file) != wanted.get(file)]
        for name in names:
            of, differ = ([file for file in some if file.split("/")[0] == name] for some in (files, other))
            print(f"{name:16} {len(of):5} files, {len(differ)} differ {' '.join(differ[:12])}")
        return int(bool(other))


if __name__ == "__main__":
    sys.exit(main())
