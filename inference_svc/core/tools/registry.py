"""The formats of calls by the names of their families, and readers of answers. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from inference_svc.core.tools.harmony import CLOSING, MARKS, HarmonyReader
from inference_svc.core.tools.marked_formats import DEEPSEEK, HERMES, JSON, LLAMA, MISTRAL
from inference_svc.core.tools.parts import AnswerReader, Closing
from inference_svc.core.tools.reader import CallFormat, MarkedReader, PlainReader


class MakeReader(Protocol):
    """Makes the reader of an answer."""

    def __call__(
        self, names: Collection[str], most_calls: int | None = None, *, is_bound: bool = False
    ) -> AnswerReader:
        """Make it.

        Args:
            names: of the tools that may be called.
            most_calls: so many are shown; None: all.
            is_bound: whether its calls are bound; see `OpenCall`.
        """


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        name: of the format.
        marks: texts of it that may be special tokens.
        reader: makes the reader of an answer.
        closings: what may close a call that is bound.
        is_always: whether answers are written so where no tools are offered, too.
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

# In the order in which they are tried: what is only JSON comes last, since others contain it.
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
