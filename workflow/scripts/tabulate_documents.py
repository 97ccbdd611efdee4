"""Which inputs lose: loss and substituted mass of every document under every lossy policy, at one slot budget.

A document is a cluster of evals/corpora.py: parts of one article count as one, as in every interval.
"""

import argparse
from collections.abc import Iterator

import numpy as np
import pandas as pd

from engine.errors import error, main_guard
from engine.files import atomic
from engine.policies import BASELINE
from evals.quality_tables import identity
from evals.records import Scored, load_scored
from evals.stats import paired_losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", nargs="+", required=True, help="results/quality/<model>/<policy>/perplexity.json")
    parser.add_argument("--slots", required=True, help="id of the budget")
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    tables = [frame for own in load_scored(a.records).values() for frame in model_documents(own, a.slots)]
    with atomic(a.out) as temporary:
        pd.concat(tables or [pd.DataFrame(columns=COLUMNS)])[COLUMNS].to_csv(
            temporary, index=False, float_format="%.8g"
        )


COLUMNS = ["model", "policy", "miss_rule", "eviction", "beta", "instrument", "rehearsal", "slots", "slots_percent"]
COLUMNS += ["text", "topic", "document", "tokens", "substituted_mass", "delta_nll", "delta_percent"]


def model_documents(own: dict[str, Scored], slots: str) -> Iterator[pd.DataFrame]:
    """A frame for every whole cell of a lossy policy, documents in the order of the text."""
    if BASELINE not in own:
        raise error(f"no record of {BASELINE}", "the baseline among the records", "score it")
    for one in own.values():
        for cell in one.record["cells"]:
            key = f"{slots}/{cell['text']}"
            if (
                cell["slots"] == slots
                and cell["status"] == "ok"
                and not cell["lossless"]
                and key in own[BASELINE].losses
            ):
                clusters = one.record["clusters"][cell["text"]]
                delta = paired_losses(one.losses[key], own[BASELINE].losses[key])
                of_cell = {name: cell[name] for name in ("slots", "slots_percent", "text", "topic")}
                yield documents(clusters, cell["substituted_mass_by_document"], delta).assign(
                    **identity(one.record), **of_cell
                )


def documents(clusters: list[tuple[str, int]], masses: list[float], delta: np.ndarray) -> pd.DataFrame:
    """document, tokens, substituted_mass, delta_nll, delta_percent. delta [T]; clusters, masses: of every part."""
    ends = np.cumsum([tokens for _, tokens in clusters])
    parts = pd.DataFrame({"document": [name for name, _ in clusters], "tokens": [tokens for _, tokens in clusters]})
    parts["mass"] = masses * parts["tokens"]
    parts["delta"] = [delta[end - n : end].sum() for end, n in zip(ends, parts["tokens"], strict=True)]
    summed = parts.groupby("document", sort=False).sum().reset_index()
    nll = summed["delta"] / summed["tokens"]
    found = summed.assign(substituted_mass=summed["mass"] / summed["tokens"], delta_nll=nll)
    return found.assign(delta_percent=100 * np.expm1(nll)).drop(columns=["mass", "delta"])


if __name__ == "__main__":
    main_guard(main)
