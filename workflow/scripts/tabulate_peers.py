"""Tables of the programs that were run beside the engine, on every host whose folder has a record of them.

python workflow/scripts/tabulate_peers.py --records results/measured/my_box/peers_reference.json --level 0.95 \
    --replicates 999 --seed 1 --out results/tables/local/peers.csv \
    --out-documents results/tables/local/peers_documents.csv
"""

import argparse
from pathlib import Path

import pandas as pd

from engine.errors import main_guard
from engine.files import atomic
from engine.measured_run import read_peers
from evals.measured_tables import DOCUMENT_COLUMNS
from evals.peers.tables import COLUMNS, documents, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", nargs="*", default=[], help="results/measured/<host>/peers_<model>.json")
    parser.add_argument("--level", type=float, required=True)
    parser.add_argument("--replicates", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--out-documents", required=True)
    a = parser.parse_args()
    found = [read_peers(Path(path)) for path in a.records]
    options = {"level": a.level, "replicates": a.replicates, "seed": a.seed}
    tables = (
        (a.out, COLUMNS, [row for record in found for row in rows(record, **options)]),
        (a.out_documents, DOCUMENT_COLUMNS, [row for record in found for row in documents(record)]),
    )
    for path, columns, lines in tables:
        with atomic(path) as temporary:
            table = pd.DataFrame(lines, columns=list(columns))
            table.to_csv(temporary, index=False, float_format="%.8g", lineterminator="\n")


if __name__ == "__main__":
    main_guard(main)
