"""Conversations about records, and questions after their edits."""

from pathlib import Path

import pytest

from inference_svc.eval.edits import CLEARED, KINDS, SUMMARY
from inference_svc.eval.eval_model import prepare_model
from inference_svc.eval.record_edits import converse, edit_records
from inference_svc.eval.retrieval import RecordText
from inference_svc.runtime.model.model_loader import load_model
from shared.types.errors import InvalidInputError

DEMO_MODEL = Path(__file__).parents[3] / "inference_svc" / "demo" / "model"
TOKENS = 512


@pytest.fixture(scope="module")
def demo():
    return prepare_model(load_model(DEMO_MODEL, "float32"), 1024, ("ca",))


@pytest.fixture(scope="module")
def prompts(demo):
    return RecordText(demo.text, demo.loaded.tokenizer.bos_token_id)


def edit_conversation(demo, prompts, kind, seed):
    """Return the conversation before, the question, and the text before and after the edit."""
    said = converse(prompts, TOKENS, str(seed))
    asked = edit_records(kind, said, prompts, str(seed))
    ids = [
        token
        for (start, end), new_ids in asked.edit.runs(len(said.token_ids))
        for token in [*said.token_ids[start:end], *new_ids]
    ]
    decode = demo.loaded.tokenizer.decode
    return said, asked, decode(said.token_ids), decode(ids)


def test_a_conversation_fills_the_context(demo, prompts):
    """Messages are in order; behind the middle one another names a record, but not its value."""
    said = converse(prompts, TOKENS, "any")
    assert TOKENS * 3 // 4 < len(said.token_ids) <= TOKENS
    ends = [place for _, span in said.messages for place in span]
    assert ends[0] == 0
    assert ends[-1] == len(said.token_ids)
    assert ends[1:-1:2] == ends[2::2]
    _, (start, end) = said.messages[said.edited + 1]
    naming = demo.loaded.tokenizer.decode(said.token_ids[start:end])
    assert f"Look at line {said.named.key} once more." in naming
    assert "REGISTER_CONTENT" not in naming
    assert said.named in said.messages[said.edited][0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_the_old_value_is_gone_and_the_rest_stays(demo, prompts, kind, seed):
    """The requested value is in its place; the named record's old value is nowhere."""
    said, asked, before, after = edit_conversation(demo, prompts, kind, seed)
    assert asked.old == said.named
    assert asked.old.line in before
    assert asked.old.line not in after
    assert asked.kept.line in before.partition("Look at line")[2]
    assert asked.kept.line in after.partition("Look at line")[2]
    first, rest = said.messages[0][1]
    assert after.startswith(demo.loaded.tokenizer.decode(said.token_ids[first:rest]))
    if kind in {"clear", "delete"}:
        assert asked.brought is None
    else:
        assert asked.brought.line in after.partition("Look at line")[0]


def test_each_kind_of_edit(demo, prompts):
    """By the replacement of the message."""
    texts = {kind: edit_conversation(demo, prompts, kind, 1) for kind in KINDS}
    assert CLEARED in texts["clear"][3]
    assert SUMMARY + texts["compact"][1].brought.line in texts["compact"][3]
    said, asked, before, after = texts["replace"]
    assert asked.brought.key == said.named.key
    assert asked.brought.line not in before
    assert len(asked.edit.replacements[0].new_ids) > 0
    said, asked, before, after = texts["delete"]
    assert before.count("Noted.") == after.count("Noted.") + 1
    assert not asked.edit.replacements[0].new_ids


def test_a_context_without_room_is_refused(prompts):
    """For messages before, in and behind the edit."""
    with pytest.raises(
        InvalidInputError, match=r"4 messages of 4 records do not fit into 300 tokens"
    ):
        converse(prompts, 300, "any")
