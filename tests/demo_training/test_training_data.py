"""The demo model's training data, with the tokenizer that is shipped with it."""
# ruff: noqa: S311 - draws need no secrecy

import random
from pathlib import Path

import pytest

from inference_svc.installation import SHIPPED_MODEL
from tests.demo_training.corpus import Corpus, Turn
from tests.demo_training.mixture import Mixture, Shares
from tests.demo_training.retrieval import RetrievalTasks
from tests.demo_training.tokenizer import ChatEncoder

WORDS = [a + b for a in ("stone", "river", "cloud", "amber") for b in ("a", "bc", "def", "ed")]
ARTICLE = " = Title = \n" + " ".join(f"{word} is a word ." for word in WORDS * 5)


@pytest.fixture(scope="module")
def encoder():
    return ChatEncoder(Path(SHIPPED_MODEL) / "tokenizer.json")


@pytest.mark.parametrize("task", ["lines", "recall", "copy", "repeat", "quote", "needle", "echo"])
def test_a_task_fits_its_budget_and_has_something_to_learn(encoder, task):
    """Every kind of sample keeps to its token budget, and marks its answers."""
    tasks = RetrievalTasks(encoder, [ARTICLE], WORDS)
    sample = getattr(tasks, task)(random.Random(1), 512)
    assert sample is not None
    assert len(sample.ids) == len(sample.is_target) <= 512
    assert any(sample.is_target)
    assert not sample.is_target[0]


def test_a_record_is_asked_for_by_its_name_and_answered_by_its_line(encoder):
    """The right answer is in the context, word for word."""
    sample = RetrievalTasks(encoder, [ARTICLE], WORDS).lines(random.Random(3), 256)
    parts: dict[bool, list[int]] = {True: [], False: []}
    for token_id, is_answer in zip(sample.ids, sample.is_target, strict=True):
        parts[is_answer].append(token_id)
    answer, context = encoder.decode(parts[True]), encoder.decode(parts[False])
    line = answer.split("line ")[1].split(">")[0] + ">"
    assert f"line {line}" in context


def test_a_batch_has_rows_of_the_requested_length(encoder):
    """Text, dialogues and tasks together fill every row."""
    dialogue = [Turn("What is amber ?", "A resin .")] * 4
    mixture = Mixture(Corpus([ARTICLE], [dialogue], [], []), encoder)
    batch = mixture.batch(random.Random(0), Shares(1, 1, 1, 1, 1), 3, 256)
    assert batch.inputs.shape == batch.labels.shape == (3, 256)
    assert float(batch.weights.sum()) > 0
