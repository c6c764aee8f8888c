"""Grammars that an answer has to follow: a JSON schema, a regular expression, or Lark. Pure."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any

from inference_svc.core.errors import InvalidGrammarError

MAX_GRAMMAR_CHARACTERS = 65536  # the time to compile one grows with it
# Most remainders that `multipleOf` may have in a grammar: so many take half a second to compile,
# and a million ten seconds and 400 MB, while every other grammar waits.
MAX_REMAINDERS = 50_000
MAX_DECIMALS = 18  # of a `multipleOf`: more digits than any grammar can follow
# A member of a JSON object with a number, wherever it stands: a Lark grammar may contain JSON. Its
# name is at most as long as "multipleOf" with each of its letters escaped.
_NUMBER_MEMBER = re.compile(r'"((?:[^"\\]|\\.){10,50})"\s*:\s*-?([0-9][0-9.eE+-]*)', re.DOTALL)


class GrammarKind(StrEnum):
    """The language of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True)
class Grammar:
    """A grammar as the client wrote it.

    Attributes:
        kind: its language.
        source: the JSON of a schema, a regular expression, or the text of a Lark grammar.
    """

    kind: GrammarKind
    source: str

    def check(self) -> None:
        """Raise InvalidGrammarError if it is empty or too long, or takes too long to compile."""
        if not 0 < len(self.source) <= MAX_GRAMMAR_CHARACTERS:
            raise InvalidGrammarError(
                f"a grammar may not have {len(self.source)} characters",
                f"send a grammar of 1 to {MAX_GRAMMAR_CHARACTERS} characters",
            )
        if self.kind is not GrammarKind.REGEX and _num_remainders(self.source) > MAX_REMAINDERS:
            raise InvalidGrammarError(
                f"multipleOf has more than {MAX_REMAINDERS} remainders, which a grammar cannot "
                "count",
                "send a smaller one, with fewer decimals, or leave it out",
            )


def _num_remainders(source: str) -> int:
    """Return how many remainders the grammar of a source has to tell apart; an upper bound.

    A number is checked digit by digit, with a state for each remainder. Several `multipleOf` of one
    number (`allOf`) count as their least common multiple; which of them are of one number is not
    known here, so it is taken of all.
    """
    divisors = list(_divisors(source))
    decimals = max((-exponent for _, exponent in divisors), default=0)
    if decimals > MAX_DECIMALS or any(exponent > MAX_DECIMALS for _, exponent in divisors):
        return MAX_REMAINDERS + 1
    shared = math.lcm(*(digits * 10 ** (decimals + exponent) for digits, exponent in divisors))
    while decimals and shared and shared % 10 == 0:  # 100,000 hundredths are 1,000 wholes
        shared, decimals = shared // 10, decimals - 1
    alone: int = sum(digits * 10 ** max(0, exponent) for digits, exponent in divisors)
    return max(shared, alone)


def _divisors(source: str) -> Iterator[tuple[int, int]]:
    """Yield each `multipleOf` in a source as (digits, exponent): digits * 10 ** exponent."""
    for name, number in _NUMBER_MEMBER.findall(source):
        try:
            if json.loads(f'"{name}"', strict=False) == "multipleOf":
                _, digits, exponent = Decimal(number).normalize().as_tuple()
                yield int("".join(map(str, digits))), int(exponent)
        except (ValueError, ArithmeticError):  # no JSON: compiling it says so
            continue


def schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    """Make the grammar of the values that a JSON schema allows."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Make the grammar that allows one of several texts."""
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar(GrammarKind.LARK, f"start: {texts}")


def json_rule(schema: Mapping[str, Any], *, is_strict: bool, blanks: str = "") -> str:
    """Write a JSON schema as a part of a rule in a Lark grammar.

    Args:
        schema: the schema.
        is_strict: whether a keyword that grammars do not support is an error; else it is ignored.
        blanks: an expression of the blanks allowed wherever JSON allows any. "": exactly those that
            templates write, since small models would write blanks without end.
    """
    style: dict[str, Any] = {"whitespace_flexible": True, "whitespace_pattern": blanks}
    if not blanks:
        style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    annotated = {**schema, "x-guidance": {**style, "lenient": not is_strict}}
    return "%json " + json.dumps(annotated, ensure_ascii=False)


ANY_OBJECT = schema_grammar({"type": "object"})
