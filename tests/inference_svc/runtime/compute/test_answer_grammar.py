"""Calls within answers are kept valid once they have begun; other text is free."""

import json

import numpy as np
import pytest
import torch
from jsonschema import validate

from inference_svc.core.answers import SamplingParams
from inference_svc.core.chat import Tool, ToolUse
from inference_svc.core.errors import InvalidGrammarError
from inference_svc.core.grammar import MAX_GRAMMAR_CHARACTERS
from inference_svc.core.tools.formats import DEEPSEEK_MARKS
from inference_svc.core.tools.parts import CallArguments, CallBegun, collect_answer
from inference_svc.core.tools.reader import read_whole
from inference_svc.http_api.answer_parts import Reading
from inference_svc.runtime.compute.grammars import MAX_CACHED, Grammars
from inference_svc.runtime.compute.sampling import Sampler
from inference_svc.runtime.turns.answer_writer import Detokenizer
from tests.tool_templates import FAMILIES, text_of

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, "é漢"]}, "b": {"type": "array", "items": {"type": "null"}}},
    "required": ["a"],
    "additionalProperties": False,
}
LOOSE, STRICT = Tool("look_up", "", SCHEMA), Tool("go-on", "", SCHEMA, is_strict=True)
TOOLS = (LOOSE, STRICT)
_, BEGIN, SEPARATOR, _, _ = DEEPSEEK_MARKS
# How each family begins a call, with the name of the tool.
HEADS = {
    "qwen": '<tool_call>\n{{"name": "{}", "arguments": ',
    "qwen_thinking": '<tool_call>{{"name":"{}","arguments":',
    "llama3": '<|python_tag|>{{"name": "{}", "parameters": ',
    "mistral": '[TOOL_CALLS] [{{"name": "{}", "arguments": ',
    "mistral_named": "[TOOL_CALLS]{}[ARGS]",
    "deepseek_v3": "".join(DEEPSEEK_MARKS[:2]) + "function" + SEPARATOR + "{}\n```json\n",
    "deepseek_v31": BEGIN + "{}" + SEPARATOR,
    "gpt_oss": "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    "gemma": '{{"name": "{}", "arguments": ',
}
families = pytest.mark.parametrize("name", HEADS)


class Rambler:
    """A model of a family with scripted text followed by random tokens.

    Its tendency to close what it opened grows with its length.
    """

    def __init__(self, name):
        family, self.text = FAMILIES[name], text_of(FAMILIES[name])
        self.tokenizer = self.text._tokenizer
        self.vocab_size = len(self.tokenizer)
        self.ends = frozenset(self.tokenizer.convert_tokens_to_ids(list(family.ends)))
        self.grammars = Grammars(self.tokenizer, self.vocab_size, self.ends)
        texts = self.tokenizer.batch_decode([[found] for found in range(self.vocab_size)])
        self._closing = np.array([said in ('"', "}", "]", '"}', ":") for said in texts])

    def reading(self, tools=TOOLS, **use):
        return Reading(
            self.text.tool_format,
            ToolUse(tools, **use),
            thoughts=self.text.thoughts,
            is_bound=True,
        )

    def bound(self, tools=TOOLS, begun="", **use):
        return self.grammars.compile_calls(self.reading(tools, **use).calls, self.text.marks, begun)

    def ids(self, text):
        return self.text.control.encode(text)

    def answer(self, grammar, told=(), seed=0, is_over=lambda _sampled: False, **params):
        """Return the sampled tokens, without the one that ends the answer."""
        rng = np.random.default_rng(seed)
        sampler = Sampler(SamplingParams(seed=seed, **params), self.ends, grammar)
        said = []
        for step in range(300):
            logits = rng.normal(size=self.vocab_size).astype(np.float32)
            logits[self._closing] += 0.05 * step
            if step < len(told):
                logits[told[step]] += 30
            sampled = sampler.sample(torch.from_numpy(logits), [])
            if sampled.token_id in self.ends:
                break
            said.append(sampled)
            if is_over(sampled):
                break
        return said

    def pieces(self, sampled):
        """Return the texts that tokens add to the answer, as clients get them."""
        detokenizer = Detokenizer(self.tokenizer, (), self.text.marks)
        return [detokenizer.push(each.token_id) for each in sampled]


@pytest.fixture(scope="module")
def qwen():
    return Rambler("qwen")


