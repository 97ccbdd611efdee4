"""Resolve one text of evals/corpora.toml into results/texts: its documents, or why it is absent.

python workflow/scripts/resolve_text.py --id bible_test --out results/texts/bible_test.json
"""

import argparse
import os

from engine.errors import main_guard
from engine.files import write_json
from evals.corpora import AbsentText, load, row_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--id", required=True)
    parser.add_argument("--data-dir", default=os.environ.get("EXPERTMISS_DATA"), help="default: EXPERTMISS_DATA")
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    row = row_of(arguments.id)
    value = {"id": arguments.id, "topic": row["topic"], "role": row["role"], "licence": row["licence"]}
    try:
        corpus = load(arguments.id, data_dir=arguments.data_dir)
    except AbsentText as exc:
        value = {"status": "absent", "reason": str(exc), **value}
        print(f"{arguments.id} is absent: {exc}")
    else:
        value = {
            "status": "ok",
            **value,
            "sha256": corpus.sha256,
            "provenance": corpus.provenance,
            "documents": [{"id": d.id, "text": d.text} for d in corpus.documents],
        }
        print(f"{arguments.id}: {len(corpus.documents)} documents, sha256 {corpus.sha256}")
    write_json(arguments.out, value)


if __name__ == "__main__":
    main_guard(main)
