"""JSON that is normalised while it streams."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core.json_stream import MAX_DEPTH, MAX_DIGITS, JsonStream, close_object
from tests.inference_svc.core.tools.written_calls import texts, values
from tests.sampled import examples

objects = st.dictionaries(texts, values, max_size=4)


def rewritten(pieces):
    """Return what a stream writes for pieces, and what it has not read."""
    stream, written, left = JsonStream(), "", ""
    for piece in pieces:
        more, length = stream.push(piece)
        written += more
        left += piece[length:]
    return written, left, stream


@settings(max_examples=examples(200))
@given(
    value=objects,
    indent=st.sampled_from([None, 1]),
    is_ascii=st.booleans(),
    rest=st.sampled_from(["", "}", "\n</tool_call>", "{"]),
    data=st.data(),
)
def test_an_object_is_normalised(value, indent, is_ascii, rest, data):
    """However it was written and cut; text behind it is not read."""
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii) + rest
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for way in (pieces, list(text), [text]):
        written, left, stream = rewritten(way)
        assert (written, left) == (json.dumps(value, ensure_ascii=False), rest)
        assert stream.is_complete


@settings(max_examples=examples(200))
@given(value=objects, data=st.data())
def test_an_incomplete_object_can_be_closed(value, data):
    """It has the complete members, and nothing invented."""
    text = json.dumps(value)
    written, _, _ = rewritten([text[: data.draw(st.integers(0, len(text) - 1))]])
    whole = json.loads(close_object(written))
    assert set(whole) <= set(value)
    assert list(whole) == list(value)[: len(whole)]
    for name in list(whole)[:-1]:
        assert whole[name] == value[name]
    assert json.dumps(value, ensure_ascii=False).startswith(written)


@settings(max_examples=examples(300))
@given(st.text('{}[]":,\\utrnalse0.e-+ \n', max_size=40).map('{"a": '.__add__))
def test_the_output_is_json(text):
    """It is the same at once and character by character; broken input adds nothing."""
    written, left, stream = rewritten(list(text))
    assert rewritten([text])[0] == written
    if stream.is_complete:
        assert json.loads(written) == json.loads(json.dumps(json.loads(written)))
        assert text.endswith(left)
    assert isinstance(json.loads(close_object(written)), dict)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('{"a": 1, "a": [2, {"b": 3}], "c": 4, "a": 5}', '{"a": 1, "c": 4}'),
        ('{"a": "\\ud83d\\ude00 \\ud83d \\ude00\\ud83d\\n"}', '{"a": "😀 \ufffd \ufffd\ufffd\\n"}'),
        ('{"a": "\\u00e9\\/\\u0001"}', '{"a": "é/\\u0001"}'),
        ('{"a": 1e2, "b": -0, "c": 1E999, "d": 1.50}', '{"a": 100.0, "b": 0, "c": null, "d": 1.5}'),
        ('{"a": ' + "1" * (MAX_DIGITS + 1) + "}", '{"a": null}'),
        ('{"a":[],"b":{},"c":[[]]}', '{"a": [], "b": {}, "c": [[]]}'),
        (
            '{"a":' + "[" * MAX_DEPTH + '{"a": "b", "a": 1}' + "]" * MAX_DEPTH + ',"b":1}',
            '{"a": ' + "[" * (MAX_DEPTH - 1) + "null" + "]" * (MAX_DEPTH - 1) + ', "b": 1}',
        ),
    ],
)
def test_lenient_input_is_written_strictly(text, written):
    """Values that programs could not read are written so that they can."""
    assert rewritten(list(text))[:2] == (written, "")
    assert json.loads(written) is not None


@pytest.mark.parametrize(
    "text", ["[1]", "x", '{"a" 1}', '{"a": 1,}', '{"a": [1,]}', "{1: 2}", '{"a": }', '{"a": 1]']
)
def test_other_values_are_broken(text):
    """Earlier output stays."""
    _, left, stream = rewritten([text, "more"])
    assert (stream.is_broken, stream.is_complete, left) == (True, False, "")


def test_strings_are_written_as_they_come():
    """Except for an incomplete escape, or half a character."""
    stream = JsonStream()
    said = [stream.push(piece)[0] for piece in ['{"wo', 'rd": "tü', "ü", "\\", "n", "\\ud83d", "r"]]
    assert said == ["{", '"word": "tü', "ü", "", "\\n", "", "\ufffdr"]
    assert close_object("".join(said)) == "{}"
