"""Answers as they are read: their parts, in order, and summed up.

An answer that has to be a call is shown as it comes: every format's, wherever it is cut.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core.chat import ToolCall
from inference_svc.core.json_stream import close_object
from inference_svc.core.tools.formats import FORMATS, HERMES, Hermes
from inference_svc.core.tools.parts import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    collect_answer,
)
from inference_svc.core.tools.reader import ForcedReader, MarkedReader, read_whole
from tests.inference_svc.core.tools.written_calls import (
    FAMILIES,
    NAMES,
    calls_of,
    hermes_turned,
    reader_of,
    texts,
    values,
    wrote,
)
from tests.sampled import examples

CALL = '<tool_call>{"name": "a"}</tool_call>'
MADE = ToolCall("a", "{}")


def test_parts_keep_their_order():
    """Adjacent texts are one part."""
    reader = MarkedReader(HERMES, ("a",))
    assert reader.push(f"<b {CALL} {CALL}<tool_call>") == [Content("<b "), MADE, MADE]
    assert reader.push("?<tool_call>, not said") == [Content("<tool_call>?<tool_call>, not said")]
    assert reader.push(f"{CALL}\n") == [MADE]
    assert reader.end() == []


def test_blanks_beside_calls_are_dropped():
    """But not without calls, or beside other text."""
    for text, content in (
        (f"\n {CALL}\n {CALL}\n", ""),
        (" \n", " \n"),
        (f"\n x\n{CALL}", "\n x\n"),
        (f"{CALL}\n x", "\n x"),
        ("", ""),
    ):
        assert read_whole(MarkedReader(HERMES, ("a",)), text).content == content


class Counting(Hermes):
    """Counts how many characters it reads."""

    num_read = 0

    def read(self, text, *, is_end):
        type(self).num_read += len(text)
        return super().read(text, is_end=is_end)


@pytest.mark.parametrize("item", ["1", '"b c\\\\ d"', '{"b": [{}]}', "[[]]"])
def test_a_long_call_is_not_read_again_with_each_piece(item):
    """The total work is linear in the length, not quadratic."""
    text = f'<tool_call>{{"name": "a", "arguments": {{"b": [{", ".join([item] * 4000)}]}}}}'
    Counting.num_read = 0
    reader = MarkedReader(Counting("a", ("<tool_call>",), marks=HERMES.marks), ("a",))
    assert all(reader.push(text[at : at + 3]) == [] for at in range(0, len(text), 3))
    assert len(reader.push("</tool_call>")) == 1
    assert Counting.num_read < 20 * len(text)


def test_invalid_calls_are_released_soon():
    """Once an eighth of the withheld text was added."""
    reader = MarkedReader(HERMES, ("a",))
    text = '<tool_call>{"name": ' + '"a", ' * 100
    said = "".join(part.text for character in text for part in reader.push(character))
    assert said == text[: len(said)]
    assert len(said) > len(text) - 11


objects = st.dictionaries(texts, values, max_size=3)
NAME_FIRST = sorted(set(FAMILIES) - {hermes_turned}, key=lambda family: family.__name__)


def heads_of(family):
    """What stands before the arguments, for each name."""
    marked = "\0"
    written = {name: wrote(family, [(name, {marked: 1})]).text for name in NAMES}
    return {name: text.split('{"\\u0000"')[0] for name, text in written.items()}


def forced(family):
    return ForcedReader(heads_of(family), reader_of(family))


def test_every_format_is_tried():
    """But for gpt-oss's, which `test_tool_template.py` has with the heads of its template."""
    assert {FAMILIES[family] for family in NAME_FIRST} == set(FORMATS) - {"gpt-oss"}


@settings(max_examples=examples(200))
@given(
    family=st.sampled_from(NAME_FIRST),
    name=st.sampled_from(NAMES),
    arguments=objects,
    data=st.data(),
)
def test_pieces_are_the_whole(family, name, arguments, data):
    """The name comes first; joined, the arguments are those that the format's own reader finds."""
    text = wrote(family, [(name, arguments)]).text
    cut = data.draw(st.integers(0, len(text)))
    reader = forced(family)
    parts = [part for character in text[:cut] for part in reader.push(character)] + reader.end()
    assert collect_answer(parts) == read_whole(forced(family), text[:cut])
    head = len(heads_of(family)[name])
    if cut < head:
        assert not any(isinstance(part, CallBegun) for part in parts)
        return
    begun, *pieces, ended = parts
    assert begun == CallBegun(name)
    assert ended == CallEnded(is_cut=(len(pieces) > 0 and not _is_json(pieces)) or not pieces)
    said = "".join(piece.text for piece in pieces)
    assert json.dumps(arguments, ensure_ascii=False).startswith(said)
    if cut == len(text):
        assert calls_of(collect_answer(parts)) == calls_of(read_whole(reader_of(family), text))
        assert said == json.dumps(arguments, ensure_ascii=False)
    (call,) = collect_answer(parts).calls
    assert call.values == json.loads(close_object(said))


def _is_json(pieces):
    try:
        json.loads("".join(piece.text for piece in pieces))
    except ValueError:
        return False
    return True


def test_arguments_come_as_they_are_written():
    """Each token's as soon as it is there."""
    reader = ForcedReader({"go": '{"name": "go", "arguments": '}, reader_of(NAME_FIRST[0]))
    said = [
        reader.push(text)
        for text in ('{"name": "go", ', '"arguments": ', '{"a": "x', "y", '", "b"', ": 12", "}}")
    ]
    assert said == [
        [],
        [CallBegun("go")],
        [CallArguments('{"a": "x')],
        [CallArguments("y")],
        [CallArguments('", "b": ')],
        [],
        [CallArguments("12}"), CallEnded()],
    ]
    assert reader.end() == []


@pytest.mark.parametrize("text", ["It rains.", '<tool_call>{"name": "x', "", " ", "<tool_call>"])
def test_what_is_no_such_call_is_read_otherwise(text):
    """As ever: nothing of it is lost."""
    reader = ForcedReader(
        {"go": '<tool_call>\n{"name": "go", '}, FORMATS["hermes"].reader(NAMES, 1)
    )
    parts = [part for character in text for part in reader.push(character)] + reader.end()
    assert "".join(part.text for part in parts if isinstance(part, Content)) == text
    assert collect_answer(parts).calls == ()
