"""The formats of calls by the names of their families, and readers of answers. Pure."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from inference_svc.core.tools.harmony import MARKS, HarmonyReader
from inference_svc.core.tools.marked_formats import DEEPSEEK, HERMES, JSON, LLAMA, MISTRAL
from inference_svc.core.tools.reader import AnswerReader, CallFormat, MarkedReader, PlainReader

MakeReader = Callable[[Collection[str], int | None], AnswerReader]


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        name: of the format.
        marks: texts of it that may be special tokens.
        reader: makes the reader of an answer, given the names of tools and how many calls are
            shown, None: all.
        is_always: whether answers are written so where no tools are offered, too.
    """

    name: str
    marks: tuple[str, ...]
    reader: MakeReader
    is_always: bool = False


def _marked(call_format: CallFormat) -> ToolFormat:
    return ToolFormat(call_format.name, call_format.marks, partial(MarkedReader, call_format))


PLAIN = ToolFormat("none", (), lambda _names, _most_calls: PlainReader())

# In the order in which they are tried: what is only JSON comes last, since others contain it.
FORMATS: Mapping[str, ToolFormat] = {
    made.name: made
    for made in (
        ToolFormat("gpt-oss", MARKS, HarmonyReader, is_always=True),
        _marked(HERMES),
        _marked(MISTRAL),
        _marked(DEEPSEEK),
        _marked(LLAMA),
        _marked(JSON),
    )
}
