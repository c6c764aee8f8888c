"""Template arguments: which change a conversation, and which a session keeps."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.errors import InvalidTurnError
from inference_svc.runtime.turns.chat_text import TurnText
from tests.argument_templates import DATED, EFFORTFUL, PICKY, STYLED, THINKING
from tests.tool_templates import FAMILIES, text_of, tokenizer_of

UNTHINKING = {"enable_thinking": False}
HIGH, LOW = {"reasoning_effort": "high"}, {"reasoning_effort": "low"}


def with_usual(family, usual):
    """Make a turn encoder with the operator's arguments."""
    tokenizer = tokenizer_of(family)
    text = TurnText(tokenizer, frozenset(tokenizer.convert_tokens_to_ids(list(family.ends))), usual)
    text.try_out()
    assert text.chat_problem == ""
    return text


@pytest.mark.parametrize("name", FAMILIES)
def test_unknown_arguments_change_nothing(name):
    """Nor do those that are written only before an answer."""
    text = text_of(FAMILIES[name])
    assert text.framing({"unknown_9f": [1, "x"], **UNTHINKING}) == ""
    assert text.framing({}) == ""


def test_arguments_written_in_messages_make_another_conversation():
    """Each value a different one; the template's default does not, nor does a prompt's argument."""
    text = text_of(EFFORTFUL)
    framings = [text.framing(own) for own in ({}, HIGH, LOW, {**HIGH, **UNTHINKING})]
    assert framings[0] == "" != framings[1] != framings[2] != ""
    assert framings[3] == framings[1]
    assert text.framing(UNTHINKING) == ""
    assert text.framing({"reasoning_effort": "medium"}) == ""


def test_a_conversation_is_the_same_on_another_day():
    """A template that writes the time is rendered with a fixed one."""
    text = text_of(DATED)
    first = text.framing(HIGH)
    text._framing._find.cache_clear()
    text._framing._plain = b""
    time.sleep(0.002)  # the template writes microseconds
    assert text.framing(HIGH) == first != ""
    assert text.framing(UNTHINKING) == ""


def test_clients_arguments_override_the_operators():
    """Naming the operator's value gives the same conversation as naming none."""
    text = with_usual(EFFORTFUL, HIGH)
    assert text.framing({}) == text.framing(HIGH) == text_of(EFFORTFUL).framing(HIGH) != ""
    assert text.framing({"reasoning_effort": "medium"}) == ""
    question = [{"role": "user", "content": "Why?"}]
    assert "Effort: high" in text.decode(text.encode_chat(question, []))
    said = text.settle(UNTHINKING, None).arguments
    assert said == {**HIGH, **UNTHINKING}


def test_a_session_keeps_its_first_arguments():
    """Equal ones or none are accepted; arguments of one answer change nothing."""
    text = text_of(EFFORTFUL)
    begun = text.settle({**HIGH, **UNTHINKING}, None)
    assert begun.arguments == {**HIGH, **UNTHINKING}
    assert begun.recorded == '{"enable_thinking":false,"reasoning_effort":"high"}'
    assert text.settle(HIGH, begun.recorded) == (HIGH, "")
    assert text.settle({}, begun.recorded) == ({**HIGH, **UNTHINKING}, "")
    assert text.settle(UNTHINKING, None) == (UNTHINKING, "")
    assert text.settle({}, "") == ({}, "")
    only_begun = text.settle(HIGH, None).recorded
    assert text.settle(UNTHINKING, only_begun) == ({**HIGH, **UNTHINKING}, "")
    with pytest.raises(InvalidTurnError, match=r"the conversation differently.*or none"):
        text.settle(LOW, begun.recorded)
    with pytest.raises(InvalidTurnError, match="the conversation differently"):
        text.settle(HIGH, "")


def test_the_templates_refusal_appears_where_it_is_rendered():
    """The arguments make another conversation, whose first turn fails with the template's words."""
    text = text_of(PICKY)
    assert text.framing(LOW) not in {"", text.framing(HIGH)}
    question = [{"role": "user", "content": "Why?"}]
    with pytest.raises(InvalidTurnError, match=r"effort is none or high.*arguments that the model"):
        text.encode_chat(question, [], arguments=LOW)
    with pytest.raises(InvalidTurnError, match="effort is none or high"):
        text.encode_chat(question, [5], arguments=LOW)


STYLE, STYLED_BY = "{{ style | default('') }}", {"style": "(s)"}


def make_styled(family, style):
    """Make a family whose template writes an argument around messages."""
    begins, ends = family.special[0], family.ends[0]
    template = family.template.replace(begins, style + begins)
    if f"'{ends}'" not in template:  # where it is not literal text, but the result of an expression
        template = template.replace(ends, ends + style)
    return replace(family, template=style + template)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt_oss"])
