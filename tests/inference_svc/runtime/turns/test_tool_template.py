"""How chat templates write tools, calls and results: found for each family by trying them."""

import json

import numpy as np
import pytest
from jsonschema import validate

from inference_svc.core.chat import ASSISTANT, SYSTEM, TOOL, USER, Message, Tool, ToolCall
from inference_svc.core.errors import InvalidTurnError
from inference_svc.core.tools.parts import collect_answer
from inference_svc.core.tools.reader import ForcedReader, read_whole
from inference_svc.runtime.compute.grammars import Grammars
from inference_svc.runtime.turns.tool_template import PROBE, RESULT, ToolTemplate, short_id
from tests.tool_templates import FAMILIES, text_of

WEATHER = Tool(
    "get_weather",
    "Tells of the weather.",
    {
        "properties": {
            "city": {"type": "string", "maxLength": 9, "description": "where"},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 2},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
)
TIME = Tool("time-now", "Tells the time.", {"additionalProperties": False})
TOOLS = (WEATHER, TIME)
OFFERED = [tool.as_template() for tool in TOOLS]
QUESTION = Message(USER, "Does it rain?").as_template()
CALL = ToolCall("get_weather", '{"city": "Zürich", "unit": "C"}', "call_one")
OTHER = ToolCall("time-now", "{}", "call_two")
SUNNY = Message(TOOL, "sunny & 20 \u00b0C", (), "call_one", "get_weather").as_template()
NOON = Message(TOOL, '{"time": "12:00"}', (), "call_two", "time-now").as_template()
MAX_TOKENS = 1500

families = pytest.mark.parametrize("name", FAMILIES)
_TEXTS = {}


def of(name):
    """Return a family's name and its turn encoder, which tests can share."""
    if name not in _TEXTS:
        _TEXTS[name] = text_of(FAMILIES[name])
    return FAMILIES[name], _TEXTS[name]


def asking(*calls, content=""):
    """Make an answer with calls."""
    return Message(ASSISTANT, content, calls).as_template()


def whole(text, *messages):
    """Return the tokens of a whole conversation, and its text."""
    ids = text.encode_chat([QUESTION, *messages], (), OFFERED)
    return ids, text.decode(ids)


def history(text, family, *messages):
    """Return the context behind a complete answer: up to the last end token."""
    ids, _ = whole(text, *messages, SUNNY)
    num_opening = len(text.encode_chat([QUESTION], (), OFFERED))
    ends = set(text._tokenizer.convert_tokens_to_ids(list(family.ends)))
    return ids[: next(at for at in range(num_opening, len(ids)) if ids[at] in ends) + 1]


@families
def test_the_format_is_detected(name):
    """With the template's own text, and whether several calls fit in one message."""
    family, text = of(name)
    assert text.chat_problem == ""
    assert text.tool_format.name == family.call_format
    assert text._tools.writes_tools == family.writes_tools
    assert text._tools.writes_calls == family.writes_calls
    assert set(text.marks.values()) - set(text.thoughts or ()) == set(family.marks)
    for token_id, mark in text.marks.items():
        assert text.decode([token_id]) == mark
    _, said = whole(text, asking(CALL, OTHER), SUNNY, NOON)
    assert said.index(CALL.name) < said.index(OTHER.name)
    assert said.index("sunny") < said.index("12:00")


@families
def test_an_opening_describes_the_tools(name):
    """Their names, descriptions and schemas; the model learns how to call them."""
    _, text = of(name)
    for leading in ([], [Message(SYSTEM, "Be brief.").as_template()]):
        if leading and SYSTEM not in text._template.roles:
            continue
        said = text.decode(text.encode_chat([*leading, QUESTION], (), OFFERED))
        for told in (
            *("get_weather", "weather.", "where", "time-now", "required"),
            "Does it rain?",
        ):
            assert said.count(told) == 1, told
        assert all(one["content"] in said for one in leading)
        assert PROBE.name not in said
        without = text.decode(text.encode_chat([*leading, QUESTION], ()))
        assert "function" not in without.lower()


@families
def test_a_model_instructed_in_words_learns_how_to_call(name):
    """Only where the template does not say so: then with the marks of its calls."""
    family, text = of(name)
    said = text.decode(text.encode_chat([QUESTION], (), OFFERED))
    assert ("answer with nothing but what follows" in said) == (not family.writes_tools)
    if family.writes_tools:
        return
    assert "the function's name" in said
    assert '{"a parameter": "its value"}' in said
    assert all((mark in said) == family.writes_calls for mark in family.marks)
    assert not any(end in said.partition("What a function")[0] for end in family.ends)


@families
def test_appended_results_equal_the_whole_conversation(name):
    """Token by token: an opening, an answer with calls, the results, and the prompt."""
    family, text = of(name)
    context = history(text, family, asking(CALL))
    appended = text.encode_chat([SUNNY], context)
    assert context + appended == whole(text, asking(CALL), SUNNY)[0]
    assert "20 \u00b0C" in text.decode(appended)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.several])
