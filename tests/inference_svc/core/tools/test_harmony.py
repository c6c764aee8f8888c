"""Answers of gpt-oss: thoughts, text and calls."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.core.tools.harmony import BODY, MAX_HEADER, HarmonyReader
from inference_svc.core.tools.parts import ReadAnswer, collect_answer
from inference_svc.core.tools.reader import read_whole
from tests.inference_svc.core.tools.written_calls import NAMES, calls_of, values
from tests.sampled import examples

ANALYSIS = "<|channel|>analysis<|message|>It wants rain.<|end|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
    '<|message|>{"city": "Bern"}<|call|>'
)
EARLY = "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"


def read(text, names=NAMES, most_calls=None):
    """Read a whole answer; check that its pieces give the same."""
    whole = read_whole(HarmonyReader(names, most_calls), text)
    for cut in range(len(text)):
        reader = HarmonyReader(names, most_calls)
        assert (
            collect_answer([*reader.push(text[:cut]), *reader.push(text[cut:]), *reader.end()])
            == whole
        )
    reader = HarmonyReader(names, most_calls)
    assert (
        collect_answer([p for character in text for p in reader.push(character)] + reader.end())
        == whole
    )
    return whole


def test_all_parts_of_an_answer():
    """Thoughts, texts, and calls in order; names of channels are not shown."""
    answer = read(ANALYSIS + PREAMBLE + CALL + EARLY + FINAL)
    assert answer.reasoning == "It wants rain."
    assert answer.content == "Let me see.It rains."
    assert calls_of(answer) == [("weather", {"city": "Bern"}), ("get_time", {})]
    assert calls_of(read(ANALYSIS + CALL + EARLY, most_calls=1)) == [("weather", {"city": "Bern"})]


@pytest.mark.parametrize(
    "text",
    [
        CALL.removeprefix("<|start|>assistant"),
        EARLY.removeprefix("<|start|>assistant"),
        CALL.removesuffix("<|call|>"),
        CALL.replace("<|channel|>commentary", "<|channel|>analysis"),
        CALL.replace(" <|constrain|>json", ""),
        CALL.replace("<|call|>", "<|start|>"),
    ],
)
def test_a_call_alone(text):
    """As it follows the prompt; its recipient before or behind the channel; without its end."""
    answer = read(text)
    assert len(answer.calls) == 1
    assert (answer.content, answer.reasoning) == ("", "")


@pytest.mark.parametrize(
    "text", ["It rains.", "", " ", "a < b, <|message|> c", "to=do: rain", "<b>", "<", "to", "{}"]
)
def test_an_answer_without_headers_is_text(text):
    """All of it is said."""
    assert read(text) == ReadAnswer(text, "", ())


def test_text_is_shown_at_once():
    """Except a possible beginning of a mark, or of a header."""
    reader = HarmonyReader(NAMES)
    assert collect_answer(reader.push("to do: a <")).content == "to do: a "
    assert collect_answer(reader.push("b <|start|")).content == "<b "
    assert collect_answer(reader.push("? [{")).content == "<|start|? [{"
    reader = HarmonyReader(NAMES)
    said = [collect_answer(reader.push(character)) for character in ANALYSIS + FINAL]
    assert all(len(answer.reasoning + answer.content) <= 1 for answer in said)


@pytest.mark.parametrize(
    "arguments", ["", "{", "[1]", "{}}", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": "\\ud800"}', "x"]
)
def test_an_invalid_call_is_text(arguments):
    """With its header; so is one of an unknown tool."""
    text = CALL.replace('{"city": "Bern"}', arguments)
    shown = text.removesuffix("<|call|>")
    assert read(text) == ReadAnswer(shown, "", ())
    assert read(shown) == ReadAnswer(shown, "", ())
    assert read(text, names=("other",)) == ReadAnswer(shown, "", ())


def test_text_for_an_unknown_tool_is_shown_at_once():
    """No call can follow."""
    reader = HarmonyReader(("other",))
    said = collect_answer(reader.push(CALL.removesuffix('n"}<|call|>'))).content
    assert said.endswith('{"city": "Ber')


def test_an_answer_that_is_cut_off():
    """It has its complete calls, and the thoughts and texts so far.

    A mark is one token, and never cut.
    """
    text = ANALYSIS + PREAMBLE + CALL + FINAL
    places = [place for mark in ("It wants", "Let me", "<|call|>") for place in [text.index(mark)]]
    for cut in range(len(text)):
        answer = read_whole(HarmonyReader(NAMES), text[:cut])
        thought, said, complete = (max(0, cut - place) for place in places)
        assert answer.reasoning.startswith("It wants rain."[:thought])
        assert answer.content.startswith("Let me see."[:said])
        if not 0 < complete < len("<|call|>"):
            assert len(answer.calls) == (cut >= places[-1])


def test_invalid_headers_are_text():
    """One that does not end within the maximal length of a header."""
    begun = "<|channel|>analysis<|message|>a<|end|>"
    long = "<|start|>" + "b" * (MAX_HEADER + len(BODY))
    assert read(begun + long) == ReadAnswer("b" * (MAX_HEADER + len(BODY)), "a", ())
    reader = HarmonyReader(NAMES)
    assert collect_answer(reader.push(begun + long)).content
    assert read(begun + "<|start|>assist") == ReadAnswer("<|start|>assist", "a", ())
    assert read(begun + "<|start|>" + "c" * 200 + BODY + "d") == ReadAnswer("d", "a", ())


words = st.text("ab é漢{<[\n", max_size=8)
some_calls = st.tuples(
    st.sampled_from(NAMES), st.dictionaries(words, values, max_size=2), st.booleans()
)


@settings(max_examples=examples(100))
@given(thoughts=words, said=words, calls=st.lists(some_calls, max_size=2), final=words)
def test_messages_in_any_order_round_trip(thoughts, said, calls, final):
    """With any text that is no mark."""
    text = f"<|channel|>analysis<|message|>{thoughts}<|end|>"
    text += f"<|start|>assistant<|channel|>commentary<|message|>{said}<|end|>"
    for name, arguments, is_early in calls:
        header = f" to=functions.{name}"
        parts = ("", header) if is_early else (header, "")
        text += f"<|start|>assistant{parts[1]}<|channel|>commentary{parts[0]} <|constrain|>json"
        text += f"<|message|>{json.dumps(arguments)}<|call|>"
    text += f"<|start|>assistant<|channel|>final<|message|>{final}"
    answer = read(text)
    assert (answer.reasoning, answer.content) == (thoughts, said + final)
    assert calls_of(answer) == [(name, arguments) for name, arguments, _ in calls]