@families
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_a_call_that_has_begun_is_completed(name, tool):
    """Its arguments are an object, valid for a strict tool, whatever the model prefers."""
    rambler = Rambler(name)
    told = rambler.ids(HEADS[name].format(tool.name) + "{")
    for seed in range(4):
        grammar = rambler.bound()
        kinds = []

        def is_over(sampled, kinds=kinds, grammar=grammar):
            kinds.append(sampled.is_in_call)
            return len(kinds) > len(told) and not grammar.is_in_call

        said = rambler.answer(grammar, told, seed, is_over, temperature=seed % 2)
        assert len(said) < 300
        assert kinds[: len(told)] == [False] * len(told)
        assert all(kinds[len(told) : -1])
        assert not kinds[-1]
        pieces = rambler.pieces(said)
        reader = rambler.reading().reader()
        parts = [part for piece in pieces for part in reader.push_text(piece)]
        begun, *arguments = [p for p in parts if isinstance(p, CallBegun | CallArguments)]
        assert begun.name == tool.name
        assert len(arguments) > 1 or arguments[0].text in ("{}", '{"a": 1}')
        (call,) = collect_answer([*parts, *reader.end()]).calls
        assert not call.is_cut
        if tool.is_strict:
            validate(call.values, SCHEMA)
            # An unbound reader parses the same call.
            text = "".join(pieces) + "]" * (name == "mistral")
            plain = read_whole(rambler.text.tool_format.reader([tool.name]), text)
            assert [(each.name, each.values) for each in plain.calls] == [(call.name, call.values)]


@families
def test_a_model_without_calls_is_not_affected(name):
    """Token by token, drawn and greedy, with penalties: nothing is masked."""
    rambler = Rambler(name)
    for seed, params in enumerate(
        ({}, {"temperature": 1.0}, {"temperature": 0.7, "frequency_penalty": 0.5, "top_p": 0.9})
    ):
        free, bound = (
            rambler.answer(grammar, (), seed, **params, logprobs=2, ignore_eos=True)
            for grammar in (None, rambler.bound())
        )
        assert free == bound
        assert len(free) > 3


def test_several_calls(qwen):
    """Text between them is free; each is kept valid, and text behind them is free."""
    head = HEADS["qwen"].format("go-on")
    told = [
        *qwen.ids("I look. " + head + '{"a": 1'),
        *qwen.ids("}}</tool_call>\nAnd more: " + HEADS["qwen"].format("look_up") + '{"x": '),
        *qwen.ids("[1]}}\n</tool_call> So <tool_call>."),
    ]
    said = qwen.answer(qwen.bound(), told, is_over=lambda _: False)
    read = qwen.reading().whole("".join(qwen.pieces(said[: len(told)])))
    assert [(call.name, call.values) for call in read.calls] == [
        ("go-on", {"a": 1}),
        ("look_up", {"x": [1]}),
    ]
    assert read.content == "I look. \nAnd more:  So <tool_call>."


@pytest.mark.parametrize(
    "text",
    [
        'The mark is <tool_call>, and {"name": "go-on", "arguments": {"b": 1}} is a call.',
        '<tool_call>{"name": "fly", "arguments": {"b": 1}}</tool_call>',
        '<tool_call>{"arguments": {"b": 1}, "name": "go-on"}</tool_call>',
        '<think>\n<tool_call>{"name": "go-on", "arguments": {"b": 1}}</tool_call> or so',
    ],
)
def test_other_text_is_not_constrained(text):
    """Text about calls, other tools, a name that comes too late, and thoughts."""
    rambler = Rambler("qwen3")
    grammar = rambler.bound()
    for token_id in rambler.ids(text):
        assert grammar.accept(token_id)
        assert grammar.is_free


def test_a_thought_that_the_prompt_began():
    """Calls in it do not count; behind it they do."""
    rambler = Rambler("qwen3_thinking")
    call = HEADS["qwen"].format("go-on") + "{"
    grammar = rambler.bound(begun="<think>")
    assert all(map(grammar.accept, rambler.ids(call + "?</think>\n")))
    assert grammar.is_free
    assert all(map(grammar.accept, rambler.ids(call)))
    assert not grammar.is_free


class BiasedRow:
    """Logits of a model that prefers one token, and otherwise another."""

    def __init__(self, vocab_size, first, second):
        self.row = torch.zeros(vocab_size)
        self.row[first], self.row[second] = 9, 5


