"""The parts of an answer, joined; bound calls are shown as they stream.

Of every format, wherever the answer is cut.
"""

import json

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from inference_svc.core.chat import ToolCall
from inference_svc.core.tools.formats import DEEPSEEK_MARKS, FORMATS
from inference_svc.core.tools.harmony import HarmonyReader
from inference_svc.core.tools.parts import (
    END_OF_OBJECT,
    MAX_CLOSING,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    OpenCall,
    Reasoning,
    collect_answer,
    is_open,
    merge_texts,
    num_pending,
    with_whole_calls,
)
from inference_svc.core.tools.reader import read_whole
from tests.inference_svc.core.tools.written_calls import (
    FAMILIES,
    NAMES,
    calls_of,
    hermes_turned,
    mistral,
    plain_json,
    reader_of,
    texts,
    values,
    writings,
    wrote,
)
from tests.sampled import examples

objects = st.dictionaries(texts, values, max_size=3)
MADE = ToolCall("a", "{}")
NAME_FIRST = sorted(set(FAMILIES) - {hermes_turned}, key=lambda family: family.__name__)
HARMONY = (
    "<|channel|>analysis<|message|>It wants rain.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
    '<|message|> {"city": "Bern <|end|>"}\n<|call|>'
    "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>"
    "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
)


def parts_of(reader, pieces):
    """Return the parts of an answer that comes in pieces."""
    return merge_texts([part for piece in pieces for part in reader.push(piece)] + reader.end())


def test_an_answer_is_summarised():
    """By kind, each in order."""
    parts = [Content("a"), Reasoning("b"), MADE, Content("c"), Reasoning("d")]
    found = collect_answer(parts)
    assert (found.content, found.reasoning, found.calls) == ("ac", "bd", (MADE,))


def test_pieces_of_a_call_are_joined():
    """With its id; also of one that was cut."""
    pieces = [CallArguments('{"b"'), CallArguments(": 1")]
    parts = [CallBegun("a", "c1"), *pieces, CallEnded(is_cut=True), Content("x")]
    assert list(with_whole_calls(parts)) == [
        ToolCall("a", '{"b": 1', "c1", is_cut=True),
        Content("x"),
    ]


def test_adjacent_texts_of_a_kind_are_joined():
    """Of a kind."""
    parts = [Content("a"), Content("b"), Reasoning("c"), Reasoning("d"), MADE, Content("e")]
    assert merge_texts(parts) == [Content("ab"), Reasoning("cd"), MADE, Content("e")]


def test_every_format_has_bound_calls():
    """That is, its closing marks are known."""
    assert all(made.closings for made in FORMATS.values())


@settings(max_examples=examples(300))
@given(drawn=writings(tuple(NAME_FIRST)), data=st.data())
def test_a_whole_answer_is_read_as_if_unbound(drawn, data):
    """Its texts and calls in order: with any blanks, in any pieces, some or all shown."""
    _, writing, family = drawn
    most_calls = data.draw(st.none() | st.integers(1, 3))
    wanted = read_whole(reader_of(family, NAMES, most_calls), writing.text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(writing.text)), max_size=6)))
    pieces = [
        writing.text[start:end]
        for start, end in zip([0, *cuts], [*cuts, len(writing.text)], strict=True)
    ]
    for found in (pieces, writing.text, [writing.text]):
        reader = reader_of(family, NAMES, most_calls, is_bound=True)
        parts = parts_of(reader, found)
        assert calls_of(collect_answer(parts)) == calls_of(wanted)
        assert collect_answer(parts).content == wanted.content
        assert is_open(reader.last_call) is None


@settings(max_examples=examples(300))
@given(
    family=st.sampled_from(NAME_FIRST),
    name=st.sampled_from(NAMES),
    arguments=objects,
    data=st.data(),
)
def test_pieces_add_up_to_the_whole(family, name, arguments, data):
    """Also where it is cut: arguments are shown as they are written, and none before the name."""
    text = wrote(family, [(name, arguments)]).text
    cut = data.draw(st.integers(0, len(text)))
    reader = reader_of(family, is_bound=True)
    parts = parts_of(reader, text[:cut])
    assert collect_answer(parts) == read_whole(reader_of(family, is_bound=True), text[:cut])
    brace = wrote(family, [(name, {"\0": 1})]).text.index('{"\\u0000')
    if cut <= brace:
        assert not collect_answer(parts).calls
        return
    begun, *pieces, ended = parts
    assert begun == CallBegun(name)
    said = "".join(piece.text for piece in pieces)
    assert json.dumps(arguments, ensure_ascii=False).startswith(said)
    is_whole = said == json.dumps(arguments, ensure_ascii=False)
    assert ended == CallEnded(is_cut=not is_whole)
    assert is_whole or cut < len(text)


@example(end=len(HARMONY), size=len(HARMONY))
@given(end=st.integers(0, len(HARMONY)), size=st.integers(1, 9))
def test_answers_of_gpt_oss(end, size):
    """Texts, thoughts and calls in order; a mark spelled in an argument belongs to it."""
    text = HARMONY[:end]
    reader = HarmonyReader(NAMES, is_bound=True)
    parts = parts_of(reader, [text[at : at + size] for at in range(0, end, size)])
    whole = read_whole(HarmonyReader(NAMES, is_bound=True), text)
    assert collect_answer(parts) == whole
    if end == len(HARMONY):
        assert calls_of(whole) == [("weather", {"city": "Bern <|end|>"}), ("get_time", {})]
        assert (whole.reasoning, whole.content) == ("It wants rain.", "Let me see.It rains.")


