"""Formats of answers: the grammar that an answer has to follow, as each API writes it.

OpenAI's chats have `response_format`, its responses `text.format`, Anthropic's messages
`output_config.format`. vLLM's clients send `structured_outputs`, which has more kinds. A schema is
always enforced, whether it is strict or not.

*Source:* OpenAI and Anthropic API references, "Structured outputs"; vLLM, "Structured outputs".
"""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from inference_svc.core.grammar import (
    ANY_OBJECT,
    Grammar,
    GrammarKind,
    choice_grammar,
    schema_grammar,
)
from inference_svc.http_api.bodies.body import Body, WrongMemberError

MAX_CHOICES = 1024

Kind = Literal["text", "json_object", "json_schema"]


class SchemaBody(Body):
    """A named JSON schema."""

    content_words: ClassVar[str] = "name and schema"
    ignored: ClassVar[frozenset[str]] = frozenset({"description", "name", "strict"})

    definition: dict[str, Any] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _check_definition(self) -> Self:
        if self.definition is None:
            raise WrongMemberError("{path} is missing", "send a JSON schema", "schema")
        return self


class ChatFormat(Body):
    """`response_format` of a chat, where the schema is in the member `json_schema`."""

    content_words: ClassVar[str] = "type, and json_schema"

    kind: Kind = Field(default="text", alias="type")
    json_schema: SchemaBody | None = None

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        if (self.kind == "json_schema") != (self.json_schema is not None):
            raise _schema_and_type("json_schema")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar; None: plain text."""
        definition = None if self.json_schema is None else self.json_schema.definition
        return _grammar(self.kind, definition)


class FlatFormat(Body):
    """`text.format` of a response, `output_config.format` of a message: one flat object."""

    content_words: ClassVar[str] = "type, and schema"
    ignored: ClassVar[frozenset[str]] = frozenset({"description"})

    kind: Kind = Field(default="text", alias="type")
    name: str = ""
    strict: bool = True
    definition: dict[str, Any] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        if (self.kind == "json_schema") != (self.definition is not None):
            raise _schema_and_type("schema")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar; None: plain text."""
        return _grammar(self.kind, self.definition)

    @property
    def shown(self) -> dict[str, Any]:
        """The format as a response object shows it."""
        if self.definition is None:
            return {"type": self.kind}
        members = {"name": self.name, "schema": self.definition, "strict": self.strict}
        return {"type": self.kind, **members}


def _grammar(kind: Kind, definition: dict[str, Any] | None) -> Grammar | None:
    if definition is not None:
        return schema_grammar(definition)
    return ANY_OBJECT if kind == "json_object" else None


def _schema_and_type(name: str) -> WrongMemberError:
    return WrongMemberError(
        "{path} is needed with type 'json_schema', and with no other type",
        "send both, or another type",
        name,
    )


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of several kinds of grammar."""

    content_words: ClassVar[str] = "json, json_object, regex, choice or grammar"

    definition: dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1, max_length=MAX_CHOICES)
    lark: str | None = Field(default=None, alias="grammar")

    @model_validator(mode="after")
    def _check_one_kind(self) -> Self:
        if len(self._grammars()) != 1:
            raise WrongMemberError(
                "{path} does not have exactly one kind", f"send {self.content_words}"
            )
        return self

    @property
    def grammar(self) -> Grammar:
        """The grammar that is given."""
        return self._grammars()[0]

    def _grammars(self) -> list[Grammar]:
        found = [
            None if self.definition is None else schema_grammar(self.definition),
            ANY_OBJECT if self.json_object else None,
            None if self.regex is None else Grammar(GrammarKind.REGEX, self.regex),
            None if self.choice is None else choice_grammar(self.choice),
            None if self.lark is None else Grammar(GrammarKind.LARK, self.lark),
        ]
        return [grammar for grammar in found if grammar is not None]
