"""Calls in the format of each family: read back, in pieces, cut off.

And texts that are no calls.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core.tools.formats import DEEPSEEK_MARKS, FORMATS, PLAIN
from inference_svc.core.tools.parts import collect_answer
from inference_svc.core.tools.reader import MAX_HEAD, read_whole
from tests.inference_svc.core.tools.written_calls import (
    FAMILIES,
    NAMES,
    calls_of,
    reader_of,
    writings,
    wrote,
)
from tests.sampled import examples

NO_OBJECTS = ("[1]", '"x"', "7", "null", "x", "")
NO_JSON = (
    '{"a": NaN}',
    '{"a": -Infinity}',
    '{"a": 1e999}',
    '{"a": 1, "a": 2}',
    '{"a": {"b": 1, "b": 1}}',
    '{"a": "\\ud800"}',
    '{"\\udfff": 1}',
    '{"a": ' + "9" * 5000 + "}",
    '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
    '{"a": ' + "[" * 5000,
    '{"a": 01}',
    "{'a': 1}",
    '{"a": 1,}',
    '{"a": "\\x"}',
    '{"a" 1}',
)
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)


def squeeze(text):
    """Return a text without the blanks allowed between calls."""
    return "".join(text.split()).replace(";", "").replace(",", "")


def in_pieces(reader, pieces):
    """Return the result of reading pieces."""
    return collect_answer([part for piece in pieces for part in reader.push(piece)] + reader.end())


@settings(max_examples=examples(300))
@given(writings())
def test_calls_round_trip(case):
    """Names and arguments, in order; earlier text stays, and nothing else."""
    before, writing, family = case
    answer = read_whole(reader_of(family), writing.text)
    assert calls_of(answer) == writing.calls
    assert answer.content == (before if before.strip() else "")


@settings(max_examples=examples(100))
@given(writings(), st.data())
def test_pieces_give_the_same_as_the_whole(case, data):
    """Wherever the answer is cut: at each character in two, in characters, in any pieces."""
    _, writing, family = case
    text = writing.text
    whole = read_whole(reader_of(family), text)
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]
    assert in_pieces(reader_of(family), pieces) == whole
    assert in_pieces(reader_of(family), text) == whole
    for cut in range(len(text)):
        assert in_pieces(reader_of(family), [text[:cut], text[cut:]]) == whole


@settings(max_examples=examples(100))
@given(writings())
def test_an_answer_that_is_cut_off_has_its_complete_calls(case):
    """The rest is text, all of it; it calls nothing, whatever it contains."""
    before, writing, family = case
    for cut in range(len(writing.text)):
        answer = read_whole(reader_of(family), writing.text[:cut])
        complete = [step for step in writing.steps if step.enough <= cut]
        assert calls_of(answer) == [call for step in complete for call in step.calls]
        end = min(complete[-1].end, cut) if complete else min(len(before), cut)
        left = squeeze(writing.text[end:cut])
        if complete and FAMILIES[family] == "deepseek" and DEEPSEEK_MARKS[-1].startswith(left):
            continue  # part of the last mark, or of the next: neither is text
        assert squeeze(answer.content) == squeeze(before[:cut]) + left


@settings(max_examples=examples(100))
@given(writings())
def test_unknown_tools_are_not_called(case):
    """The text is as the model wrote it."""
    _, writing, family = case
    answer = read_whole(reader_of(family, names=("other",)), writing.text)
    assert (answer.content, answer.calls) == (writing.text, ())
    assert in_pieces(reader_of(family, names=("other",)), writing.text) == answer


@families
@pytest.mark.parametrize("arguments", NO_OBJECTS + NO_JSON, ids=lambda text: text[:20] or "none")
def test_arguments_that_are_no_object_are_text(family, arguments):
    """However far they can be parsed."""
    text = wrote(family, [("weather", "HERE")]).text.replace('"HERE"', arguments)
    answer = read_whole(reader_of(family), text)
    assert (answer.content, answer.calls) == (text, ())


@families
def test_arguments_may_be_json_in_a_string(family):
    """Models write them so where the arguments are a member of an object."""
    text = wrote(family, [("weather", '{"a": "b"}')]).text
    answer = read_whole(reader_of(family), text)
    has_header = family.__name__ in {"mistral_named", "deepseek_v3", "deepseek_v31"}
    assert calls_of(answer) == ([] if has_header else [("weather", {"a": "b"})])


@families
@pytest.mark.parametrize("most", [0, 1, 2])
def test_surplus_calls_are_dropped(family, most):
    """They are no text either."""
    calls = [("weather", {"a": 1}), ("get_time", {}), ("weather", {"a": 2})]
    answer = read_whole(reader_of(family, most_calls=most), wrote(family, calls).text)
    assert (answer.content, calls_of(answer)) == ("", calls[:most])


@families
@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("weather", None),  # cut
        ("nobody", '"'),
        ("weather", '\\q"'),  # not JSON
        ("weather", '" "b"'),
        ("weather", '", "b": NaN, "c": ""'),
        ("weather", '", "a": ""'),
    ],
)
def test_a_call_inside_an_invalid_one_is_text(family, name, rest):
    """A quoted text must not become a call."""
    inner = json.dumps(wrote(family, [("get_time", {})]).text)[:-1]
    text = wrote(family, [(name, {"a": "HERE"})]).text.replace('"HERE"', f"{inner}{rest}")
    if rest is None:
        text = text[: text.index(inner) + len(inner)]
    answer = read_whole(reader_of(family), text)
    assert (answer.content, answer.calls) == (text, ())
    assert in_pieces(reader_of(family), text) == answer


@families
@settings(max_examples=examples(60))
@given(
    text=st.lists(
        st.sampled_from([*'<{["|tn:_ \n;,', "tool_c", "[TOOL_CALLS", DEEPSEEK_MARKS[0][:-1]])
    ).map("".join)
)
def test_text_is_unchanged_and_not_withheld(family, text):
    """Except a possible beginning of a call: part of a mark, or of an object."""
    reader = reader_of(family)
    said = collect_answer([part for character in text for part in reader.push(character)]).content
    held = collect_answer(reader.end()).content
    assert said + held == text
    starts = [*FORMATS[FAMILIES[family]].marks, '{"name":', '{"type":']
    assert any(start.startswith("".join(held.split())) for start in starts)


@families
def test_text_about_calls_is_not_withheld(family):
    """Names of marks, and similar text, in prose and in code."""
    for text in (
        "a < b and {c} or [d]",
        '{"a": 1, "b": [2]} is JSON',
        '<tool_call> is a "tag", as <b> is',
        "[TOOL_CALLS] [see there] is a mark",
        "<|python_tag|> print(1)",
        f"{DEEPSEEK_MARKS[0]} is another mark",
        "<|python_tag|>{'a': 1}",
        f"{DEEPSEEK_MARKS[0]}{DEEPSEEK_MARKS[1]} `x` {{",
    ):
        reader = reader_of(family)
        assert collect_answer(reader.push(text)).content == text
        assert reader.end() == []


@families
def test_text_behind_a_call_is_shown(family):
    """And another call may follow it."""
    first, second = (wrote(family, [(name, {"a": 1})]).text for name in NAMES[:2])
    answer = read_whole(reader_of(family), f"{first} and then {second}")
    assert answer.calls[0].name == NAMES[0]
    assert answer.content.lstrip(" ").startswith("and then ")


@pytest.mark.parametrize("start", ["[TOOL_CALLS]", "".join(DEEPSEEK_MARKS[:2])])
def test_the_length_of_a_header_is_limited(start):
    """Longer ones are text, at once: a model may write a mark by accident."""
    name = next(name for name, made in FORMATS.items() if made.marks[0] in start)
    reader = FORMATS[name].reader(NAMES, None)
    held = start + "x" * (MAX_HEAD - 1)
    assert reader.push(held) == []
    assert collect_answer(reader.push("y")).content == f"{held}y"
    long = start + "x" * MAX_HEAD + "[ARGS]{}"
    assert read_whole(FORMATS[name].reader(("x" * MAX_HEAD,), None), long).content == long


CALL = ("weather", {"city": "Bern"})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_the_first_format_that_reads_a_call_is_its_own(family):
    """So the format of a model can be found by trying them."""
    text = wrote(family, [CALL]).text
    read = [
        name for name, made in FORMATS.items() if read_whole(made.reader(NAMES, None), text).calls
    ]
    assert read[0] == (FAMILIES[family] if family.__name__ != "plain_json" else "llama3")
    assert FAMILIES[family] in read


def test_names_are_those_of_the_formats():
    """Plain JSON is tried last."""
    assert [made.name for made in FORMATS.values()] == list(FORMATS)
    assert list(FORMATS)[-1] == "json"


def test_the_text_format_reads_no_calls():
    """All is text."""
    text = "".join(wrote(family, [CALL]).text for family in FAMILIES)
    answer = read_whole(PLAIN.reader(NAMES, None), text)
    assert (answer.content, calls_of(answer)) == (text, [])
    assert PLAIN.reader(NAMES, None).push("") == []
    assert PLAIN.marks == ()
