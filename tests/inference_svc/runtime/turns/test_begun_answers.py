"""Continued answers, and names in messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.errors import InvalidTurnError
from inference_svc.runtime.turns.chat_template import DUMMY_ANSWER
from tests.argument_templates import EFFORTFUL, NAMED, STYLED
from tests.tool_templates import FAMILIES, text_of

QUESTION = {"role": "user", "content": "What is kept?"}
BEGUN = " The blocks \n"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("history", [[], [5, 6]])
def test_a_prompt_ends_with_the_beginning_of_the_answer(name, history):
    """Unchanged, where the template writes an answer without a thought."""
    text = text_of(FAMILIES[name])
    ids = text.encode_chat([QUESTION], history, beginning=BEGUN)
    said = text.decode(ids)
    assert said.endswith(BEGUN)
    answered = [QUESTION, {"role": "assistant", "content": "Right"}]
    whole = text._template.render(answered, is_prompt=False).rpartition("Right")[0]
    header = whole[whole.index(QUESTION["content"]) :]
    assert said.removesuffix(BEGUN).endswith(header)
    assert text.thought_begun(ids) == ""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_continued_answer_follows_results(name):
    """Those of calls in the answer before it."""
    text = text_of(FAMILIES[name])
    result = {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "look_up"}
    said = text.decode(text.encode_chat([result], [5, 6], beginning="It is"))
    assert said.index("sunny") < said.index("It is")
    assert said.endswith("It is")


def test_a_continued_answer_uses_the_turns_arguments():
    """As every other prompt."""
    text = text_of(EFFORTFUL)
    said = text.decode(
        text.encode_chat([QUESTION], [], arguments={"reasoning_effort": "low"}, beginning="I")
    )
    assert "Effort: low" in said
    text = text_of(STYLED)
    said = text.decode(text.encode_chat([QUESTION], [5], arguments={"style": "!"}, beginning="I"))
    assert said.endswith("<|im_start|>assistant!\nI")


def test_a_template_that_changes_answers_cannot_continue_one():
    """It is refused before encoding."""
    text = text_of(FAMILIES["qwen"])
    text._template.render = lambda *_args, **_options: "nothing"
    with pytest.raises(InvalidTurnError, match="does not write the beginning of the answer"):
        text.encode_chat([QUESTION], [], beginning="I")


def test_messages_without_a_prompt_for_an_answer():
    """They end with the last of them."""
    text = text_of(FAMILIES["qwen3_thinking"])
    said = text.decode(text.encode_chat([QUESTION], [], is_prompt=False))
    assert said == f"<|im_start|>user\n{QUESTION['content']}<|im_end|>\n"


TEXTS = {name: text_of(family) for name, family in FAMILIES.items()}
HOSTILE = st.lists(
    st.sampled_from(["<|im_end|>", "<think>", "</s>", "[/INST]", "<|end|>", "x", " ", DUMMY_ANSWER])
).map("".join)


@given(st.sampled_from(sorted(TEXTS)), HOSTILE, HOSTILE)
def test_a_beginning_never_contains_control_tokens(name, question, beginning):
    """Whatever its text is, there or elsewhere."""
    text = TEXTS[name]
    asked = [{"role": "user", "content": f"?{question}"}]
    ids = text.encode_chat(asked, [], beginning=f"!{beginning}")
    benign = text.encode_chat([{"role": "user", "content": "?"}], [], beginning="!")
    control = text.control.ids
    assert [one for one in ids if one in control] == [one for one in benign if one in control]
    assert text.decode(ids).endswith(f"!{beginning}")


def test_names_are_written_by_templates_that_support_them():
    """For the supported roles; elsewhere a name makes no difference."""
    text = text_of(NAMED)
    assert text.named_roles == {"system", "user", "assistant"}
    said = text.decode(text.encode_chat([{**QUESTION, "name": "Ann"}], []))
    assert said.startswith("<|im_start|>user <|Ann\nWhat")
    for name, family in FAMILIES.items():
        other = TEXTS[name]
        assert other.named_roles == frozenset(), name
        named = other.encode_chat([{**QUESTION, "name": "Ann"}], [])
        assert named == other.encode_chat([QUESTION], []), family


@pytest.mark.parametrize("name", ["im_end|>", "im_start|>x", "<|im_end|>", "a <|im_end|>"])
def test_a_name_completes_no_control_token(name):
    """Neither alone nor together with the template's text."""
    text = text_of(NAMED)
    named, benign = (text.encode_chat([{**QUESTION, "name": one}], []) for one in (name, "Ann"))
    num = [sum(one in text.control.ids for one in ids) for ids in (named, benign)]
    assert num[0] == num[1]
    assert name in text.decode(named)
