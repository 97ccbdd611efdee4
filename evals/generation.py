"""What does a policy write? One task of lm-eval by generation: its scores, and of every problem the tokens it took.

    lm = KeepingLM(model, Emulator(attachment, policy, slots=64, demand=demand), tokenizer)
    record, said = answer_task(lm, load_task("expertmiss_humaneval", resolved, new_tokens=64))

Every problem is one request of evals/adapter.py, from the warm start. Problem texts are not in the record: their ids
are, and the sha256 of the prompt, with what was generated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval import evaluate
from lm_eval.api.task import Task

from engine.errors import error
from evals.adapter import OffloadedLM
from evals.answers_filter import INVALID

NUMERIC = "numeric"  # the filter whose finding is the final answer


@dataclass(frozen=True)
class Said:
    """Of one request: the tokens it was asked by (cut to the context) and those it was answered with."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    wall_s: float


class KeepingLM(OffloadedLM):
    """Answers one request after another, in their order, and keeps of each its tokens and seconds in `said`."""

    def __init__(self, *arguments, progress: Callable[[], None] = lambda: None, **options) -> None:
        super().__init__(*arguments, **options)
        self.said: list[Said] = []
        self._progress = progress

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        return [answer for request in requests for answer in super(KeepingLM, self).generate_until([request], True)]

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        started = time.perf_counter()
        whole = super()._model_generate(context, max_length, stop, **options)
        seconds, ids = time.perf_counter() - started, whole[0].tolist()
        prompt = context.shape[1]
        self.said.append(Said(tuple(ids[:prompt]), tuple(ids[prompt:]), seconds))
        self._progress()
        return whole


def answer_task(lm: KeepingLM, task: Task) -> tuple[dict, list[Said]]:
    """(record, what was said to every problem in their order).

    tokens_per_s is the emulator's wall time on the machine of the run: all weights are there, so it says nothing about
    offloading. truncated: neither a stop string nor the end came within the limit.
    """
    if lm.tokenizer.eos_token_id is None:  # lm-eval decodes it, whatever the task's own stop strings
        raise error("a tokenizer without an end-of-text token", "one that has it", "name it in tokenizer_config.json")
    lm.said = []
    found = evaluate(lm, {"tasks": {task.task_name: task}}, bootstrap_iters=0)
    scores = {key: value for key, value in found["results"][task.task_name].items() if isinstance(value, float)}
    problems: dict[int, dict] = {}
    for sample in found["samples"][task.task_name]:
        said, text = lm.said[sample["doc_id"]], sample["resps"][0][0]
        problem = problems.setdefault(
            sample["doc_id"],
            {
                "problem": sample["doc"]["id"],
                "prompt_sha256": sample["prompt_hash"],
                "prompt_tokens": len(said.prompt),
                "tokens": len(said.tokens),
                "truncated": truncated(lm, said.tokens, task.config.generation_kwargs),
                "text": text,
                "scores": {},
            },
        )
        problem["scores"] |= {key_of(metric, sample["filter"]): sample[metric] for metric in sample["metrics"]}
        if sample["filter"] == NUMERIC:
            answer = sample["filtered_resps"][0]
            problem["answer"] = None if answer == INVALID else answer
    tokens, seconds = sum(len(said.tokens) for said in lm.said), sum(said.wall_s for said in lm.said)
    info = lm.get_model_info()
    record = {
        "lm_eval": {
            "task": task.task_name,
            "version": task.VERSION,
            "num_fewshot": task.config.num_fewshot,
            "generation_kwargs": task.config.generation_kwargs,
            "results": scores,
        },
        "requests": info["requests"],
        "requests_truncated": info["requests_truncated"],
        "decisions": info["decisions"],
        "lossless": info["lossless"],
        "lossy_without_effect": info["lossy_without_effect"],
        "tokens": tokens,
        "wall_s": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2),
        "problems": [problems[number] for number in sorted(problems)],
    }
    return record, lm.said


def key_of(metric: str, of_filter: str) -> str:
    """A score's name: exact matches by their filter, any other by its own."""
    return of_filter if metric == "exact_match" else metric


def truncated(lm: OffloadedLM, tokens: tuple[int, ...], keywords: dict[str, Any]) -> bool:
    ends = lm.model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    text = lm.tokenizer.decode(tokens)
    stopped = tokens[-1] in ends or any(stop in text for stop in keywords["until"])
    return len(tokens) >= keywords["max_gen_toks"] and not stopped
