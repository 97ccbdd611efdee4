"""lm-eval's own command line with one model more: `offloaded`, a model under a miss policy (evals/adapter.py).

    python -m evals.lm_eval --model offloaded --tasks gsm8k --model_args \\
        pretrained=results/models/reference,policy=quality_first,slots=25%,demand=results/calibration/reference.safetensors

Model arguments are those of evals.instruments.ModelArgs; everything else is lm-eval's. --batch_size has no effect: one
request is one lane from one start. Run it as a module: as a file it would hide the package lm_eval behind its own name.
"""

from __future__ import annotations

import lm_eval.models  # noqa: F401  registers lm-eval's own models, which a registry with one of ours would not do
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry

import evals.answers_filter  # noqa: F401  registers the filter `numeric`
from engine.errors import main_guard


def main() -> None:
    model_registry.register("offloaded", target="evals.adapter:OffloadedLM")
    cli_evaluate()


if __name__ == "__main__":
    main_guard(main)
