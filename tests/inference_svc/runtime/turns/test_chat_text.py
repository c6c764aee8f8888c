"""Text in and out of token ids: incremental chat templates, incremental decoding."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from inference_svc.core.errors import InvalidTurnError, NoChatTemplateError
from inference_svc.runtime.turns.answer_writer import Detokenizer
from inference_svc.runtime.turns.chat_template import ChatTemplate, common_prefix, written_in
from inference_svc.runtime.turns.chat_text import TurnText
from tests.sampled import examples
from tests.tokenizers import make_tokenizer

STRICT = (
    "{% for m in messages %}"
    "{% if 'call' in m.content %}{{ raise_exception('no calls') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
PICKY = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant', 'critic') %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
)
REWRITES = "{{ messages | length }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def text_of(tokenizer, template=None):
    if template is not None:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
        tokenizer.chat_template = template
    text = TurnText(tokenizer, frozenset({tokenizer.eos_token_id}))
    text.try_out()
    return text


def user(content):
    return {"role": "user", "content": content}


def test_the_common_beginning_of_texts():
    """However long the others are."""
    assert common_prefix([1, 2, 3], [1, 2, 4, 5], [1, 2]) == 2


@pytest.mark.parametrize("ends_itself", [True, False])
def test_appended_turns_equal_the_whole_conversation(tokenizer, ends_itself):
    """Appending turn by turn gives the tokens of the template over the whole conversation."""
    text = text_of(tokenizer)
    answer = tokenizer("It is kept.", add_special_tokens=False).input_ids
    first = text.encode_chat([user("What is a block?")], [])
    history = [*first, *answer, *([tokenizer.eos_token_id] if ends_itself else [])]
    appended = history + text.encode_chat([user("Is it?")], history)
    whole = tokenizer.apply_chat_template(
        [
            user("What is a block?"),
            {"role": "assistant", "content": "It is kept."},
            user("Is it?"),
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert appended == tokenizer(whole, add_special_tokens=False).input_ids


def test_a_system_message_may_begin_a_session(tokenizer):
    """The first turn may bring several messages."""
    ids = text_of(tokenizer).encode_chat(
        [{"role": "system", "content": "Be brief."}, user("a")], []
    )
    assert "Be brief." in tokenizer.decode(ids)


def test_the_templates_refusal_is_an_invalid_turn(tokenizer):
    """The client gets its words."""
    text = text_of(tokenizer, STRICT)
    assert text.chat_problem == ""
    with pytest.raises(InvalidTurnError, match="no calls"):
        text.encode_chat([user("call it")], [1])


def test_the_frame_of_a_message_is_known(tokenizer):
    """For each role and place: the template's text, without the prompt for an answer."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = STRICT
    template = ChatTemplate(tokenizer, {})
    template.find_roles(lambda _text: 0)
    assert {"user", "assistant"} <= set(template.roles)
    found = list(template.surroundings())
    assert len(found) == 4 * len(template.roles)
    assert found[0] == (f"[{template.roles[0]}]", "<|end|>")
    assert not any("[a]" in after for _, after in found)


