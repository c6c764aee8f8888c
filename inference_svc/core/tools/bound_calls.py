"""Bound calls: the grammars that a call has to follow once the model has begun it. Pure.

A model writes freely until it has begun a call of a tool that was offered (`parts.py`). From the
brace of the arguments up to the end of the call it is bound: the arguments have to be a JSON
object, and for a strict tool one that follows its schema. Then it is free again.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from inference_svc.core.chat import Tool
from inference_svc.core.grammar import Grammar, GrammarKind, json_rule
from inference_svc.core.tools.parts import BLANKS, AnswerReader, Closing

ANY_TOOL = ""  # stands for tools that are not strict


@dataclass(frozen=True)
class BoundCalls:
    """The calls that an answer may contain.

    Attributes:
        tools: the tools that may be called.
        closings: the texts that may close a call.
        reader: makes the parser that finds calls in an answer.
    """

    tools: tuple[Tool, ...]
    closings: tuple[Closing, ...]
    reader: Callable[[], AnswerReader]

    def grammars(self, special: Mapping[str, int]) -> Iterator[tuple[tuple[str, Closing], Grammar]]:
        """Yield the grammars of calls from the brace on, by strict tool and closing.

        Any text may follow a call: the last token of the call may contain some of it.

        Args:
            special: ids of special tokens that may be part of a closing.
        """
        rules = {ANY_TOOL: json_rule({"type": "object"}, is_strict=False, blanks=BLANKS)}
        for tool in self.tools:
            if tool.is_strict:
                rules[tool.name] = json_rule(tool.schema, is_strict=True, blanks=BLANKS)
        for name, rule in rules.items():
            for closing in self.closings:
                yield (name, closing), _grammar(rule, closing, special)


def _grammar(rule: str, closing: Closing, special: Mapping[str, int]) -> Grammar:
    closed = "".join(f" BLANKS {_written(piece, special)}" for piece in closing)
    lines = [f"start: arguments{closed} ANY", f"arguments: {rule}"]
    if closing:
        lines.append(f"BLANKS: /{BLANKS}/")
    lines.append("ANY: /(?s:.*)/")  # a token that ends a call may contain more text
    return Grammar(GrammarKind.LARK, "\n".join(lines))


def _written(piece: str | re.Pattern[str], special: Mapping[str, int]) -> str:
    """Write a piece of a closing as a part of a rule."""
    if not isinstance(piece, str):
        return f"/{piece.pattern}/"
    spelled = json.dumps(piece, ensure_ascii=False)
    return f"(<[{special[piece]}]> | {spelled})" if piece in special else spelled
