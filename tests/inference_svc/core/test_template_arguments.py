"""Arguments of chat templates: which are allowed, and their size."""

import json

import pytest

from inference_svc.core.errors import InvalidTurnError
from inference_svc.core.template_arguments import (
    MAX_ARGUMENTS,
    MAX_CHARACTERS,
    MAX_DEPTH,
    canonical_arguments,
    check_arguments,
    effort_arguments,
    parse_arguments_setting,
    read_arguments,
)


def nest(depth):
    """Nest a list in so many lists."""
    return json.loads("[" * depth + "]" * depth)


def test_allowed_arguments():
    """Names of letters, values of JSON; with limits of number, depth and length."""
    for arguments in (
        {},
        {"enable_thinking": False, "documents": [{"title": "a", "text": None}], "x1": 1.5},
        {f"name_{number}": number for number in range(MAX_ARGUMENTS)},
        {"deep": nest(MAX_DEPTH - 1)},
        {"long": "x" * (MAX_CHARACTERS - len('{"long":""}'))},
    ):
        check_arguments(arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"messages": []}, "sets the chat template's argument 'messages': leave it out"),
        ({"tools": []}, "sets the chat template's argument 'tools'"),
        ({"chat_template": "{{ 1 }}"}, "sets the chat template's argument 'chat_template'"),
        ({"add_generation_prompt": False}, "the service itself sets"),
        ({"eos_token": "x"}, "sets the chat template's argument 'eos_token'"),
        ({"extra_special_tokens": []}, "the service itself sets"),
        ({"strftime_now": "x"}, "the service itself sets"),
        ({"": 1}, "'' is not a valid name"),
        ({"_x": 1}, "'_x' is not a valid name"),
        ({"a-b": 1}, "'a-b' is not a valid name"),
        ({"x" * 65: 1}, "is not a valid name .*: send up to 64 letters, digits and underscores"),
        ({f"name_{number}": 1 for number in range(MAX_ARGUMENTS + 1)}, "too many"),
        (
            {"deep": nest(MAX_DEPTH)},
            "nested too deeply: send at most 64 arguments, of at most 16 levels",
        ),
        ({"long": "x" * MAX_CHARACTERS}, "too long: send at most 16384 characters"),
        ({"x": float("nan")}, "not JSON"),
        ({"x": {1, 2}}, "not JSON"),
    ],
)
def test_refused_arguments(arguments, said):
    """In one line, with a remedy."""
    with pytest.raises(InvalidTurnError, match=said) as refused:
        check_arguments(arguments)
    assert "\n" not in str(refused.value)


def test_equal_arguments_have_equal_texts():
    """In any order; without arguments the text is empty."""
    text = canonical_arguments({"b": [1, {"d": 2, "c": "é"}], "a": None})
    assert text == '{"a":null,"b":[1,{"c":"é","d":2}]}'
    assert canonical_arguments({"a": None, "b": [1, {"c": "é", "d": 2}]}) == text
    assert canonical_arguments({}) == ""
    assert read_arguments(text) == {"a": None, "b": [1, {"c": "é", "d": 2}]}
    assert read_arguments("") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "not an object"),
        ("{", "not JSON"),
        ("[" * 10000, "not JSON"),
        (" " * (MAX_CHARACTERS + 1), "too long"),
    ],
)
def test_a_text_that_is_no_object_is_refused(text, said):
    """An overlong one is refused before it is parsed."""
    with pytest.raises(InvalidTurnError, match=said):
        read_arguments(text)


def test_an_operator_writes_a_table_or_its_text():
    """An invalid value is a problem of the setting."""
    assert parse_arguments_setting({"style": "x"}) == {"style": "x"}
    assert parse_arguments_setting('{"style": 1}') == {"style": 1}
    for wrong in ({"tools": []}, '{"tools": []}', "style"):
        with pytest.raises(ValueError, match=r"template's arguments? "):
            parse_arguments_setting(wrong)
    assert parse_arguments_setting(7) == 7  # whose type is refused as any other's


def test_an_effort_of_none_disables_thoughts():
    """Whatever the template's argument is called."""
    assert effort_arguments(None) == {}
    assert effort_arguments("high") == {"reasoning_effort": "high"}
    assert effort_arguments("none") == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "thinking": False,
    }
