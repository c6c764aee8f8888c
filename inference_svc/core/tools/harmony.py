"""The format of gpt-oss, "harmony": an answer is messages, each of a channel. Pure.

    <|channel|>analysis<|message|>…<|end|>                        the model's thoughts
    <|start|>assistant<|channel|>commentary<|message|>…<|end|>    content before a call
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}
                                                        <|call|>  a call
    <|start|>assistant<|channel|>final<|message|>…<|return|>      content

The recipient of a call may precede its channel. An answer that does not begin so is text, and an
invalid call is text with its header. A bound call begins with the brace of its arguments, and ends
with them: anything else than blanks up to the end of its message is text.

*Source:* OpenAI, "Harmony response format".
"""

import re
from collections.abc import Collection
from enum import Enum, auto

from inference_svc.core.tools.json_value import NoCallError, RequestedCall, make_call
from inference_svc.core.tools.parts import (
    CallBegun,
    Closing,
    Content,
    OpenCall,
    Part,
    Reasoning,
    is_open,
    num_pending,
)

START, CHANNEL, BODY = "<|start|>", "<|channel|>", "<|message|>"
CLOSING: Closing = ()  # the end of its message mostly ends the answer, and is not in the text
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
MARKS = (START, CHANNEL, BODY, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
MAX_HEADER = 512  # characters before the text of a message
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_END = re.compile("|".join(map(re.escape, ENDS)))
_LEADS = (CHANNEL, "to=functions.", START)


class _State(Enum):
    OPENING = auto()  # no text yet, or text that may be a header
    HEADER = auto()
    TEXT = auto()


class HarmonyReader:
    """Parses an answer of gpt-oss; see the module docstring.

    Args:
        names: names of the tools that may be called.
        most_calls: number of calls that are shown; None: all.
        is_bound: whether its calls are bound.

    Attributes:
        last_call: see AnswerReader.
    """

    def __init__(
        self, names: Collection[str], most_calls: int | None = None, *, is_bound: bool = False
    ) -> None:
        self.last_call: OpenCall | None = None
        self._is_bound = is_bound
        self._is_behind = False  # only blanks since a call, in its message
        self._names = names
        self._most_calls = most_calls
        self._num_calls = 0
        self._held = ""
        self._searched = 0  # held characters that contain no mark
        self._state = _State.OPENING
        self._tool = ""  # the tool that the message is for
        self._header = ""  # header of a message for a tool
        self._is_thought = False

    @property
    def is_thinking(self) -> bool:
        """See AnswerReader."""
        return self._is_thought and self._state is _State.TEXT

    def push(self, text: str) -> list[Part]:
        """See AnswerReader."""
        call = is_open(self.last_call)
        if call is not None:
            return [*self._follow(call, text), *self._read(is_end=False)]
        self._held += text
        return self._read(is_end=False)

    def end(self) -> list[Part]:
        """See AnswerReader."""
        call = is_open(self.last_call)
        if call is not None:
            return self._if_counted(call.end())
        parts = self._read(is_end=True)
        if self._tool:
            self._emit_text("", parts)
        return parts

    def _read(self, *, is_end: bool) -> list[Part]:
        parts: list[Part] = []
        while self._held:
            if self._state is _State.TEXT:
                if self._tool and self._is_bound and self._held.lstrip().startswith("{"):
                    parts += self._open()
                elif not self._read_text(parts, is_end=is_end):
                    break
            elif not self._read_header(parts, is_end=is_end):
                break
        return parts

    def _read_header(self, parts: list[Part], *, is_end: bool) -> bool:
        """Parse up to a message's text; return whether to continue."""
        stripped = self._held.lstrip()
        if self._state is _State.OPENING:
            if not stripped and not is_end:
                return False
            if not any(lead.startswith(stripped[: len(lead)]) for lead in _LEADS):
                self._state = _State.TEXT
                return True
        end = self._held.find(BODY, 0, MAX_HEADER + len(BODY))
        if end >= 0:
            self._begin(self._held[:end], parts)
            self._held, self._state = self._held[end + len(BODY) :], _State.TEXT
            return True
        if is_end:
            parts.append(Content(self._held))
            self._held = ""
        if len(self._held) < MAX_HEADER + len(BODY):
            return False
        self._state, self._is_thought = _State.TEXT, False  # it is no header
        return True

    def _begin(self, header: str, parts: list[Part]) -> None:
        """Begin the message that follows a header."""
        recipient = _RECIPIENT.search(header)
        channel = header.partition(CHANNEL)[2].split("<")[0].split()
        self._tool = self._header = ""
        self._is_behind = False
        self._is_thought = recipient is None and channel[:1] == ["analysis"]
        if recipient and recipient[1] in self._names:
            self._tool, self._header = recipient[1], header + BODY
        elif recipient:
            parts.append(Content(header + BODY))

    def _read_text(self, parts: list[Part], *, is_end: bool) -> bool:
        """Parse the available text of a message; return whether to continue."""
        found = _END.search(self._held, self._searched)
        self._searched = 0
        if found:
            end, rest = found.span()
            self._state = _State.HEADER
        elif self._tool and not is_end:
            self._searched = len(self._held) - num_pending(self._held, ENDS)
            return False
        else:
            rest = end = len(self._held) - (0 if is_end else num_pending(self._held, ENDS))
        text, self._held = self._held[:end], self._held[rest:]
        self._emit_text(text, parts)
        return found is not None

    def _open(self) -> list[Part]:
        """Begin to parse a bound call."""
        begun, self._held, self._searched = self._held.lstrip(), "", 0
        call = self.last_call = OpenCall(self._tool, CLOSING)
        self._num_calls += 1
        self._tool, self._is_behind = "", True
        return [*self._if_counted([CallBegun(call.name)]), *self._follow(call, begun)]

    def _follow(self, call: OpenCall, text: str) -> list[Part]:
        """Parse the next text of the open call."""
        parts = self._if_counted(call.push(text))
        self._held = call.rest
        return parts

    def _if_counted(self, parts: list[Part]) -> list[Part]:
        """Return the parts of the last call, unless there are too many calls."""
        return parts if self._most_calls is None or self._num_calls <= self._most_calls else []

    def _emit_text(self, text: str, parts: list[Part]) -> None:
        """Emit the text of a message; for a call it has to be the whole text."""
        if not self._tool:
            if self._is_behind:
                text = text.lstrip()
                self._is_behind = not text
            if text:
                parts.append(Reasoning(text) if self._is_thought else Content(text))
            return
        try:
            call = make_call(RequestedCall(self._tool, text))
        except NoCallError:
            parts.append(Content(self._header + text))
        else:
            self._num_calls += 1
            parts += self._if_counted([call])
        self._tool = ""