def test_text_behind_a_call_of_gpt_oss():
    """Blanks are dropped; anything else is text."""
    text = "to=functions.get_time<|message|>{} \n so<|call|>"
    answer = read_whole(HarmonyReader(NAMES, is_bound=True), text)
    assert (answer.content, calls_of(answer)) == ("so", [("get_time", {})])
    one = read_whole(HarmonyReader(NAMES, 1, is_bound=True), HARMONY)
    assert [name for name, _ in calls_of(one)] == ["weather"]


def test_arguments_are_streamed_as_they_are_written():
    """Each token's as soon as it exists, of every call; text in between is text."""
    reader = FORMATS["hermes"].reader(NAMES, is_bound=True)
    pieces = ["Well. <tool", '_call>\n{"name": "wea', 'ther", "arguments":', " {", '"a": "x']
    assert [reader.push(piece) for piece in pieces] == [
        [Content("Well. ")],
        [],
        [],
        [CallBegun("weather"), CallArguments("{")],
        [CallArguments('"a": "x')],
    ]
    assert is_open(reader.last_call).name == "weather"
    assert [reader.push(piece) for piece in ("y", '"}', "}\n</tool_", "call>", " So.")] == [
        [CallArguments("y")],
        [CallArguments('"}'), CallEnded()],
        [],
        [],
        [Content(" So.")],
    ]
    assert reader.end() == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'One writes <tool_call>, {"name": "weather", "arguments": {'),
        ("hermes", '<tool_call>{"name": "fly", "arguments": {"a": 1'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": [1'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{'),
        ("mistral", "[TOOL_CALLS]fly[ARGS]{"),
        ("llama3", 'So: {"name": "weather", "parameters": {'),
        ("json", '{"type": "function", "function": {"name": "weather", "arguments": {'),
        ("gpt-oss", "to=functions.fly<|message|>{"),
        ("gpt-oss", "to=functions.weather<|message|>["),
    ],
)
def test_uncertain_calls_are_withheld_or_text(name, text):
    """A client gets no call that may turn out to be none."""
    reader = FORMATS[name].reader(NAMES, is_bound=True)
    parts = parts_of(reader, text)
    assert collect_answer(parts) == read_whole(FORMATS[name].reader(NAMES), text)
    assert not collect_answer(parts).calls


def test_a_broken_list_of_calls():
    """Shown calls stay; the rest is text."""
    section, begin, separator, end, section_end = DEEPSEEK_MARKS
    calls = f"{section}{begin}weather{separator}{{}}{end}"
    for name, text, content in (
        ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {}}, no', ", no"),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {}} ,', " ,"),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {}}]]', "]"),
        ("deepseek", calls + " " + section_end[:5], ""),
        ("deepseek", calls + section_end[:5] + "d", section_end[:5] + "d"),
        ("deepseek", calls + "\n" + section_end + "So.", "So."),
    ):
        for pieces in (text, [text]):
            answer = collect_answer(parts_of(FORMATS[name].reader(NAMES, is_bound=True), pieces))
            assert (answer.content, calls_of(answer)) == (content, [("weather", {})])


def test_a_list_ends_at_an_unknown_tool():
    """The rest of it is text."""
    writing = wrote(mistral, [("weather", {"a": 1}), ("fly", {})])
    answer = read_whole(reader_of(mistral, is_bound=True), writing.text)
    assert calls_of(answer) == [("weather", {"a": 1})]
    assert answer.content.startswith(', {"name": "fly"')


def test_what_closes_a_call():
    """Marks behind blanks; text behind them is not the call's, and other text is not withheld."""
    closing = (END_OF_OBJECT, "</t>")
    call = OpenCall("a", closing)
    assert call.push('{"b": 1} , "id": "c"\n}') == [CallArguments('{"b": 1}'), CallEnded()]
    assert not call.is_over
    assert call.push(" </t> x") == []
    assert (call.is_over, call.rest, call.begun, call.end()) == (
        True,
        " x",
        '{"b": 1} , "id": "c"\n}',
        [],
    )
    assert call.push("y") == []
    call = OpenCall("a", closing)
    call.push("{}}")
    call.push("x" * MAX_CLOSING)
    assert (call.is_over, call.rest) == (True, "x" * MAX_CLOSING)
    assert OpenCall("a").end() == [CallEnded(is_cut=True)]


def test_several_calls_without_a_mark():
    """Each is shown as it streams."""
    writing = wrote(plain_json, [("weather", {"a": [1]}), ("get_time", {}), ("weather", {})])
    parts = parts_of(reader_of(plain_json, is_bound=True), writing.text)
    assert calls_of(collect_answer(parts)) == writing.calls


@given(text=st.text("abc", max_size=8), marks=st.lists(st.text("abc", min_size=1, max_size=4)))
def test_the_open_end_of_a_text(text, marks):
    """As many characters as begin a mark that is not complete: the most there are."""
    assume(not any(mark in text for mark in marks))
    begun = [mark[:length] for mark in marks for length in range(len(mark))]
    ends = [len(begin) for begin in begun if text.endswith(begin)]
    assert num_pending(text, marks) == max(ends, default=0)
