"""Questions for remaining records: the demo model answers them unless positions are wrong."""

from pathlib import Path

import pytest
import torch

from inference_svc.eval.eval_model import prepare_model
from inference_svc.eval.options import RetrievalOptions, Truncation
from inference_svc.eval.retrieval import RecordText, draw_records, fill, measure_retrieval
from inference_svc.eval.sequence import Sequence
from inference_svc.runtime.model.model_loader import load_model
from shared.types.errors import InvalidInputError

DEMO_MODEL = Path(__file__).parents[3] / "inference_svc" / "demo" / "model"
WINDOW = 640
METHODS = ("ca", "tt", "nkvt")


@pytest.fixture(scope="module")
def demo():
    torch.set_num_threads(1)
    return prepare_model(load_model(DEMO_MODEL, "float32"), WINDOW, METHODS)


@pytest.fixture(scope="module")
def prompts(demo):
    return RecordText(demo.text, demo.loaded.tokenizer.bos_token_id)


def test_the_demo_model_finds_the_remaining_records(demo):
    """With keys at new positions as well as recomputed; at the old ones it does not."""
    options = RetrievalOptions(METHODS, num_contexts=2, num_questions=8)
    ca, tt, nkvt = measure_retrieval(demo, options, lambda _what: None).methods
    assert ca.num_kept == tt.num_kept == nkvt.num_kept > 5
    assert ca.num_asked == 16
    assert ca.kept.value >= 0.8
    assert tt.kept.value >= 0.8
    assert nkvt.kept.value <= tt.kept.value - 0.4
    assert ca.overall.value < ca.kept.value  # dropped records cannot be known
    assert ca.num_computed < tt.num_computed


def test_the_last_overflow_comes_with_the_question(demo, prompts):
    """The rest ends with the last records; earlier ones are gone."""
    options = RetrievalOptions(METHODS, num_overflows=2)
    with Sequence(demo, "tt") as context:
        filled = fill(context, prompts, options, "a seed")
        left = demo.loaded.tokenizer.decode(context.context_ids)
        assert filled.num_fed > WINDOW
        is_kept = [record.line in left for record in filled.records]
    assert not any(is_kept[: len(is_kept) // 2])
    assert is_kept[-1]
    assert is_kept == sorted(is_kept)


def test_a_context_is_a_conversation(demo, prompts):
    """In the format of the chat template, turn by turn."""
    records = draw_records("any")[:3]
    context = prompts.records(records[:2], [])
    context += prompts.records(records[2:], context)
    tokenizer = demo.loaded.tokenizer
    lines = [record.line for record in records]
    expected = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "Remember these lines.\n" + "\n".join(lines[:2])},
            {"role": "assistant", "content": "Noted."},
            {"role": "user", "content": "Remember these lines.\n" + lines[2]},
            {"role": "assistant", "content": "Noted."},
        ],
        tokenize=False,
    )
    assert tokenizer.decode(context) == expected.removesuffix(tokenizer.eos_token)


def test_only_the_number_of_an_answer_is_judged(demo, prompts):
    """The text before it is given."""
    (record,) = draw_records("any")[:1]
    context = prompts.records([record], [])
    question = prompts.question(record, context)
    judged = demo.loaded.tokenizer.decode(question.token_ids[-question.num_judged :])
    assert judged.removesuffix(">").isdigit()
    assert record.line.endswith(judged)
    assert demo.loaded.tokenizer.decode(question.token_ids).endswith(record.line)


def test_the_seed_determines_the_questions(demo):
    """And another seed something else."""
    first, again, other = (draw_records(seed)[:5] for seed in ("0/1", "0/1", "0/2"))
    assert first == again != other


def test_a_window_too_small_for_records_is_refused(demo):
    """Of eight records, about 110 tokens, one turn would remain."""
    small = prepare_model(demo.loaded, 96, ("tt",))
    options = RetrievalOptions(("tt",), Truncation(), num_contexts=1)
    with pytest.raises(InvalidInputError, match="larger --window"):
        measure_retrieval(small, options, lambda _what: None)


def test_a_model_without_chat_template_gets_plain_text(eval_model, prompts):
    """One text with each part on its own lines."""
    text = eval_model.text
    plain = RecordText(_NoChat(text), bos_id=None)
    (record,) = draw_records("any")[:1]
    said = eval_model.loaded.tokenizer.decode(plain.question(record, [1]).token_ids)
    assert said == f"\nTell me the content of line {record.key}.\n{record.line}"


class _NoChat:
    """The encoder of a model with a tokenizer, but no chat template."""

    chat_problem = "the model has no chat template"

    def __init__(self, text):
        self.control = text.control
