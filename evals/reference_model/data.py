"""The training texts as tokens, and the batches a run sees.

`prepare` trains the tokenizer on a balanced sample of the training texts (never on test or calibration text),
writes one uint16 array a topic into the run's folder, and records where every text came from. `Batches` deals
windows of T+1 tokens by fixed shares of the topics; what the n-th batch holds depends on the recipe's seed
and the counts dealt so far, nothing else.

Every document is preceded by BOS, which is also what ends it. Windows cut long documents; attention never
crosses a BOS.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from engine.errors import error
from engine.files import atomic, sha256, write_json

BOS = 0
BOS_TOKEN = "<|endoftext|>"
SAMPLE_BYTES = 4_000_000  # a topic, for the tokenizer


def train_tokenizer(texts: dict[str, list[str]], vocabulary: int):
    """Byte-level BPE on the first SAMPLE_BYTES of each topic's texts; id 0 is BOS and EOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    def sample():
        for topic in sorted(texts):
            size = 0
            for text in texts[topic]:
                if size > SAMPLE_BYTES:
                    break
                size += len(text.encode())
                yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[BOS_TOKEN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def encode(tokenizer, texts: Iterable[str]) -> np.ndarray:
    """BOS, document, BOS, document, ... [tokens] uint16."""
    texts, parts = list(texts), []
    for first in range(0, len(texts), 1000):
        for encoding in tokenizer.encode_batch(texts[first : first + 1000]):
            parts.append(np.array([BOS, *encoding.ids], np.uint16))
    return np.concatenate(parts)


def unique_texts(documents: Iterable) -> dict[str, list[str]]:
    """Texts by topic, each document once (the iterator may repeat some; the shares of the recipe decide here)."""
    seen, texts = set(), {}
    for topic, document in documents:
        if document.id not in seen:
            seen.add(document.id)
            texts.setdefault(topic, []).append(document.text)
    return texts


def joined(texts: list[str], limit: int, seed: int) -> list[str]:
    """Short texts in runs of random length up to `limit` characters, a blank line between, as in a few-shot prompt."""
    rng, runs, size, aim = random.Random(seed), [], 0, 0
    for text in texts:
        if size + len(text) > aim:
            runs.append([])
            size, aim = 0, rng.randint(0, limit)
        runs[-1].append(text)
        size += len(text)
    return ["\n\n".join(run) for run in runs]


def corpus_facts() -> list[dict]:
    """Id, topic, licence, hash and origin of every training text, for the model card."""
    from evals import corpora

    facts = []
    for corpus_id in corpora.available(role="train"):
        corpus = corpora.load(corpus_id)
        facts.append(
            {
                "id": corpus.id,
                "topic": corpus.topic,
                "licence": corpus.licence,
                "sha256": corpus.sha256,
                "provenance": corpus.provenance,
                "documents": len(corpus.documents),
                "bytes": sum(len(document.text.encode()) for document in corpus.documents),
            }
        )
    return facts


def prepare(folder: Path, vocabulary: int, join: dict[str, int], seed: int) -> dict:
    """Make tokenizer.json, tokens.<topic>.npy and data.json in `folder` unless they are there; return data.json.

    `join`: topics whose texts are joined to runs, and up to how many characters.
    """
    record = folder / "data.json"
    if record.exists():
        return json.loads(record.read_text())
    from evals import corpora

    texts = unique_texts(corpora.training_documents())
    for topic, limit in join.items():
        texts[topic] = joined(texts[topic], limit, seed)
    tokenizer = train_tokenizer(texts, vocabulary)
    if tokenizer.get_vocab_size() != vocabulary:
        raise error(f"a tokenizer of {tokenizer.get_vocab_size()}", f"{vocabulary}", "give it more training text")
    with atomic(folder / "tokenizer.json") as temporary:
        tokenizer.save(str(temporary))
    topics = {}
    for topic in sorted(texts):
        tokens = encode(tokenizer, texts[topic])
        path = folder / f"tokens.{topic}.npy"
        with atomic(path) as temporary:
            np.save(temporary, tokens)
        topics[topic] = {
            "documents": len(texts[topic]),
            "bytes": sum(len(text.encode()) for text in texts[topic]),
            "tokens": len(tokens),
            "sha256": sha256(path),
        }
    facts = {"topics": topics, "texts": corpus_facts(), "tokenizer_sha256": sha256(folder / "tokenizer.json")}
    write_json(record, facts)
    return facts


def open_tokens(folder: Path, topics: Iterable[str]) -> dict[str, np.ndarray]:
    return {topic: np.load(folder / f"tokens.{topic}.npy", mmap_mode="r") for topic in topics}


class Batches:
    """Windows [size, T+1] by fixed shares of the topics. State: how many windows of each topic were dealt (`dealt`)."""

    def __init__(self, tokens: dict[str, np.ndarray], shares: dict[str, float], window: int, seed: int):
        if set(shares) != set(tokens):
            raise error(f"shares of {sorted(shares)}", f"one a topic: {sorted(tokens)}", "mend the recipe")
        short = [topic for topic, array in tokens.items() if len(array) < 2 * window + 1]
        if short:
            raise error(f"{len(tokens[short[0]])} tokens of {short[0]}", f"over {2 * window}", "use more text")
        total = sum(shares.values())
        self.tokens, self.window, self.seed = tokens, window, seed
        self.shares = {topic: shares[topic] / total for topic in sorted(shares)}
        self.dealt = dict.fromkeys(self.shares, 0)
        self.orders: dict[str, tuple[int, int, np.ndarray]] = {}

    def windows_a_round(self, topic: str) -> int:
        """Windows of one pass; the pass begins at a random offset below T, so cuts fall elsewhere each time."""
        return (len(self.tokens[topic]) - self.window) // self.window - 1

    def deal(self, topic: str) -> np.ndarray:
        count = self.windows_a_round(topic) + 1
        epoch, at = divmod(self.dealt[topic], count)
        if self.orders.get(topic, (-1,))[0] != epoch:
            rng = np.random.default_rng([self.seed, list(self.shares).index(topic), epoch])
            self.orders[topic] = (epoch, int(rng.integers(self.window)), rng.permutation(count))
        _, offset, order = self.orders[topic]
        first = offset + int(order[at]) * self.window
        self.dealt[topic] += 1
        return self.tokens[topic][first : first + self.window + 1]

    def next(self, size: int) -> np.ndarray:
        """The next batch: each window from the topic furthest behind its share."""
        rows = []
        for _ in range(size):
            total = sum(self.dealt.values()) + 1
            topic = max(self.shares, key=lambda name: self.shares[name] * total - self.dealt[name])
            rows.append(self.deal(topic))
        return np.stack(rows).astype(np.int64)
