"""Packs text, dialogues and generated tasks into rows of equal length: the training batches.

Owns: the proportions of the mixture and the packing. Rows hold several samples one after the other
(each starts with `<|bos|>`); attention is not masked between them, so facts and questions also come
at positions other than the row's start.
"""

import random
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tests.demo_training.corpus import Corpus, Turn, frequent_words
from tests.demo_training.retrieval import (
    MIN_BUDGET,
    SYSTEM_PROMPTS,
    Message,
    RetrievalTasks,
    Sample,
    render,
)
from tests.demo_training.tokenizer import ChatEncoder

ANSWER_WEIGHT = 4.0
"""Loss weight of an answer token; a text token weighs 1. Answers are but a few per cent."""


@dataclass(frozen=True)
class Shares:
    """How often each kind of sample is drawn, relative to the others."""

    text: float
    dialogue: float
    document_dialogue: float
    retrieval: float
    echo: float


class Batch(NamedTuple):
    """What one training step needs."""

    inputs: Tensor  # [rows, tokens] int64
    labels: Tensor  # [rows, tokens] int64, the next token
    weights: Tensor  # [rows, tokens] float32, 0 where the next token is no target


class Mixture:
    """Draws batches. All randomness comes from the generator that the caller passes."""

    def __init__(self, corpus: Corpus, encoder: ChatEncoder) -> None:
        """Encode the articles once; dialogues are encoded as they are drawn."""
        self._encoder = encoder
        self._dialogues = corpus.dialogues
        self._stream = [token for a in corpus.articles for token in encoder.text(a)]
        self._retrieval = RetrievalTasks(encoder, corpus.articles, frequent_words(corpus.articles))

    @property
    def num_text_tokens(self) -> int:
        """Tokens of the article stream."""
        return len(self._stream)

    def batch(self, rng: random.Random, shares: Shares, num_rows: int, num_tokens: int) -> Batch:
        """Draw `num_rows` rows of `num_tokens` predictions each."""
        rows = [self._row(rng, shares, num_tokens + 1) for _ in range(num_rows)]
        ids = torch.tensor([row_ids for row_ids, _ in rows])
        weights = torch.tensor([row_weights for _, row_weights in rows])
        return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:])

    def _row(
        self, rng: random.Random, shares: Shares, length: int
    ) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        while (remaining := length - len(ids)) > 0:
            # Half of the samples take all that is left, so long distances do occur.
            budget = remaining
            if remaining > MIN_BUDGET and rng.random() < 0.5:
                budget = int(MIN_BUDGET * (remaining / MIN_BUDGET) ** rng.random())
            sample, weight = self._sample(rng, shares, budget)
            ids += sample.ids
            weights += [weight if target else 0.0 for target in sample.is_target]
        return ids[:length], weights[:length]

    def _sample(self, rng: random.Random, shares: Shares, budget: int) -> tuple[Sample, float]:
        """Draw one sample of at most `budget` tokens, and the weight of its targets."""
        if budget < MIN_BUDGET:
            return self._text(rng, budget), 1.0
        kinds = asdict(shares)
        kind = rng.choices(list(kinds), weights=list(kinds.values()))[0]
        if kind == "echo":
            return self._retrieval.echo(rng, budget), ANSWER_WEIGHT
        if kind == "retrieval":
            sample = self._retrieval.draw(rng, budget)
            return (sample, ANSWER_WEIGHT) if sample else (self._text(rng, budget), 1.0)
        if kind == "dialogue":
            return self._dialogue(rng, budget), 1.0
        if kind == "document_dialogue":
            return self._document_dialogue(rng, budget), 1.0
        return self._text(rng, budget), 1.0

    def _text(self, rng: random.Random, budget: int) -> Sample:
        """A crop of the article stream at any offset."""
        start = rng.randrange(len(self._stream) - budget)
        ids = [self._encoder.bos_id, *self._stream[start : start + budget - 1]]
        return Sample(ids, [True] * len(ids))

    def _dialogue(self, rng: random.Random, budget: int) -> Sample:
        """A dialogue from a random turn on, cut at the budget."""
        turns = rng.choice(self._dialogues)
        return self._chat(rng, "", turns[rng.randrange(len(turns)) :], budget)

    def _document_dialogue(self, rng: random.Random, budget: int) -> Sample:
        """A dialogue whose first message brings a document of up to 70 % of the budget."""
        length = rng.randint(budget // 4, budget * 7 // 10)
        start = rng.randrange(len(self._stream) - length)
        document = self._encoder.decode(self._stream[start : start + length])
        return self._chat(rng, document, rng.choice(self._dialogues), budget)

    def _chat(self, rng: random.Random, document: str, turns: list[Turn], budget: int) -> Sample:
        """Render turns until the budget is full; every token is a target."""
        system = rng.choice(SYSTEM_PROMPTS)
        messages = [Message("system", system)] if system else []
        for turn in turns:
            content = f"{document}\n{turn.user}" if document else turn.user
            messages += [Message("user", content), Message("assistant", turn.assistant)]
            document = ""
        ids = render(self._encoder, messages).ids[:budget]
        return Sample(ids, [True] * len(ids))