def test_refused_roles_are_not_offered(tokenizer):
    """Each role is tried, in every place of a conversation."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = PICKY
    template = ChatTemplate(tokenizer, {})
    template.find_roles(lambda _text: 0)
    assert template.roles == ("user", "assistant", "critic")
    assert len(list(template.surroundings())) == 4 * len(template.roles)


def test_a_template_that_rewrites_history_is_detected_at_the_start(tokenizer):
    """Appending would be wrong, so chat messages are refused, and text is accepted."""
    text = text_of(tokenizer, REWRITES)
    assert "rewrites earlier messages" in text.chat_problem
    with pytest.raises(NoChatTemplateError):
        text.encode_chat([user("a")], [])
    assert text.encode_text("a", opens_session=True)


@pytest.mark.parametrize(
    ("text", "alone", "found"),
    [
        ("[u]a[a]b$[u]c", "[u]a[a]b$", "[u]a[a]b$"),
        ("[u]a[a]b$[u]c", "[u]a[a]<t></t>b$", "[u]a[a]b$"),
        ("[u]a[a]<tool>$[t]c", "[u]a[a]<t></t><tool>$", "[u]a[a]<tool>$"),
        ("[u]a[a]b-[u]c", "[u]a[a]b$", ""),
        ("[u]c", "", ""),
    ],
)
def test_the_form_of_an_answer_that_is_not_the_last(text, alone, found):
    """Without the empty thought before a last answer."""
    assert written_in(text, alone) == found


def test_without_a_template_or_tokenizer(tokenizer):
    """They have different errors, and token ids always work."""
    assert text_of(tokenizer, "").chat_problem == "the model has no chat template"
    untried = TurnText(tokenizer, frozenset())
    assert untried.chat_problem == "the chat template was not tested"
    without = TurnText(None, frozenset())
    without.try_out()
    assert without.chat_problem == "the model has no tokenizer"
    with pytest.raises(NoChatTemplateError, match="no tokenizer"):
        without.encode_text("a", opens_session=True)
    assert Detokenizer(None, [1]).push(3) == ""


@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(alphabet="ab é東🙂\u0301\n", max_size=30))
def test_pieces_add_up_to_the_text_without_parts_of_characters(tokenizer, text):
    """Token by token; no piece has a replacement character."""
    detokenizer = Detokenizer(tokenizer, tokenizer("The answer: ").input_ids)
    pieces = [detokenizer.push(token) for token in tokenizer(text).input_ids]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_character_is_not_shown(tokenizer):
    """An answer that ends inside a character ends before it."""
    detokenizer = Detokenizer(tokenizer, [])
    token_ids = tokenizer("🙂🙂").input_ids
    assert "\ufffd" not in "".join(detokenizer.push(token) for token in token_ids[:-1])


def test_invalid_bytes_do_not_stop_the_text(tokenizer):
    """Stray bytes are given up after a while, and later text is shown."""
    stray = tokenizer("🙂").input_ids[-1]
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [detokenizer.push(stray) for _ in range(20)]
    pieces += [detokenizer.push(token) for token in tokenizer(" block").input_ids]
    assert "".join(pieces).endswith(" block")


def test_special_tokens_have_no_text(tokenizer):
    """The end-of-turn token adds nothing to the answer."""
    detokenizer = Detokenizer(tokenizer, [])
    assert [detokenizer.push(token) for token in [tokenizer.eos_token_id] * 3] == [""] * 3


def test_messages_begin_at_the_templates_special_token(tokenizer):
    """Found by trying the template; none if it opens messages with plain text."""
    start_id = tokenizer.convert_tokens_to_ids("<|start|>")
    frames = text_of(tokenizer).frame_tokens
    assert (frames.opening, frames.closing) == ({start_id}, {tokenizer.eos_token_id})
    plain = text_of(tokenizer, STRICT).frame_tokens
    assert (plain.opening, plain.closing) == (set(), {tokenizer.eos_token_id})
    assert text_of(tokenizer, "").frame_tokens.starts([start_id], b"\1") == []


def test_a_message_begins_with_its_first_special_token():
    """A question and the prompt for an answer each have their own."""
    tokenizer = make_tokenizer("byte_level")
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|><pad>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<think><pad>{% endif %}"
    )
    text = TurnText(tokenizer, frozenset())
    text.try_out()
    opening = {tokenizer.convert_tokens_to_ids(name) for name in ("<|start|>", "<think>")}
    assert text.frame_tokens.opening == opening


SYSTEM = {"role": "system", "content": "Be brief."}
BARE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'system' %}{{ '\n' }}{% else %}<|end|>{% endif %}{% endfor %}"
)
# The system message is part of the first question, as in several templates.
FOLDED = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}"
    "{% endif %}"
    "{% for m in rest %}<|start|>{{ m.role }}\n{{ system if loop.first else '' }}{{ m.content }}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (None, [user("What?")], ""),
        (None, [SYSTEM, user("What?")], "<|start|>system\nBe brief.<|end|>\n"),
        (None, [SYSTEM, SYSTEM, user("ping 7f3a")], "<|start|>system\nBe brief.<|end|>\n" * 2),
        (BARE, [SYSTEM, user("What?")], "Be brief.\n"),
        (FOLDED, [user("What?")], ""),
        (FOLDED, [SYSTEM, user("What?")], "<|start|>user\nBe brief.\n"),
        (STRICT, [SYSTEM, user("What?")], "[system]Be brief.<|end|>"),
        ("<|start|>" + STRICT, [user("What?")], ""),
        (STRICT, [{"role": "tool", "content": "x"}], ""),
        (STRICT, [{"role": "tool", "content": "a call, which it refuses"}], ""),
    ],
)
def test_the_system_message_comes_before_the_first_question(
    tokenizer, template, messages, expected
):
    """In whole frames; if it is part of the question, its own tokens."""
    text = text_of(tokenizer, template)
    if messages[0]["role"] == "tool":
        assert text.system_tokens(messages, [5, 6]) == 0
        return
    ids = text.encode_chat(messages, [])
    assert tokenizer.decode(ids[: text.system_tokens(messages, ids)]) == expected


def test_a_question_after_a_dropped_answer_closes_nothing(tokenizer):
    """It begins with its own frame."""
    text = text_of(tokenizer)
    closed = text.encode_chat([user("Is it?")], [7])
    opened = text.encode_chat([user("Is it?")], [7], continues_answer=False)
    assert tokenizer.decode(closed) == "<|end|>\n" + tokenizer.decode(opened)
    assert tokenizer.decode(opened).startswith("<|start|>user\nIs it?")
