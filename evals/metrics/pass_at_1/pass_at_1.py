"""pass@1 as a local `evaluate` module: evals/pass_at.py behind evaluate's interface.

import evaluate
metric = evaluate.load("evals/metrics/pass_at_1")
metric.compute(predictions=[["    return 2 * x"]], references=[row], allowed=True)
"""

import datasets
import evaluate

from evals.pass_at import COLUMNS, pass_at_k
from evals.sandbox import require_opt_in

CITATION = "Chen et al. 2021, Evaluating Large Language Models Trained on Code, arXiv 2107.03374"
DESCRIPTION = "Share of problems that at least one of k completions solves, judged by running them in a sandbox."
INPUTS = "predictions: a list of completions a problem; references: HumanEval's rows; allowed; k"


class PassAt1(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = {"predictions": datasets.Sequence(text), "references": dict.fromkeys(COLUMNS, text)}
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features(features),
        )

    def _compute(self, predictions, references, allowed=False, k=(1,)):
        """pass_at_<k> for each k, None where nothing was run; status and counts say why."""
        record = pass_at_k(predictions, references, require_opt_in(allowed), tuple(k))
        shares = {f"pass_at_{k}": share for k, share in record["pass_at"].items()}
        return shares | {name: record[name] for name in ("status", "counts", "outcomes")}
