"""What a grammar keeps the calls of an answer to, once the model has begun them. Pure.

A model says what it likes until it has begun a call of a tool that was offered (`parts.py`).
From the brace of the arguments up to what closes the call it is held to that: the arguments are an
object of JSON, of a strict tool one by its schema. Then it is free again.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from inference_svc.core.chat import Tool
from inference_svc.core.grammar import Grammar, GrammarKind, json_rule
from inference_svc.core.tools.parts import BLANKS, AnswerReader, Closing

ANY_TOOL = ""  # stands for those that are not strict


@dataclass(frozen=True)
class BoundCalls:
    """The calls that an answer may have.

    Attributes:
        tools: those that may be called.
        closings: what may close a call.
        reader: makes the reader that finds them in an answer.
    """

    tools: tuple[Tool, ...]
    closings: tuple[Closing, ...]
    reader: Callable[[], AnswerReader]

    def grammars(self, special: Mapping[str, int]) -> Iterator[tuple[tuple[str, Closing], Grammar]]:
        """Yield the grammars of calls from the brace on, by the strict tool and what closes them.

        Behind a call anything may follow: its last token may have something of that.

        Args:
            special: ids of special tokens that may be among what closes a call.
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
    lines.append("ANY: /(?s:.*)/")  # a token that ends a call may have more than that
    return Grammar(GrammarKind.LARK, "\n".join(lines))


def _written(piece: str | re.Pattern[str], special: Mapping[str, int]) -> str:
    """Write a piece of what closes a call as a part of a rule."""
    if not isinstance(piece, str):
        return f"/{piece.pattern}/"
    spelled = json.dumps(piece, ensure_ascii=False)
    return f"(<[{special[piece]}]> | {spelled})" if piece in special else spelled
