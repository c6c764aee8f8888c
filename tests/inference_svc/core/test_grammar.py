"""Grammars that are refused before they are compiled, because compiling them would not end."""

import json

import pytest

from inference_svc.core.errors import InvalidGrammarError
from inference_svc.core.grammar import (
    MAX_GRAMMAR_CHARACTERS,
    MAX_REMAINDERS,
    Grammar,
    GrammarKind,
    schema_grammar,
)

MANY = 20 * MAX_REMAINDERS + 3


def numbers_of(*multiples):
    members = {f"n{i}": {"type": "number", "multipleOf": each} for i, each in enumerate(multiples)}
    return schema_grammar({"type": "object", "properties": members})


@pytest.mark.parametrize(
    "grammar",
    [
        numbers_of(MANY),
        numbers_of(-MANY),
        numbers_of(0.0001 * MANY),
        numbers_of(MAX_REMAINDERS - 1, MAX_REMAINDERS - 1),
        numbers_of(1e-30),
        schema_grammar({"multipleOf": 997, "allOf": [{"multipleOf": 991}]}),
        Grammar(GrammarKind.JSON_SCHEMA, f'{{"multipl\\u0065Of" :\n {MANY}}}'),
        Grammar(GrammarKind.JSON_SCHEMA, f'{{"multipleOf": {MANY}, "multipleOf": 1}}'),
        Grammar(GrammarKind.LARK, f'start: /"/ %json {{"multipleOf": {MANY}}}'),
    ],
)
def test_multiples_of_many_remainders_are_refused(grammar):
    """However they are written: each remainder is a state, and compiling them takes hours."""
    with pytest.raises(InvalidGrammarError, match=f"more than {MAX_REMAINDERS} remainders"):
        grammar.check()


@pytest.mark.parametrize(
    "grammar",
    [
        numbers_of(0.01, 0.25, 5, 60, 1000),
        numbers_of(*[MAX_REMAINDERS / 100] * 100),
        numbers_of(2e3),
        schema_grammar({"properties": {"multipleOf": {"const": "x"}, "of": {"const": MANY}}}),
        Grammar(GrammarKind.REGEX, f'"multipleOf": {MANY}'),
        Grammar(GrammarKind.JSON_SCHEMA, '{"multipleOf": 1.5.5}'),  # whoever compiles it refuses it
        Grammar(GrammarKind.LARK, '\\"' * (MAX_GRAMMAR_CHARACTERS // 2)),
    ],
)
def test_usual_multiples_may_be_asked_for(grammar):
    """Prices, minutes, thousands; and what is called so and is none."""
    grammar.check()


def test_a_grammar_has_some_text_and_not_too_much():
    """It is refused before anybody reads it."""
    for source in ("", json.dumps("x" * MAX_GRAMMAR_CHARACTERS)):
        with pytest.raises(InvalidGrammarError, match="a grammar may not have"):
            Grammar(GrammarKind.JSON_SCHEMA, source).check()
