"""Our numeric answers as a filter of lm-eval: import this module, and a task may name `numeric`.

    filter_list:
      - name: numeric
        filter: [{function: numeric}, {function: take_first}]

It stands beside lm-eval's own filters of GSM8K, which misread `$29.00.` and `29.00`. A response without an answer
becomes `[invalid]`, as there. Answers are normalised, so the target must be: `evals.answers.gold_answer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter

from evals.answers import last_answer

INVALID = "[invalid]"


@register_filter("numeric")
class NumericFilter(Filter):
    """The answer that each response states, see evals/answers.py."""

    def apply(self, resps: Iterable[Sequence[str]], docs: Sequence[dict]) -> list[list[str]]:
        return [[last_answer(text) or INVALID for text in responses] for responses in resps]
