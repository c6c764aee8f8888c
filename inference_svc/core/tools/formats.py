"""The formats of tool calls, one for each family of models: `FORMATS`. Pure.

    Hermes, Qwen    <tool_call>{"name": …, "arguments": …}</tool_call>, one after the other
    Llama 3         {"name": …, "parameters": …}; …   perhaps behind <|python_tag|>
    Mistral         [TOOL_CALLS] [{"name": …, "arguments": …}, …]
                    [TOOL_CALLS]name[ARGS]{…}         newer models, one after the other
    DeepSeek        <calls begin>, calls, <calls end>: each is <call begin>name<sep>{…}<call end>,
                    or has its type before the mark <sep>, and behind it name and arguments, these
                    fenced as code
    JSON            {"name": …, "arguments": …}       nothing else
    gpt-oss         messages to tools, each behind marks of its own: `harmony.py`

*Source:* the models' chat templates and cards.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from inference_svc.core.tools.harmony import CLOSING, MARKS, HarmonyReader
from inference_svc.core.tools.json_value import (
    NoCallError,
    RequestedCall,
    read_value,
    requested_call,
    skip_blanks,
)
from inference_svc.core.tools.parts import BLANKS, END_OF_OBJECT, AnswerReader, Closing, Opening
from inference_svc.core.tools.reader import (
    MAX_HEAD,
    CallFormat,
    MarkedReader,
    ParsedCalls,
    PlainReader,
)

_OBJECT_STARTS = tuple(
    "{" + start
    for start in ('"name":', '"parameters":', '"arguments":', '"type":"function"', '"function":{')
)


def _behind(text: str, at: int, mark: str, *, is_end: bool = False) -> int | None:
    """Return the index behind a mark that follows blanks; None if it is not complete.

    Args:
        text: the text.
        at: index where the blanks begin.
        mark: the mark.
        is_end: whether no more text follows; then the mark may be cut.

    Raises:
        NoCallError: something else follows.
    """
    at = skip_blanks(text, at)
    if text.startswith(mark, at):
        return at + len(mark)
    if not mark.startswith(text[at:]):
        raise NoCallError(at)
    return len(text) if is_end else None


def _object_behind(
    text: str, at: int, header: re.Pattern[str]
) -> tuple[re.Match[str], object, int] | None:
    """Parse a header and the object that follows it.

    Returns:
        The header, the object, and the index behind it; None if they are not complete.

    Raises:
        NoCallError: there is something else.
    """
    brace = text.find("{", at, at + MAX_HEAD)
    if brace < 0:
        if len(text) >= at + MAX_HEAD:
            raise NoCallError(at)
        return None
    match = header.fullmatch(text, at, brace)
    if match is None:
        raise NoCallError(at)
    found = read_value(text, brace)
    return None if found is None else (match, *found)


class Hermes(CallFormat):
    """Calls as JSON between two tags; the last closing tag may be missing."""

    def read(self, text: str, *, is_end: bool) -> ParsedCalls | None:
        """See CallFormat."""
        opening, closing = self.marks
        found = read_value(text, len(opening))
        if found is None:
            return None
        end = _behind(text, found[1], closing, is_end=is_end)
        return None if end is None else ParsedCalls([requested_call(found[0])], end)


class BareJson(CallFormat):
    """Calls as JSON, without text before them."""

    def read(self, text: str, *, is_end: bool) -> ParsedCalls | None:  # noqa: ARG002
        """See CallFormat."""
        at = next((len(mark) for mark in self.starts if text.startswith(mark)), 0)
        start = "".join(text[at : at + MAX_HEAD].split())
        if not any(each.startswith(start[: len(each)]) for each in _OBJECT_STARTS):
            raise NoCallError(at)
        found = read_value(text, at)
        return None if found is None else ParsedCalls([requested_call(found[0])], found[1])


class Mistral(CallFormat):
    """Calls behind a mark: as a list, or each with its own mark."""

    def read(self, text: str, *, is_end: bool) -> ParsedCalls | None:  # noqa: ARG002
        """See CallFormat."""
        at = skip_blanks(text, len(self.starts[0]))
        first = skip_blanks(text, at + 1) if text.startswith("[", at) else at
        if first == len(text):
            return None
        if text[first] == "{":
            listed = read_value(text, at, "[{")
            if listed is None:
                return None
            values = listed[0] if isinstance(listed[0], list) else [listed[0]]
            return ParsedCalls([requested_call(value) for value in values], listed[1])
        if first > at:
            raise NoCallError(at)
        found = _object_behind(text, at, _MISTRAL_HEADER)
        return (
            None
            if found is None
            else ParsedCalls([RequestedCall(found[0]["name"], found[1])], found[2])
        )


_MISTRAL_HEADER = re.compile(r"(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


DEEPSEEK_MARKS = tuple(
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)


class DeepSeek(CallFormat):
    """Calls between marks of their own, in a section whose marks may be missing."""

    def read(self, text: str, *, is_end: bool) -> ParsedCalls | None:
        """See CallFormat."""
        section, opening, _, closing, section_end = self.marks
        begin = _behind(text, len(section) if text.startswith(section) else 0, opening)
        found = None if begin is None else _object_behind(text, begin, _DEEPSEEK_HEADER)
        if found is None:
            return None
        header, arguments, end = found
        for mark in ("```", closing) if header["fence"] else (closing,):
            behind = _behind(text, end, mark, is_end=is_end)
            if behind is None:
                return None
            end = behind
        try:
            behind = _behind(text, end, section_end, is_end=is_end)
        except NoCallError:  # the next call
            behind = end
        return (
            None
            if behind is None
            else ParsedCalls([RequestedCall(header["name"], arguments)], behind)
        )


_DEEPSEEK_NAME = rf"\s*(?:[^\s<`]+\s*{DEEPSEEK_MARKS[2]}\s*)?(?P<name>[^\s<`]+)\s*"
_DEEPSEEK_HEADER = re.compile(
    rf"{_DEEPSEEK_NAME}(?:{DEEPSEEK_MARKS[2]}|(?P<fence>```)(?:json)?)\s*"
)


def _object_with(arguments: str) -> str:
    """Return the expression of an object with a call, up to the brace of the arguments."""
    member = rf'{BLANKS}"(?:{arguments})"{BLANKS}:{BLANKS}(?={{)'
    return rf'{{{BLANKS}"name"{BLANKS}:{BLANKS}"(?P<name>[^"\\]+)"{BLANKS},{member}'


_ANY = "arguments|parameters"
_IN_OBJECT = (END_OF_OBJECT,)


def _openings_of_mistral() -> tuple[Opening, ...]:
    mark, listed = rf"\[TOOL_CALLS\]{BLANKS}", _object_with("arguments")
    named = rf"{mark}{_MISTRAL_HEADER.pattern}(?={{)"
    return (
        Opening(
            re.compile(rf"{mark}\[{BLANKS}{listed}"),
            _IN_OBJECT,
            re.compile(rf"{BLANKS},{BLANKS}{listed}"),
            "]",
        ),
        Opening(re.compile(mark + listed), _IN_OBJECT),
        Opening(re.compile(named)),
    )


def _openings_of_deepseek() -> tuple[Opening, ...]:
    section, begin, separator, end, section_end = DEEPSEEK_MARKS
    named = rf"(?:{section}{BLANKS})?{begin}{_DEEPSEEK_NAME}"
    return tuple(
        Opening(re.compile(rf"{named}{last}\s*(?={{)"), closing, ending=section_end)
        for last, closing in ((separator, (end,)), ("```(?:json)?", ("```", end)))
    )


HERMES = Hermes(
    "hermes",
    ("<tool_call>",),
    marks=("<tool_call>", "</tool_call>"),
    openings=(
        Opening(
            re.compile(f"<tool_call>{BLANKS}{_object_with(_ANY)}"), (END_OF_OBJECT, "</tool_call>")
        ),
    ),
)
MISTRAL = Mistral(
    "mistral",
    ("[TOOL_CALLS]",),
    marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    openings=_openings_of_mistral(),
)
DEEPSEEK = DeepSeek(
    "deepseek", DEEPSEEK_MARKS[:2], marks=DEEPSEEK_MARKS, openings=_openings_of_deepseek()
)
LLAMA = BareJson(
    "llama3",
    ("<|python_tag|>",),
    ("{",),
    ";",
    ("<|python_tag|>",),
    (Opening(re.compile(rf"(?:<\|python_tag\|>{BLANKS})?{_object_with(_ANY)}"), _IN_OBJECT),),
)
JSON = BareJson(
    "json",
    leads=("{",),
    between=";,",
    openings=(Opening(re.compile(_object_with(_ANY)), _IN_OBJECT),),
)


class MakeReader(Protocol):
    """Makes the parser of an answer."""

    def __call__(
        self, names: Collection[str], most_calls: int | None = None, *, is_bound: bool = False
    ) -> AnswerReader:
        """Make it.

        Args:
            names: names of the tools that may be called.
            most_calls: number of calls that are shown; None: all.
            is_bound: whether its calls are bound; see `OpenCall`.
        """


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        name: the format's name.
        marks: texts of the format that may be special tokens.
        reader: makes the parser of an answer.
        closings: texts that may close a bound call.
        is_always: whether answers have this format also where no tools are offered.
    """

    name: str
    marks: tuple[str, ...]
    reader: MakeReader
    closings: tuple[Closing, ...] = ()
    is_always: bool = False


def _marked(call_format: CallFormat) -> ToolFormat:
    closings = tuple({opening.closing: None for opening in call_format.openings})
    reader = partial(MarkedReader, call_format)
    return ToolFormat(call_format.name, call_format.marks, reader, closings)


def _plain(
    names: Collection[str], most_calls: int | None = None, *, is_bound: bool = False
) -> AnswerReader:
    del names, most_calls, is_bound
    return PlainReader()


PLAIN = ToolFormat("none", (), _plain)

# In the order in which they are tried: plain JSON comes last, since others contain it.
FORMATS: Mapping[str, ToolFormat] = {
    made.name: made
    for made in (
        ToolFormat("gpt-oss", MARKS, HarmonyReader, (CLOSING,), is_always=True),
        _marked(HERMES),
        _marked(MISTRAL),
        _marked(DEEPSEEK),
        _marked(LLAMA),
        _marked(JSON),
    )
}
