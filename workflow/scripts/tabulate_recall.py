"""How many of the experts that the next layers choose does every predictor name? With intervals over documents.

A row is (model, predictor, horizon, target layer or all, topic or all): recall of the K chosen among K names and among
all N, share of events named exactly, recall of the experts that miss, and the difference to gate replay on the same
events. The counts are those of predict_experts.py.
"""

import argparse

import pandas as pd

from engine.errors import main_guard
from engine.files import atomic
from evals.jobs import Progress
from evals.predictor_recall import recall_rows
from evals.records import read_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", nargs="+", required=True, help="results/predictions/<model>/recall.json")
    parser.add_argument("--level", type=float, default=0.95)
    parser.add_argument("--replicates", type=int, default=9999)
    parser.add_argument("--seed", type=int, default=20512)
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    options = {"level": a.level, "replicates": a.replicates, "seed": a.seed}
    progress, rows = Progress("tabulate recall", len(a.records), "models"), []
    for path in a.records:
        rows += recall_rows(read_json(path, "cells", "clusters", "predictors", "names", "top_k"), options)
        progress.advance()
    with atomic(a.out) as temporary:
        pd.DataFrame(rows).to_csv(temporary, index=False, float_format="%.8g")


if __name__ == "__main__":
    main_guard(main)
