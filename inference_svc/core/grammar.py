"""Grammars that an answer has to follow: a JSON schema, a regular expression, or Lark. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from inference_svc.core.errors import InvalidGrammarError

MAX_GRAMMAR_CHARACTERS = 65536  # the time to compile one grows with it


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
        """Raise InvalidGrammarError if it is empty or too long."""
        if not 0 < len(self.source) <= MAX_GRAMMAR_CHARACTERS:
            raise InvalidGrammarError(
                f"a grammar may not have {len(self.source)} characters",
                f"send a grammar of 1 to {MAX_GRAMMAR_CHARACTERS} characters",
            )


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
