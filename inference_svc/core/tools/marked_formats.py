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

from inference_svc.core.tools.json_value import (
    Asked,
    NoCallError,
    asked_by,
    read_value,
    skip_blanks,
)
from inference_svc.core.tools.reader import CallFormat, Found

MAX_HEADER = 256  # characters before the arguments of a call
_OBJECT_STARTS = tuple(
    "{" + start
    for start in ('"name":', '"parameters":', '"arguments":', '"type":"function"', '"function":{')
)


def _behind(text: str, at: int, mark: str, *, is_end: bool = False) -> int | None:
    """Return the index behind a mark that follows blanks; None if it is not complete.

    Args:
        text: what is read.
        at: where the blanks begin.
        mark: the mark.
        is_end: whether no more follows; then the mark may be cut.

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
    """Read a header and the object that follows it.

    Returns:
        The header, the object, and the index behind it; None if they are not complete.

    Raises:
        NoCallError: there is something else.
    """
    brace = text.find("{", at, at + MAX_HEADER)
    if brace < 0:
        if len(text) >= at + MAX_HEADER:
            raise NoCallError(at)
        return None
    match = header.fullmatch(text, at, brace)
    if match is None:
        raise NoCallError(at)
    found = read_value(text, brace)
    return None if found is None else (match, *found)


class Hermes(CallFormat):
    """Calls as JSON between two tags; the last closing tag may be missing."""

    def read(self, text: str, *, is_end: bool) -> Found | None:
        """See CallFormat."""
        opening, closing = self.marks
        found = read_value(text, len(opening))
        if found is None:
            return None
        end = _behind(text, found[1], closing, is_end=is_end)
        return None if end is None else Found([asked_by(found[0])], end)


class BareJson(CallFormat):
    """Calls as JSON, and nothing else before them."""

    def read(self, text: str, *, is_end: bool) -> Found | None:  # noqa: ARG002
        """See CallFormat."""
        at = next((len(mark) for mark in self.starts if text.startswith(mark)), 0)
        start = "".join(text[at : at + MAX_HEADER].split())
        if not any(each.startswith(start[: len(each)]) for each in _OBJECT_STARTS):
            raise NoCallError(at)
        found = read_value(text, at)
        return None if found is None else Found([asked_by(found[0])], found[1])


class Mistral(CallFormat):
    """Calls behind a mark: as a list, or each by itself."""

    def read(self, text: str, *, is_end: bool) -> Found | None:  # noqa: ARG002
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
            return Found([asked_by(value) for value in values], listed[1])
        if first > at:
            raise NoCallError(at)
        found = _object_behind(text, at, _MISTRAL_HEADER)
        return None if found is None else Found([Asked(found[0]["name"], found[1])], found[2])


_MISTRAL_HEADER = re.compile(r"(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


DEEPSEEK_MARKS = tuple(
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)


class DeepSeek(CallFormat):
    """Calls between marks of their own, one after the other in a section; its marks may lack."""

    def read(self, text: str, *, is_end: bool) -> Found | None:
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
        return None if behind is None else Found([Asked(header["name"], arguments)], behind)


_DEEPSEEK_HEADER = re.compile(
    rf"\s*(?:[^\s<`]+\s*{DEEPSEEK_MARKS[2]}\s*)?(?P<name>[^\s<`]+)\s*"
    rf"(?:{DEEPSEEK_MARKS[2]}|(?P<fence>```)(?:json)?)\s*"
)

HERMES = Hermes("hermes", ("<tool_call>",), marks=("<tool_call>", "</tool_call>"))
MISTRAL = Mistral("mistral", ("[TOOL_CALLS]",), marks=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"))
DEEPSEEK = DeepSeek("deepseek", DEEPSEEK_MARKS[:2], marks=DEEPSEEK_MARKS)
LLAMA = BareJson("llama3", ("<|python_tag|>",), ("{",), ";", ("<|python_tag|>",))
JSON = BareJson("json", leads=("{",), between=";,")
