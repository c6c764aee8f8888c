"""Answers with calls, as families of models write them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import strategies as st

from inference_svc.core.tools.formats import DEEPSEEK_MARKS, FORMATS

NAMES = ("weather", "get_time", "ns.add-1")
BLANKS = ("", " ", "\n", "\r\n\t ")
# Texts that could be mistaken for structure, wherever they appear.
LURES = (
    "<tool_call>",
    "</tool_call>",
    '<tool_call>{"name": "weather", "arguments": {}}</tool_call>',
    "[TOOL_CALLS]weather[ARGS]{}",
    "<|python_tag|>",
    '{"name": "weather", "parameters": {}}',
    "".join([*DEEPSEEK_MARKS[:2], "weather", DEEPSEEK_MARKS[2], "{}", *DEEPSEEK_MARKS[3:]]),
    "```",
    '"}}',
    "\\",
    "\\u",
    "漢é🙂\u2028\0",
)


class Step(NamedTuple):
    """Calls that are written as one.

    Attributes:
        enough: index behind the text that makes them complete.
        end: index behind all of their text.
        calls: their names and arguments.
    """

    enough: int
    end: int
    calls: Sequence[tuple[str, object]]


@dataclass
class Writing:
    """An answer that is being written.

    Attributes:
        blank: returns the text where blanks are allowed.
        dump: writes JSON.
    """

    blank: Callable[[], str] = lambda: ""
    dump: Callable[[object], str] = json.dumps
    text: str = ""
    steps: list[Step] = field(default_factory=list)

    def add(self, *parts: str) -> None:
        """Write parts, with blanks between them."""
        self.text += self.blank().join(parts)

    def step(self, calls: Sequence[tuple[str, object]], *parts: str) -> None:
        """Write the text that makes calls complete, and the rest of it."""
        enough = len(self.text)
        self.add("", *parts)
        self.steps.append(Step(enough, len(self.text), calls))

    @property
    def calls(self) -> list[tuple[str, object]]:
        """Return all calls."""
        return [call for step in self.steps for call in step.calls]


def hermes(writing, calls):
    for name, arguments in calls:
        writing.add("<tool_call>", writing.dump({"name": name, "arguments": arguments}))
        writing.step([(name, arguments)], "</tool_call>")
        writing.add("", "")


def hermes_turned(writing, calls):
    for name, arguments in calls:
        writing.add("<tool_call>", writing.dump({"arguments": arguments, "name": name}))
        writing.step([(name, arguments)], "</tool_call>")


def llama(writing, calls):
    for number, (name, arguments) in enumerate(calls):
        said = writing.dump({"name": name, "parameters": arguments})
        writing.add("; " if number else "", said)
        writing.step([(name, arguments)])


def llama_tagged(writing, calls):
    writing.text += "<|python_tag|>"
    llama(writing, calls)


def mistral(writing, calls):
    listed = [
        {"name": name, "arguments": arguments, "id": f"call{number:05}"}
        for number, (name, arguments) in enumerate(calls)
    ]
    writing.add("[TOOL_CALLS]", writing.dump(listed))
    writing.step(calls)


def mistral_named(writing, calls):
    for number, (name, arguments) in enumerate(calls):
        call_id = ("[CALL_ID]", f"call{number:05}") if number % 2 else ()
        writing.add("[TOOL_CALLS]", name, *call_id, "[ARGS]", writing.dump(arguments))
        writing.step([(name, arguments)])
        writing.add("", "")


def deepseek_v3(writing, calls):
    section, begin, separator, end, section_end = DEEPSEEK_MARKS
    writing.add(section, "")
    for number, (name, arguments) in enumerate(calls):
        opening = f"function{separator}{name}\n```json\n"
        writing.add(begin, opening, writing.dump(arguments))
        last = (section_end,) if number == len(calls) - 1 else ()
        writing.step([(name, arguments)], "\n```", end, *last)


def deepseek_v31(writing, calls):
    section, begin, separator, end, section_end = DEEPSEEK_MARKS
    writing.add(section, "")
    for number, (name, arguments) in enumerate(calls):
        writing.add(begin, name, separator, writing.dump(arguments))
        last = (section_end,) if number == len(calls) - 1 else ()
        writing.step([(name, arguments)], end, *last)


def plain_json(writing, calls):
    for number, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": arguments}
        said = {"type": "function", "function": function} if number % 2 else function
        writing.add("\n" if number else "", writing.dump(said))
        writing.step([(name, arguments)])


# How a family writes calls, and the format that reads them.
FAMILIES = {
    hermes: "hermes",
    hermes_turned: "hermes",
    llama: "llama3",
    llama_tagged: "llama3",
    mistral: "mistral",
    mistral_named: "mistral",
    deepseek_v3: "deepseek",
    deepseek_v31: "deepseek",
    plain_json: "json",
}
BARE = {llama, plain_json}  # accept no text before a call


def wrote(family, calls, text=""):
    """Write a text, and calls behind it, without optional blanks."""
    writing = Writing(text=text)
    family(writing, calls)
    return writing


def reader_of(family, names=NAMES, most_calls=None, *, is_bound=False):
    """Return the reader for a family's answers."""
    return FORMATS[FAMILIES[family]].reader(names, most_calls, is_bound=is_bound)


def calls_of(answer):
    """Return the calls of an answer that was read: names and arguments."""
    return [(call.name, call.values) for call in answer.calls]


texts = st.text(max_size=8) | st.sampled_from(LURES)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
).filter(lambda value: "Infinity" not in json.dumps(value))
some_calls = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(texts, values, max_size=2)),
    min_size=1,
    max_size=3,
)
befores = st.text("ab é.<{[\n", max_size=6)


@st.composite
def writings(draw, families=tuple(FAMILIES)):
    """Draw an answer of one of some families: its text, its writing, the family."""
    family = draw(st.sampled_from(families))
    options = draw(
        st.fixed_dictionaries(
            {"ensure_ascii": st.booleans(), "indent": st.sampled_from([None, 1])},
        )
    )
    before = draw(st.sampled_from(BLANKS) if family in BARE else befores)
    writing = Writing(
        blank=lambda: draw(st.sampled_from(BLANKS)),
        dump=lambda value: json.dumps(value, **options),
        text=before,
    )
    family(writing, draw(some_calls))
    return before, writing, family
