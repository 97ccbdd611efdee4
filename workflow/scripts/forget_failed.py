"""Remove the records that hold a failed cell, so that the next run scores them again.

python workflow/scripts/forget_failed.py results/quality
"""

import argparse
import json
from pathlib import Path

from engine.errors import main_guard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    a = parser.parse_args()
    removed = 0
    for path in sorted(Path(a.folder).glob("*/*/*.json")):
        failed = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["status"] == "failed"]
        if failed:
            path.unlink()
            removed += 1
            print(f"{path}: {len(failed)} failed cells, for example: {failed[0]['reason']}")
    print(f"{removed} records removed; run snakemake --cores 1 results/all")


if __name__ == "__main__":
    main_guard(main)