def test_results_of_several_calls(name):
    """The answer has two."""
    family, text = of(name)
    context = history(text, family, asking(CALL, OTHER))
    appended = text.encode_chat([SUNNY, NOON], context)
    assert context + appended == whole(text, asking(CALL, OTHER), SUNNY, NOON)[0]


@families
def test_a_result_and_a_question(name):
    """A turn may have both; where the template accepts them."""
    if name == "mistral":
        pytest.skip("moves the tools to the last question")
    family, text = of(name)
    context = history(text, family, asking(CALL))
    question = Message(USER, "And now?").as_template()
    appended = text.encode_chat([SUNNY, question], context)
    assert context + appended == whole(text, asking(CALL), SUNNY, question)[0]


@families
def test_results_after_an_answer_that_was_cut(name):
    """It is closed as text, and the result follows; it is not closed twice."""
    family, text = of(name)
    context = history(text, family, asking(CALL))[:-1]
    closed = text.encode_chat([SUNNY], context)
    alone = text.encode_chat([SUNNY], context, continues_answer=False)
    closing = text.control.encode(text._template.frames.closings[0])
    assert closed == closing + alone
    assert text.decode(closing).strip() in (*family.ends, "<|end|>")
    assert "sunny" in text.decode(alone)


@families
def test_a_result_of_an_unknown_tool(name):
    """Sessions accept results with the call's id only."""
    family, text = of(name)
    nameless = {**SUNNY, "name": ""}
    context = history(text, family, asking(CALL))
    assert "sunny" in text.decode(text.encode_chat([nameless], context))


@families
def test_messages_with_calls_keep_their_text(name):
    """In a conversation that is read as a whole."""
    if name == "mistral":
        pytest.skip("writes no text beside calls")
    _, text = of(name)
    _, said = whole(text, asking(CALL, OTHER, content="Let me see."), SUNNY, NOON)
    if name != "llama3":  # which writes none either
        assert said.count("Let me see.") == 1
    for told in ("Zürich", "sunny", "12:00"):
        assert said.count(told) == 1


@families
def test_each_call_is_followed_by_its_result_in_serial_templates(name):
    """Templates identify a result by the call before it."""
    family, text = of(name)
    _, said = whole(text, asking(CALL, OTHER), NOON, SUNNY)
    if family.several:
        return
    assert said.index("Zürich") < said.index("sunny") < said.rindex(OTHER.name)
    assert said.rindex(OTHER.name) < said.index("12:00")


@families
def test_names_of_control_tokens_are_text(name):
    """In descriptions of tools, in arguments and in results."""
    family, text = of(name)
    context = history(text, family, asking(CALL))
    for lure in (*family.ends, *family.special, *family.added, "<|start|>", "</s>"):
        ids, added = forge(text, lure, context)
        plain, plain_added = forge(text, "lure", context)
        assert controls(text, ids) == controls(text, plain)
        assert controls(text, added) == controls(text, plain_added)
        said = text.decode(plain)
        assert text.decode(ids).count(lure) == said.count(lure) + said.count("lure")
        assert text.decode(added) == text.decode(plain_added).replace("lure", lure)


def forge(text, lure, context):
    """Return tokens of a conversation, and of a result, with a text wherever clients write any."""
    tool = Tool("x", f"a {lure}", {"properties": {lure: {"enum": [f"{lure} b"]}}})
    call = ToolCall("x", json.dumps({lure: [f"c{lure}"]}), "call_one")
    result = Message(TOOL, f"{lure}d{lure}", (), "call_one", "x").as_template()
    opening = text.encode_chat([QUESTION, asking(call), result], (), [tool.as_template()])
    return opening, text.encode_chat([result], context)


def controls(text, ids):
    """Return the control tokens among some, in order."""
    return [found for found in ids if found in text.control.ids]


def test_deeply_nested_values_are_refused():
    """In arguments and schemas: readers of JSON have different limits."""
    _, text = of("qwen")
    deep = inner = {}
    for _ in range(2000):
        inner["a"] = inner = {}
    call = {"type": "function", "id": "a", "function": {"name": "x", "arguments": deep}}
    with pytest.raises(InvalidTurnError, match="nested too deeply"):
        text.encode_chat([QUESTION, {**asking(CALL), "tool_calls": [call]}, SUNNY], ())
    with pytest.raises(InvalidTurnError, match="nested too deeply"):
        text.encode_chat([QUESTION], (), [Tool("x", "", deep).as_template()])


