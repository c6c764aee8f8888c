"""What an answer has to be: a JSON schema, a regular expression, or a grammar. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from inference_svc.core.errors import InvalidGrammarError

MAX_GRAMMAR_CHARACTERS = 65536  # the time to compile one grows with it


class GrammarKind(StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True)
class Grammar:
    """A grammar as the client wrote it.

    Attributes:
        kind: how it is written.
        source: the JSON of a schema, a regular expression, or the text of a Lark grammar.
    """

    kind: GrammarKind
    source: str

    def check(self) -> None:
        """Raise InvalidGrammarError if it is too long, or no text at all."""
        if not 0 < len(self.source) <= MAX_GRAMMAR_CHARACTERS:
            raise InvalidGrammarError(
                f"a grammar of {len(self.source)} characters cannot be",
                f"send 1 to {MAX_GRAMMAR_CHARACTERS}",
            )


def of_schema(schema: Mapping[str, Any]) -> Grammar:
    """Make the grammar of what a JSON schema allows."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def of_choices(choices: Sequence[str]) -> Grammar:
    """Make the grammar of one of several texts."""
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar(GrammarKind.LARK, f"start: {texts}")


def json_rule(schema: Mapping[str, Any], *, is_strict: bool, blanks: str = "") -> str:
    """Write what a JSON schema allows as a part of a Lark grammar's rule.

    Args:
        schema: the schema.
        is_strict: whether a word of it that no grammar knows is an error; else it does not count.
        blanks: an expression of the blanks that may stand wherever JSON has any; "": those that
            templates write, and no others, since small models would write them on.
    """
    style: dict[str, Any] = {"whitespace_flexible": True, "whitespace_pattern": blanks}
    if not blanks:
        style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    said = {**schema, "x-guidance": {**style, "lenient": not is_strict}}
    return "%json " + json.dumps(said, ensure_ascii=False)


ANY_OBJECT = of_schema({"type": "object"})