def test_arguments_are_written_like_literal_text(name):
    """In openings and in appended messages, with results and with a continued answer."""
    family = FAMILIES[name]
    told, same = (
        text_of(make_styled(family, STYLE)),
        text_of(make_styled(family, STYLED_BY["style"])),
    )
    assert told.framing(STYLED_BY) != "" == same.framing(STYLED_BY)
    question = [{"role": "user", "content": "Why?"}]
    results = [{"role": "tool", "content": "4", "tool_call_id": "c1", "name": "look"}]
    tools = [
        {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    ]
    ends = min(told._eos_ids)
    for said, history, offered in (
        (question, [], ()),
        (question, [], tools if family.writes_tools else ()),
        (question, [5], ()),
        (question, [5, ends], ()),
        (results, [5], ()),
        (results, [5, ends], ()),
    ):
        for beginning in ("", "Because"):
            ids = told.encode_chat(said, history, offered, arguments=STYLED_BY, beginning=beginning)
            expected = same.encode_chat(said, history, offered, beginning=beginning)
            assert told.decode(ids) == same.decode(expected)


@pytest.mark.parametrize(
    "condition",
    [
        "messages[0].role == 'system'",
        "messages[0].role != 'system' and not tools",
        "tools and messages[0].role == 'system'",
        "tools and messages[-1].role == 'tool'",
        "messages | length > 2",
    ],
)
def test_an_argument_is_found_anywhere_in_a_conversation(condition):
    """With a system message or without, with tools, and behind their results."""
    family = FAMILIES["qwen"]
    template = "{% if " + condition + " %}" + STYLE + "{% endif %}" + family.template
    assert text_of(replace(family, template=template)).framing(STYLED_BY) != ""


TEXTS = {family: text_of(family) for family in (EFFORTFUL, STYLED, THINKING)}
WORDS = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "</s>", "<", "|im_end|>", "a", "é", " ", "\n"]),
    max_size=4,
).map("".join)


@given(
    st.sampled_from(list(TEXTS)),
    st.fixed_dictionaries(
        {},
        optional={
            "reasoning_effort": WORDS,
            "style": WORDS,
            "enable_thinking": st.booleans(),
            "other": st.lists(WORDS, max_size=2),
        },
    ),
    st.lists(WORDS, min_size=1, max_size=3),
    st.sampled_from([(), ("Be brief.",)]),
)
def test_appended_turns_equal_the_whole_conversation(family, arguments, questions, system):
    """With any constant arguments, none of which becomes a control token."""
    text = TEXTS[family]
    control, num_ends = text.control, 0
    leading = [{"role": "system", "content": one} for one in system]
    said, ids = leading, []
    answer = {"role": "assistant", "content": "It is."}
    for question in questions:
        new = [*([] if ids else leading), {"role": "user", "content": question}]
        ids = ids + text.encode_chat(new, ids, arguments=arguments)
        said = [*said, new[-1]]
        prompt = text.encode_chat(said, [], arguments=arguments)
        # Templates omit empty thoughts of earlier answers, which sessions keep.
        if family is not THINKING and arguments.get("enable_thinking", True):
            assert text.decode(ids) == text.decode(prompt)
        num_ends = sum(one in control.ids for one in prompt)
        plain = {name: value for name, value in arguments.items() if isinstance(value, bool)}
        benign = [{**one, "content": "x"} if one["role"] == "user" else one for one in said]
        assert num_ends == sum(
            one in control.ids for one in text.encode_chat(benign, [], arguments=plain)
        )
        ids += [*control.encode("It is."), *text._eos_ids]
        said = [*said, answer]


def test_a_template_that_writes_the_date_continues_the_next_day():
    """Its text before a turn is rendered again."""
    text = text_of(EFFORTFUL)
    question = [{"role": "user", "content": "Why?"}]
    today = text.encode_chat(question, [5])
    frames = text._template.frames
    text._template.frames = replace(frames, base="24 Nov 2026" + frames.base)
    assert text.encode_chat(question, [5]) == today


def test_the_end_of_the_system_message_depends_on_the_arguments():
    """However long the template makes it."""
    text = text_of(EFFORTFUL)
    said = [{"role": "user", "content": "Why?"}]
    for effort in ("low", "as much as there is, and more"):
        told = {"reasoning_effort": effort}
        ids = text.encode_chat(said, [], arguments=told)
        num = text.system_tokens(said, ids, (), told)
        assert text.decode(ids[:num]) == f"<|im_start|>system\nEffort: {effort}<|im_end|>\n"