def test_a_last_answer_with_another_end():
    """gpt-oss ends it with another token: it is closed already, and later text is the same."""
    _, text = of("gpt_oss")
    question = Message(USER, "And now?").as_template()
    _, said = whole(text, Message(ASSISTANT, "It does.").as_template(), question)
    return_id = text._tokenizer.convert_tokens_to_ids("<|return|>")
    for last_id, closed in ((return_id, ""), (7, "<|end|>")):
        added = text.decode(text.encode_chat([question], [1, last_id]))
        assert added == closed + said.partition("It does.<|end|>")[2]


class Rambler:
    """A model with random answers of a grammar, which tends to close what it opened."""

    def __init__(self, text, family):
        tokenizer = text._tokenizer
        self.ends = set(tokenizer.convert_tokens_to_ids(list(family.ends)))
        self.grammars = Grammars(tokenizer, len(tokenizer), frozenset(self.ends))
        texts = tokenizer.batch_decode([[found] for found in range(len(tokenizer))])
        self._closing = np.array([said in ('"', "}", "]", '"}', ",", ":") for said in texts])

    def answer(self, grammar, seed):
        """Return an answer's tokens, without the one that ends it."""
        rng = np.random.default_rng(seed)
        matcher = self.grammars.compile(grammar)
        said = []
        for step in range(MAX_TOKENS):
            logits = rng.normal(size=len(self._closing)).astype(np.float32)
            logits[self._closing] += 0.05 * step
            matcher.mask(logits)
            token_id = int(logits.argmax())
            if token_id in self.ends:
                return said
            matcher.accept(token_id)
            said.append(token_id)
        raise AssertionError(said)


@families
def test_a_forced_answer_is_one_call(name):
    """Of an offered tool, with arguments that are valid for its schema."""
    family, text = of(name)
    rambler = Rambler(text, family)
    names = set()
    for seed in range(12):
        said = rambler.answer(text.grammar_of_call(TOOLS), seed)
        read = read_whole(
            text.tool_format.reader({tool.name for tool in TOOLS}, None), text.decode(said)
        )
        (call,) = read.calls
        assert (read.content, read.reasoning) == ("", "")
        validate(call.values, {tool.name: tool.schema for tool in TOOLS}[call.name])
        names.add(call.name)
        assert as_it_comes(text, TOOLS, said) == [call]
        assert set(controls(text, said)) <= text.marks.keys()
    assert names == {"get_weather", "time-now"}
    only = rambler.answer(text.grammar_of_call([TIME]), 0)
    (call,) = read_whole(text.tool_format.reader({"time-now"}, None), text.decode(only)).calls
    assert call.name == "time-now"
    assert as_it_comes(text, [TIME], only) == [call]
    assert bool(text.heads_of_calls(["a", "b"])) == (name != "hermes")  # which has the name last


def as_it_comes(text, tools, token_ids):
    """Return the calls of a forced answer, read character by character."""
    names = [tool.name for tool in tools]
    otherwise = text.tool_format.reader(set(names), None)
    reader = ForcedReader(text.heads_of_calls(names), otherwise)
    parts = [part for character in text.decode(token_ids) for part in reader.push(character)]
    return list(collect_answer([*parts, *reader.end()]).calls)


def test_a_forced_call_has_no_endless_blanks():
    """Small models would write nothing else."""
    _, text = of("qwen")
    assert '"whitespace_flexible": false' in text.grammar_of_call([TIME]).source


def test_ids_of_calls_are_short():
    """They are the same for the same call, and differ otherwise."""
    assert len(short_id("call_one")) == 9
    assert short_id("call_one") == short_id("call_one") != short_id("call_two")


def test_a_template_that_fails_with_calls_gets_text():
    """Also one that omits results, or changes earlier messages."""

    def forgets(messages, tools=(), *, is_prompt):
        del tools, is_prompt
        return "".join(str(one) for one in messages if one["role"] != TOOL)

    def rewrites(messages, tools=(), *, is_prompt):
        del tools, is_prompt
        return f"{len(messages)}" + "".join(str(one) for one in messages)

    for render in (forgets, rewrites):
        found = ToolTemplate(render)
        found.try_out([])
        assert (found.writes_calls, found.writes_tools) == (False, False)
        assert found.format.name == "json"
        messages, tools = found.adapt([QUESTION, asking(CALL), SUNNY], OFFERED, (USER, ASSISTANT))
        assert tools == []
        assert [one["role"] for one in messages] == [USER, ASSISTANT, USER]
        assert RESULT not in str(messages)
