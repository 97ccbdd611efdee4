"""The training texts as tokens, and the batches a run sees.

`prepare` trains the tokenizer on a balanced sample of the training texts (never on test or calibration text),
writes one uint16 array a topic into the run's folder, and records where every text came from. `Batches` deals
windows of T+1 tokens by fixed shares of the topics, other shares in the decay if the recipe has them; what the
n-th batch holds depends on the recipe's seed, the counts dealt so far and the phase, nothing else.

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


def corpus_facts(topics: Iterable[str]) -> list[dict]:
    """Id, topic, licence, hash and origin of every training text of `topics`, for the model card."""
    from evals import corpora

    facts = []
    for corpus_id in [name for topic in topics for name in corpora.available(role="train", topic=topic)]:
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


def gather(topics: Iterable[str], join: dict[str, int], seed: int) -> dict[str, list[str]]:
    """The training texts of `topics`, those of `join` in runs."""
    from evals import corpora

    texts = unique_texts(corpora.training_documents(topics=topics))
    return {topic: joined(rows, join[topic], seed) if topic in join else rows for topic, rows in texts.items()}


def prepare(
    folder: Path, vocabulary: int, join: dict[str, int], seed: int, shares: Iterable[str], more: Iterable[str] = ()
) -> dict:
    """Make tokenizer.json, tokens.<topic>.npy and data.json in `folder` unless they are there; return data.json.

    The tokenizer is trained on the topics of `shares` alone. A folder that lacks some topic of `shares` or `more` gets
    its tokens; what it has stays as it is. `join`: topics whose texts are joined to runs, up to how many characters.
    """
    from tokenizers import Tokenizer

    record, shares = folder / "data.json", list(shares)
    texts: dict[str, list[str]] = {}
    if record.exists():
        facts = json.loads(record.read_text())
    else:
        texts = gather(shares, join, seed)
        tokenizer = train_tokenizer(texts, vocabulary)
        if tokenizer.get_vocab_size() != vocabulary:
            raise error(f"a tokenizer of {tokenizer.get_vocab_size()}", f"{vocabulary}", "give it more training text")
        with atomic(folder / "tokenizer.json") as temporary:
            tokenizer.save(str(temporary))
        facts = {"topics": {}, "texts": [], "tokenizer_sha256": sha256(folder / "tokenizer.json")}
    missing = sorted({*shares, *more} - set(facts["topics"]))
    if not missing:
        return facts
    if unread := set(missing) - set(texts):
        texts |= gather(unread, join, seed)
    if absent := [topic for topic in missing if topic not in texts]:
        raise error(f"no training text of topic '{absent[0]}'", "one of evals/corpora.toml", "mend the recipe")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for topic in missing:
        tokens = encode(tokenizer, texts[topic])
        path = folder / f"tokens.{topic}.npy"
        with atomic(path) as temporary:
            np.save(temporary, tokens)
        facts["topics"][topic] = {
            "documents": len(texts[topic]),
            "bytes": sum(len(text.encode()) for text in texts[topic]),
            "tokens": len(tokens),
            "sha256": sha256(path),
        }
    facts["texts"] += corpus_facts(missing)
    write_json(record, facts)
    return facts


def open_tokens(folder: Path, topics: Iterable[str]) -> dict[str, np.ndarray]:
    return {topic: np.load(folder / f"tokens.{topic}.npy", mmap_mode="r") for topic in topics}


class Batches:
    """Windows [size, T+1] by fixed shares of the topics, by `decay_shares` once `begin_decay` was called.

    State: how many windows of each topic were dealt (`dealt`), and how many of them before the decay (`before`, None
    until it begins): shares hold within a phase, a topic that comes late does not catch up.
    """

    def __init__(
        self,
        tokens: dict[str, np.ndarray],
        shares: dict[str, float],
        window: int,
        seed: int,
        decay_shares: dict[str, float] | None = None,
    ):
        topics = sorted(shares) + sorted(set(decay_shares or {}) - set(shares))  # a topic's number seeds its order
        if set(topics) != set(tokens):
            raise error(f"shares of {sorted(topics)}", f"one a topic: {sorted(tokens)}", "mend the recipe")
        short = [topic for topic, array in tokens.items() if len(array) < 2 * window + 1]
        if short:
            raise error(f"{len(tokens[short[0]])} tokens of {short[0]}", f"over {2 * window}", "use more text")
        self.tokens, self.window, self.seed, self.topics = tokens, window, seed, topics
        self.shares = self.normalised(shares)
        self.decay_shares = self.normalised(decay_shares or shares)
        self.dealt = dict.fromkeys(topics, 0)
        self.before: dict[str, int] | None = None
        self.orders: dict[str, tuple[int, int, np.ndarray]] = {}

    def normalised(self, shares: dict[str, float]) -> dict[str, float]:
        """Shares of a sum of one, in the order of the topics."""
        total = sum(shares.values())
        return {topic: shares[topic] / total for topic in self.topics if topic in shares}

    def begin_decay(self) -> None:
        """From here on by `decay_shares`; calling it again changes nothing."""
        if self.before is None:
            self.before = dict(self.dealt)

    def windows_a_round(self, topic: str) -> int:
        """Windows of one pass; the pass begins at a random offset below T, so cuts fall elsewhere each time."""
        return (len(self.tokens[topic]) - self.window) // self.window - 1

    def deal(self, topic: str) -> np.ndarray:
        count = self.windows_a_round(topic) + 1
        epoch, at = divmod(self.dealt[topic], count)
        if self.orders.get(topic, (-1,))[0] != epoch:
            rng = np.random.default_rng([self.seed, self.topics.index(topic), epoch])
            self.orders[topic] = (epoch, int(rng.integers(self.window)), rng.permutation(count))
        _, offset, order = self.orders[topic]
        first = offset + int(order[at]) * self.window
        self.dealt[topic] += 1
        return self.tokens[topic][first : first + self.window + 1]

    def next(self, size: int) -> np.ndarray:
        """The next batch: each window from the topic furthest behind its share."""
        shares, before = self.shares, dict.fromkeys(self.topics, 0)
        if self.before is not None:
            shares, before = self.decay_shares, self.before
        rows = []
        for _ in range(size):
            dealt = {topic: self.dealt[topic] - before[topic] for topic in self.topics}
            total = sum(dealt.values()) + 1
            topic = max(shares, key=lambda name: shares[name] * total - dealt[name])
            rows.append(self.deal(topic))
        return np.stack(rows).astype(np.int64)