def test_a_token_that_begins_a_call_wrongly_is_not_chosen():
    """For example one that opens and closes the arguments, where the schema requires some."""
    rambler = Rambler("mistral_named")
    tokenizer = rambler.tokenizer
    tokenizer.add_tokens(["{}", '{"b"'])
    empty, wrong = tokenizer.convert_tokens_to_ids(["{}", '{"b"'])
    (brace,) = rambler.ids("{")
    rambler.vocab_size = len(tokenizer)
    rambler.grammars = Grammars(tokenizer, rambler.vocab_size, rambler.ends)
    for temperature in (0.0, 0.1):
        for tool, first, second, wanted in (
            (STRICT, empty, brace, brace),
            (STRICT, wrong, brace, brace),
            (LOOSE, empty, brace, empty),
            (LOOSE, wrong, brace, wrong),
        ):
            grammar = rambler.bound()
            params = SamplingParams(temperature=temperature, logprobs=1)
            sampler = Sampler(params, rambler.ends, grammar)
            for token_id in rambler.ids("é [TOOL_CALLS]" + tool.name + "[ARGS]"):
                assert grammar.accept(token_id)
            row = BiasedRow(rambler.vocab_size, first, second).row
            assert sampler.sample(row, []).token_id == wanted
            assert grammar.is_free == (wanted == empty)
            if wanted == empty:
                assert [sampler.sample(row, []).token_id for _ in range(2)] == [empty] * 2
    whole = rambler.reading().whole('[TOOL_CALLS]look_up[ARGS]{}[TOOL_CALLS]go-on[ARGS]{"a": 1}')
    assert [call.arguments for call in whole.calls] == ["{}", '{"a": 1}']


def test_a_token_that_ends_a_call_and_begins_the_next():
    """In a list: it is allowed if the next one may begin so, else the first one continues."""
    rambler = Rambler("mistral")
    tokenizer = rambler.tokenizer
    both = [f'}}}}, {{"name": "{name}", "arguments": {{}}' for name in ("look_up", "go-on")]
    tokenizer.add_tokens(both)
    loose, strict = tokenizer.convert_tokens_to_ids(both)
    rambler.vocab_size = len(tokenizer)
    rambler.grammars = Grammars(tokenizer, rambler.vocab_size, rambler.ends)
    grammar = rambler.bound()
    head = rambler.ids(HEADS["mistral"].format("look_up") + '{"b": 1')
    assert all(map(grammar.accept, head))
    for token_id, may_come in ((strict, False), (loose, True), (*rambler.ids("}"), True)):
        logits = np.zeros(rambler.vocab_size, np.float32)
        grammar.mask(logits)
        assert np.isfinite(logits[token_id])
        assert grammar.accept(token_id) == may_come
    assert grammar.is_free
    assert all(map(grammar.accept, rambler.ids("]")))


def test_surplus_calls_are_kept_valid_too(qwen):
    """They are not shown, and the session keeps all generated tokens."""
    call = HEADS["qwen"].format("look_up") + "{}}\n</tool_call>"
    grammar = qwen.bound(most_calls=1)
    assert all(map(grammar.accept, qwen.ids(call + call[:-14])))
    assert grammar.is_in_call


def test_parts_of_characters_are_handled(qwen):
    """Tokens of single bytes, within a call and outside."""
    head = HEADS["qwen"].format("look_up")
    grammar = qwen.bound()
    for token_id in qwen.ids("漢é <tool" + head + '{"é漢": "漢 🙂"'):
        logits = np.zeros(qwen.vocab_size, np.float32)
        grammar.mask(logits)
        assert np.isfinite(logits[token_id])
        assert grammar.accept(token_id)
    assert grammar.is_in_call


def test_a_strict_schema_without_a_grammar_is_refused(qwen):
    """Schemas of other tools do not matter."""
    schema = {**SCHEMA, "propertyNames": {"maxLength": 1}}
    assert qwen.bound((Tool("a", "", schema),)).is_free
    with pytest.raises(InvalidGrammarError):
        qwen.bound((Tool("a", "", schema, is_strict=True),))
    long = {"type": "object", "description": "d" * MAX_GRAMMAR_CHARACTERS}
    assert qwen.bound((Tool("a", "", long),)).is_free
    with pytest.raises(InvalidGrammarError, match="a grammar may not have"):
        qwen.bound((Tool("a", "", long, is_strict=True),))


def test_compiled_grammars_are_cached(qwen):
    """For later turns, up to a limit."""
    qwen.bound()
    before = list(qwen.grammars._cache)
    qwen.bound()
    assert list(qwen.grammars._cache) == before
    for number in range(MAX_CACHED + 2):
        schema = {"type": "object", "properties": {"n": {"const": number}}}
        qwen.bound((Tool("a", "", schema, is_strict=True),))
    assert len(qwen.grammars._cache) == MAX_CACHED
    assert json.dumps({"const": 0}) not in "".join(qwen.grammars._cache)


def test_a_model_without_grammars_is_reported(qwen):
    """So that no client relies on them."""
    assert qwen.grammars.problem == ""
    assert "no end-of-turn token" in Grammars(qwen.tokenizer, qwen.vocab_size, frozenset()).problem
