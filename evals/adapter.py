"""How does a model under a miss policy answer lm-eval's requests? lm-eval's own Hugging Face adapter, driven by phases.

One request is one restart from the warm start, so order, batch size and caching change nothing. Its context is exact
prefill; what is scored or generated after it is decoding:

    loglikelihood   c1 c2 c3 | t1 t2 t3     c: prefill; t1 is judged by the prefill's own logits, t2 after the event of
                    prefill  | decoding     t1: n scored tokens are n - 1 events a layer, as in generation
    rolling         the windows that lm-eval cuts, one after another from one start: each window's context (mostly one
                    token) is prefill, what it scores is decoding; no token is scored twice

So an answer of a single token (a letter of multiple choice) is exact under every policy; `requests_without_events` says
how many there were. Tokenisation, templates, truncation, stop strings and progress are the parent's, with one rule of
ours: BOS stands once before every text where the tokenizer has one, whatever the tokenizer itself would do.

    lm = OffloadedLM(model, handler, tokenizer)
    lm_eval.simple_evaluate(model=lm, tasks=[...])        # or the command line: python -m evals.lm_eval
    lm.get_model_info()["decisions"]
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval import utils
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.models.utils_hf import stop_sequences_criteria
from tqdm import tqdm

from engine.errors import error
from engine.generate import forced, generate
from engine.hub import resolve
from engine.log import add_counts, count
from evals.instruments import HFLM_ARGS, INSTRUMENTS, Handler, identity, parse
from evals.jobs import load_tokenizer

GREEDY = {"do_sample": False, "num_beams": 1, "temperature": 0.0}  # values that generation keywords may have
SAMPLING = ("min_p", "top_k", "top_p", "typical_p")  # without effect where nothing is sampled


class OffloadedLM(HFLM):
    """A loaded model and the handler that runs its experts, as lm-eval's model `offloaded`. One lane: batch size 1."""

    def __init__(
        self, model, handler: Handler, tokenizer, *, identity: Mapping[str, Any] | None = None, **options
    ) -> None:
        """identity: what an answer depends on beside model, tokenizer, policy and slots, for caches and results.

        options: those of HFLM_ARGS.
        """
        with _quiet("lm_eval.models.huggingface"):  # it warns that a model which is loaded has no arguments: ours do
            super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1, **options)
        self.handler = handler
        self.requests = self.requests_without_events = self.requests_truncated = 0
        self.counts: dict[str, float | int] | None = None  # of all requests so far, None before the first event
        residency = handler.residency
        self.identity = {
            **(identity or {}),
            "policy": _json(dataclasses.asdict(handler.policy)),
            "slots_count": residency.slots,
            "experts": residency.experts,
            "top_k": residency.top_k,
            "model_dtype": str(model.dtype),
            "model_device": model.device.type,
            "model_commit": getattr(model.config, "_commit_hash", None),
            "config_sha256": _sha256(model.config.to_json_string()),
            "tokenizer_sha256": _sha256(_words(tokenizer)),
            "max_length": self.max_length,
            "think_end_token": self.think_end_token,
        }

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None) -> OffloadedLM:
        """From `--model_args`, see evals.instruments.ModelArgs. UserError on an unknown or impossible one."""
        args = parse({**(additional_config or {}), **arg_dict})
        args = dataclasses.replace(args, pretrained=str(resolve(args.pretrained, args.revision)))
        tokenizer, _ = load_tokenizer(args.pretrained)
        facts = identity(args)
        model, handler = INSTRUMENTS[args.instrument](args)
        return cls(model, handler, tokenizer, identity=facts, **{name: getattr(args, name) for name in HFLM_ARGS})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> OffloadedLM:
        return cls.create_from_arg_obj(utils.simple_parse_args_string(arg_string), additional_config)

    # ---- tokens ------------------------------------------------------------------------------------------------------
    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **_: Any
    ) -> list[int]:
        """Ids with BOS once before them, also where the text begins with it; add_special_tokens=False: as they are."""
        ids = self.tokenizer.encode(string, add_special_tokens=False)
        bos = self.tokenizer.bos_token_id
        if add_special_tokens is not False and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The one prompt of a batch: ids and mask [1, T]."""
        (string,) = strings
        whole = self.tok_encode(string)
        ids = torch.tensor([whole[-left_truncate_len:] if left_truncate_len else whole], dtype=torch.long)
        self.requests_truncated += ids.shape[1] < len(whole)
        return ids, torch.ones_like(ids)

    # ---- requests ----------------------------------------------------------------------------------------------------
    @contextmanager
    def _request(self) -> Iterator[None]:
        """One restart; its decisions are counted and then forgotten, so memory does not grow with requests."""
        self.handler.restart()
        self.handler.clear_log()
        self._events = 0  # a layer
        yield
        self.requests += 1
        if self._events:
            counts = count(self.handler.log())
            self.counts = counts if self.counts is None else add_counts(self.counts, counts)
        else:
            self.requests_without_events += 1
        self.handler.clear_log()

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        if ("", "") in (request.args for request in requests):
            raise error("a request of empty context and continuation", "a text to score", "mend the task")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        answers = []
        for strings, context, continuation in tqdm(requests, "Running loglikelihood requests", disable=disable_tqdm):
            with self._request():
                answer = self._score(context, continuation)
            self.cache_hook.add_partial("loglikelihood", strings, answer)
            answers.append(answer)
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        answers = []
        for request in tqdm(requests, "Running loglikelihood_rolling requests", disable=disable_tqdm):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            prefix = self.prefix_token_id
            windows = utils.get_rolling_token_windows(
                token_list=ids[1:] if ids[:1] == [prefix] else ids,  # the text brings its own
                prefix_token=prefix,
                max_seq_len=self.max_length,
                context_len=1,
            )
            with self._request():
                answer = sum((self._score(*utils.make_disjoint_window(window))[0] for window in windows), 0.0)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
            answers.append(answer)
        return answers

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """(log p of the continuation in nats, whether greedy decoding would have said it); float32 whatever the model.

        What does not fit is cut from the left of the context.
        """
        if not context or not 0 < len(continuation) <= self.max_length:
            found = f"a request of {len(context)} tokens of context and {len(continuation)} to score"
            raise error(found, f"some context, and 1 to {self.max_length} tokens to score", "mend the task")
        kept = context[-(self.max_length + 1 - len(continuation)) :]
        self.requests_truncated += len(kept) < len(context)
        self._events += len(continuation) - 1
        total, greedy = 0.0, True
        for logits, tokens in forced(self.model, self.handler, kept, continuation):
            own = logits.float().log_softmax(-1).gather(1, tokens[:, None])
            total += float(own.sum())
            greedy &= bool((logits.argmax(-1) == tokens).all())
        if not math.isfinite(total):  # an average would take it in, and a choice prefer it
            found = f"a log-probability of {total} of {len(continuation)} tokens"
            raise error(found, "finite weights", "find the weight: python -m engine.offload verify FOLDER")
        return total, greedy

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        for request in requests:
            self._check_greedy(request.args[1])
        return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def _check_greedy(self, keywords: dict[str, Any]) -> None:
        """UserError on keywords of one request that greedy decoding does not do, or that leave no room for a prompt.

        An empty stop string would end every generation after its first token.
        """
        until = keywords.get("until", [])
        strings = [until] if isinstance(until, str) else until
        if not isinstance(strings, list) or not all(isinstance(string, str) and string for string in strings):
            raise error(f"until={until!r}", "a stop string or a list of them, none empty", "mend the task")
        try:
            rest = normalize_gen_kwargs(keywords, self.max_gen_toks)
        except (TypeError, ValueError, OverflowError) as exc:
            raise error(f"generation with {keywords}: {exc}", "numbers", "say others in --gen_kwargs") from None
        room = rest.pop("max_gen_toks")
        if not 0 < room < self.max_length:
            found, expected = f"max_gen_toks={room}", f"1 to {self.max_length - 1} (max_length {self.max_length})"
            raise error(found, expected, "say another in --gen_kwargs")
        for name in sorted(rest.keys() - {"until", *SAMPLING}):
            if name not in GREEDY or rest[name] != GREEDY[name]:
                greedy = ", ".join(f"{key}={value}" for key, value in GREEDY.items())
                expected = f"greedy decoding: until, max_gen_toks, {greedy}"
                raise error(f"generation with {name}={rest[name]}", expected, "say so in --gen_kwargs")

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **_: Any) -> torch.Tensor:
        """context [1, T] and what follows it, greedily, up to max_length tokens in all or a stop string or EOS."""
        prompt, made = context[0].tolist(), []
        ended = stop_sequences_criteria(self.tokenizer, stop, 0, 1)
        eos = self.model.generation_config.eos_token_id
        eos = eos if isinstance(eos, list) else [eos]
        with self._request():
            for token in generate(self.model, self.handler, prompt, max_new_tokens=max_length - len(prompt)):
                made.append(token)
                if token in eos or ended(torch.tensor([made]), None):
                    break
            self._events = max(len(made) - 1, 0)
        return torch.tensor([[*prompt, *made]])

    # ---- who answers -------------------------------------------------------------------------------------------------
    def set_cache_hook(self, cache_hook) -> None:
        """lm-eval keys its cache of answers (`--use_cache`) by the request alone; here by who answers as well.

        CachingLM, which looks answers up, and the hook, which keeps each as soon as it is there, share one SqliteDict.
        """
        if cache_hook.dbdict is not None:
            mine = _sha256(json.dumps(self.identity, sort_keys=True))
            cache_hook.dbdict.encode_key = lambda request: f"{mine} {request}"
        super().set_cache_hook(cache_hook)

    @property
    def tokenizer_name(self) -> str:
        """lm-eval keys its cache of prompts (`--cache_requests`) by this where a chat template makes them."""
        return f"{super().tokenizer_name}-{_sha256(str(self.tokenizer.chat_template))}"

    def get_model_info(self) -> dict[str, Any]:
        """Who answered and what really happened, for lm-eval's results. Answers from a cache are in no count."""
        counts = self.counts or {}
        changed = counts.get("substitutions", 0) + counts.get("drops", 0)
        return {
            **self.identity,
            "continuity": "restart",
            "requests": self.requests,
            "requests_without_events": self.requests_without_events,
            "requests_truncated": self.requests_truncated,
            "decisions": self.counts,
            "failed_loads": len(getattr(self.handler, "failures", ())),  # background loads that an engine went without
            "lossless": self.handler.policy.lossless,
            "lossy_without_effect": not self.handler.policy.lossless and changed == 0,
        }


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """No warnings of one logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _json(row: dict[str, Any]) -> dict[str, Any]:
    """Strict JSON has no infinity (tau, beta)."""
    return {name: "inf" if value == math.inf else value for name, value in row.items()}


def _words(tokenizer) -> str:
    """All that a tokenizer does, where it is one of the tokenizers library, else its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
