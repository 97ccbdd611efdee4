"""Measure this machine for the run at hand: a host profile, coarse where a full one is refused, or the reason for none.

A full probe is refused on a busy machine, and where no disk can be read past the page cache no probe is possible; the
run goes on without this host then, and its index says why.
"""

import argparse
from pathlib import Path

import yaml

from engine.errors import UserError, main_guard
from engine.files import write_text
from engine.host import describe, load_host, parse_host
from engine.host_probe import write_profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--probe", choices=("full", "quick", "none"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", required=True, help="the profile; its stem is the host's id")
    a = parser.parse_args()
    path, reason = Path(a.out), "config: probe is none"
    for quick in {"full": (False, True), "quick": (True,), "none": ()}[a.probe]:
        try:
            write_profile(path.stem, path, folder=None, threads=a.threads, quick=quick, check=parse_host)
            print(describe(load_host(path)))
            return
        except UserError as exc:
            reason = " ".join(str(exc).split())
            print(f"{'quick' if quick else 'full'} probe refused: {reason}", flush=True)
    write_text(path, yaml.safe_dump({"id": path.stem, "status": "absent", "reason": reason}))


if __name__ == "__main__":
    main_guard(main)
