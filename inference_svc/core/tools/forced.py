"""The parser of an answer that a grammar binds to be one call, shown as it arrives. Pure.

Its arguments are written as `json.dumps` would, up to where the answer was cut, if it was.
"""

from collections.abc import Mapping
from enum import Enum, auto

from inference_svc.core.tools.parts import AnswerReader, CallBegun, OpenCall, Part


class _State(Enum):
    HEAD = auto()
    CALL = auto()
    OTHERWISE = auto()


class ForcedReader:
    """Parses one call.

    Args:
        heads: the texts before the arguments of a call, by tool name.
        otherwise: parses an answer that does not begin so, or ends before.

    Attributes:
        last_call: see AnswerReader.
    """

    def __init__(self, heads: Mapping[str, str], otherwise: AnswerReader) -> None:
        self._heads = {name: head.lstrip() for name, head in heads.items()}
        self._otherwise = otherwise
        self.last_call: OpenCall | None = None
        self._held = ""
        self._state = _State.HEAD

    @property
    def is_thinking(self) -> bool:
        """See AnswerReader."""
        return self._otherwise.is_thinking

    def push(self, text: str) -> list[Part]:
        """See AnswerReader."""
        if self._state is _State.HEAD:
            return self._read_head(text)
        if self.last_call is not None:
            return self.last_call.push(text)
        return self._otherwise.push(text)

    def end(self) -> list[Part]:
        """See AnswerReader."""
        if self.last_call is not None:
            return self.last_call.end()
        return [*self._otherwise.push(self._held), *self._otherwise.end()]

    def _read_head(self, text: str) -> list[Part]:
        self._held += text
        stripped = self._held.lstrip()
        begun = [name for name, head in self._heads.items() if stripped.startswith(head)]
        if begun:
            name = max(begun, key=len)
            self._held, self._state, self.last_call = "", _State.CALL, OpenCall(name)
            return [CallBegun(name), *self.last_call.push(stripped[len(self._heads[name]) :])]
        if any(head.startswith(stripped) for head in self._heads.values()):
            return []
        held, self._held, self._state = self._held, "", _State.OTHERWISE
        return self._otherwise.push(held)
