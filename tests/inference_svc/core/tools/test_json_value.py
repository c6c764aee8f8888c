"""JSON in an answer that may be incomplete, and calls of it."""

import json
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core.tools.json_value import (
    Nesting,
    NoCallError,
    RequestedCall,
    make_call,
    read_value,
    requested_call,
    skip_blanks,
)
from tests.inference_svc.core.tools.written_calls import texts, values
from tests.sampled import examples

objects = st.dictionaries(texts, values, max_size=3)


@settings(max_examples=examples(200))
@given(
    value=objects | st.lists(values, max_size=3),
    indent=st.sampled_from([None, 1]),
    blanks=st.text(" \n\r\t", max_size=12),
    rest=st.sampled_from(["", "}", " x", "{"]),
    is_ascii=st.booleans(),
)
def test_a_value_is_complete_at_its_last_character(value, indent, blanks, rest, is_ascii):
    """Not before, wherever it is cut; text behind it is not read."""
    options = {
        "indent": indent,
        "ensure_ascii": is_ascii,
        "separators": (f",{blanks}", f":{blanks}"),
    }
    text = "ab" + blanks + json.dumps(value, **options)
    for cut in range(2, len(text)):
        assert read_value(text[:cut], 2, "{[") is None
    assert read_value(text + rest, 2, "{[") == (value, len(text))


@settings(max_examples=examples(200))
@given(text=st.text('{}[]":,\\utrnael0.e-+ \n', max_size=40).map('{"a": '.__add__))
def test_invalid_text_stays_invalid(text):
    """Growing prefixes give none, then perhaps a value or an error, and no change after that."""
    known = []
    for cut in range(1, len(text) + 1):
        try:
            found = read_value(text[:cut], 0)
        except NoCallError as error:
            found = error.end
            assert 0 <= found < cut
        known.append(found)
    assert all(before in (None, after) for before, after in pairwise(known))


@given(value=objects, indent=st.sampled_from([None, 1]), sizes=st.lists(st.integers(1, 9)))
def test_an_object_is_open_up_to_its_last_character(value, indent, sizes):
    """Whatever its strings contain, and whatever its pieces are."""
    text = "[x] " + json.dumps(value, indent=indent)
    nesting = Nesting()
    assert not nesting.is_open(text[:4])
    ends = [end for end in accumulate(sizes, initial=5) if end < len(text)]
    assert all(nesting.is_open(text[:end]) for end in ends)
    assert not nesting.is_open(text)


def test_an_escape_may_be_cut():
    """The next character belongs to it."""
    nesting = Nesting()
    assert nesting.is_open('{"a": "\\')
    assert nesting.is_open('{"a": "\\"}')
    assert nesting.is_open('{"a": "\\"}\\\\')
    assert not nesting.is_open('{"a": "\\"}\\\\"}')


def test_an_error_has_the_position():
    """No value can begin before it."""
    for text, end in (("  x", 2), ('"{}"', 0), ("[1]", 0), ('{"a": "b" "c": 1, 2}', 10)):
        with pytest.raises(NoCallError) as raised:
            read_value(text, 0)
        assert raised.value.end == end


def test_an_incomplete_escape_is_waited_for():
    """The characters of an escape, of a word and of a number come one by one."""
    for text in ('{"a": "\\', '{"a": "\\ud83d\\ude', '{"a": tru', '{"a": -', '{"a": -Infinit'):
        assert read_value(text, 0) is None
    with pytest.raises(NoCallError):
        read_value('{"a": "\\q and more', 0)
    with pytest.raises(NoCallError):
        read_value('{"a": truth and more', 0)


def test_line_breaks_in_strings_are_accepted():
    """Models write them, although JSON does not allow it."""
    call = make_call(RequestedCall("a", '{"text": "one\ntwo\tthree"}'))
    assert call.values == {"text": "one\ntwo\tthree"}
    assert "\n" not in call.arguments


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        ({"name": "a", "arguments": {"b": 1}}, ("a", {"b": 1})),
        ({"name": "a", "parameters": {"b": 1}}, ("a", {"b": 1})),
        ({"name": "a"}, ("a", {})),
        ({"type": "function", "function": {"name": "a", "arguments": "{}"}}, ("a", "{}")),
        ({"name": "a", "function": "b"}, ("a", {})),
        ({"arguments": {}}, (None, {})),
        ([], (None, None)),
        ("a", (None, None)),
    ],
)
def test_names_and_arguments_of_an_object(value, asked):
    """By the members that models write."""
    assert requested_call(value) == asked


@given(name=st.text(max_size=3), arguments=objects, is_text=st.booleans())
def test_a_call_has_its_arguments_as_json(name, arguments, is_text):
    """Whether they came as an object or in a string; characters are not escaped."""
    call = make_call(RequestedCall(name, json.dumps(arguments) if is_text else arguments))
    assert (call.name, call.values, call.call_id) == (name, arguments, "")
    assert call.arguments == json.dumps(arguments, ensure_ascii=False)


@pytest.mark.parametrize(
    "asked",
    [
        RequestedCall(None, {}),
        RequestedCall(7, {}),
        RequestedCall("a", None),
        RequestedCall("a", [{}]),
        RequestedCall("a", "{} {}"),
        RequestedCall("a", "{"),
        RequestedCall("a", ""),
        RequestedCall("a", {"b": float("nan")}),
        RequestedCall("a", {"b": "\ud800"}),
        RequestedCall("a", {"b": object()}),
    ],
)
def test_what_is_no_call(asked):
    """An invalid name, and arguments that are no JSON object."""
    with pytest.raises(NoCallError):
        make_call(asked)


def test_blanks_are_those_of_json():
    """No other character is skipped."""
    assert skip_blanks(" \t\r\nx ", 0) == 4
    assert skip_blanks("\u00a0", 0) == 0
    assert skip_blanks("  ", 1) == 2
