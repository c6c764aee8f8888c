"""The formats that write calls between marks, one for each family of models. Pure.

    Hermes, Qwen    <tool_call>{"name": …, "arguments": …}</tool_call>, one after the other
    Llama 3         {"name": …, "parameters": …}; …   perhaps behind <|python_tag|>
    Mistral         [TOOL_CALLS] [{"name": …, "arguments": …}, …]
                    [TOOL_CALLS]name[ARGS]{…}         newer models, one after the other
    DeepSeek        <calls begin>, calls, <calls end>: each is <call begin>name<sep>{…}<call end>,
                    or has its type before the mark <sep>, and behind it name and arguments, these
                    fenced as code
    JSON            {"name": …, "arguments": …}       nothing but that

*Source:* the models' chat templates and cards.
"""

import re

from inference_svc.core.chat import ToolCall
from inference_svc.core.tools.json_value import (
    NoCallError,
    call_of,
    make_call,
    read_value,
    skip_blanks,
)
from inference_svc.core.tools.reader import CallFormat, Found

MAX_NAME = 256  # characters of a tool's name, with what stands around it
_OBJECT_STARTS = tuple(
    "{" + start
    for start in ('"name":', '"parameters":', '"arguments":', '"type":"function"', '"function":{')
)


def expect(text: str, at: int, mark: str, *, is_end: bool) -> int | None:
    """Return the index behind a mark that has to follow blanks; None if it is not complete.

    Raises:
        NoCallError: something else follows, or the answer ends before the mark does.
    """
    at = skip_blanks(text, at)
    if text.startswith(mark, at):
        return at + len(mark)
    if is_end or not mark.startswith(text[at:]):
        raise NoCallError
    return None


class Hermes(CallFormat):
    """Calls as JSON between two tags; the last closing tag may be missing."""

    def read(self, text: str, *, is_end: bool) -> Found | None:
        """See CallFormat."""
        opening, closing = self.marks
        found = read_value(text, len(opening))
        if found is None:
            return None
        call = call_of(found[0])
        if is_end and not text[found[1] :].strip():
            return Found((call,), len(text))
        end = expect(text, found[1], closing, is_end=is_end)
        return None if end is None else Found((call,), end)


class BareJson(CallFormat):
    """Calls as JSON, and nothing else before them."""

    def read(self, text: str, *, is_end: bool) -> Found | None:  # noqa: ARG002
        """See CallFormat."""
        at = next((len(mark) for mark in self.starts if text.startswith(mark)), 0)
        start = "".join(text[at : at + MAX_NAME].split())
        if not any(each.startswith(start[: len(each)]) for each in _OBJECT_STARTS):
            raise NoCallError
        found = read_value(text, at)
        return None if found is None else Found((call_of(found[0]),), found[1])


class Mistral(CallFormat):
    """Calls behind a mark: as a list, or each by itself."""

    def read(self, text: str, *, is_end: bool) -> Found | None:
        """See CallFormat."""
        at = skip_blanks(text, len(self.starts[0]))
        if text.startswith(("[", "{"), at) and not text.startswith(self.marks, at):
            listed = read_value(text, at)
            if listed is None:
                return None
            values = listed[0] if isinstance(listed[0], list) else [listed[0]]
            if not values:
                raise NoCallError
            return Found(tuple(map(call_of, values)), listed[1])
        brace = text.find("{", at, at + MAX_NAME)
        if brace < 0:
            if is_end or len(text) > at + MAX_NAME:
                raise NoCallError
            return None
        name = _MISTRAL_NAME.fullmatch(text, at, brace)
        if name is None:
            raise NoCallError
        found = read_value(text, brace)
        return None if found is None else Found((make_call(name[1], found[0]),), found[1])


_MISTRAL_NAME = re.compile(r"([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


DEEPSEEK_MARKS = tuple(
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)


class DeepSeek(CallFormat):
    """Calls between marks of their own, within a section; its last mark may be missing."""

    def read(self, text: str, *, is_end: bool) -> Found | None:
        """See CallFormat."""
        section, opening, *_, closing = self.marks
        calls: list[ToolCall] = []
        at = len(section)
        while True:
            at = skip_blanks(text, at)
            if calls and (text.startswith(closing, at) or (is_end and at == len(text))):
                return Found(calls, min(len(text), at + len(closing)))
            if calls and not is_end and closing.startswith(text[at:]):
                return None
            behind = expect(text, at, opening, is_end=is_end)
            found = None if behind is None else self._call(text, behind, is_end=is_end)
            if found is None:
                return None
            calls.append(found[0])
            at = found[1]

    def _call(self, text: str, at: int, *, is_end: bool) -> tuple[ToolCall, int] | None:
        _, _, separator, closing, _ = self.marks
        before, found, _ = text[at:].partition(separator)
        brace = text.find("{", at + len(before) + len(separator))
        if not found or brace < 0:
            if len(before) > MAX_NAME:
                raise NoCallError
            return None
        between = text[at + len(before) + len(separator) : brace]
        fenced = _DEEPSEEK_FENCE.fullmatch(between)
        if fenced is None:
            raise NoCallError
        value = read_value(text, brace)
        if value is None:
            return None
        call = make_call(fenced[1] or before.strip(), value[0])
        end = value[1]
        if fenced[1]:
            behind = expect(text, end, "```", is_end=is_end)
            if behind is None:
                return None
            end = behind
        behind = expect(text, end, closing, is_end=is_end)
        return None if behind is None else (call, behind)


_DEEPSEEK_FENCE = re.compile(r"\s*(?:([^\s`]+)\s*```(?:json)?\s*)?")

HERMES = Hermes("hermes", ("<tool_call>",), marks=("<tool_call>", "</tool_call>"))
MISTRAL = Mistral("mistral", ("[TOOL_CALLS]",), marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"))
DEEPSEEK = DeepSeek("deepseek", DEEPSEEK_MARKS[:1], marks=DEEPSEEK_MARKS)
LLAMA = BareJson("llama3", ("<|python_tag|>",), ("{",), ";", ("<|python_tag|>",))
JSON = BareJson("json", leads=("{",), between=";,")
