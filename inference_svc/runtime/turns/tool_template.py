"""How a model's chat template writes tools, calls of them, and what they return.

Found out when the service starts. A call is written by the template, and the format that reads it
back as that call is the model's. A template that writes no calls, or in a way that nothing here
reads, is given texts instead: the tools and how to call them in the system message, past calls in
the answers that asked for them, and what they returned in messages of their own.

What answers cost to read later is the same either way: tools stand at the beginning of a session,
and what a tool returns is appended to it.
"""

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from inference_svc.core.chat import ASSISTANT, SYSTEM, TOOL, USER, Message, Tool, ToolCall
from inference_svc.core.errors import InvalidTurnError
from inference_svc.core.grammar import Grammar, GrammarKind, json_rule
from inference_svc.core.tools.formats import FORMATS, ToolFormat
from inference_svc.core.tools.reader import read_whole
from inference_svc.runtime.turns.chat_template import common_prefix, written_in

Written = Mapping[str, Any]  # a message, or a tool, as templates take it
Render = Callable[..., str]  # ChatTemplate.render

PROBE = Tool(
    "probe_2d8b",
    "tries the template out",
    {"properties": {"word": {"type": "string", "description": "any"}}, "required": ["word"]},
)
PROBE_CALL = ToolCall(PROBE.name, '{"word": "echo 51f7"}', "c0ffee123")
RESULT = "result 6e0c"
QUESTION = Message(USER, "what 5b20").as_template()
NAMELESS = "function"  # of a result whose tool is not known
ID_CHARACTERS = 9  # of a call's id: some templates take no others

_INSTRUCTIONS = """\
# Tools

You can call the functions below; their parameters are JSON schemas.

{tools}

To call one, answer with nothing but what follows, once for each call:

{example}

What a function returns comes in the next message."""
_CALL_AS_TEXT = f'{{"name": "{PROBE.name}", "arguments": {PROBE_CALL.arguments}}}'
_ANY_NAME = "the function's name"
_ANY_ARGUMENTS = '{"a parameter": "its value"}'
_ARGUMENTS = re.compile(r'\{\s*"word":\s*"echo 51f7"\s*\}')
_NAME_OR_ARGUMENTS = re.compile(f"({PROBE.name}|{_ARGUMENTS.pattern})")
_ID = re.compile(r',\s*"id":\s*"[^"]*"')


class ToolTemplate:
    """See the module docstring.

    Args:
        render: writes messages by the template: (messages, tools=…, is_prompt=…).

    Attributes:
        format: how the model writes calls.
        writes_calls: whether the template writes calls, and what they return.
        writes_tools: whether it also tells the model of tools.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self.format: ToolFormat = FORMATS["json"]
        self.writes_tools = False
        self.writes_calls = False
        self._wants_text = False  # arguments of calls are texts to the template
        self._takes_several = True  # calls in one message
        self._example = _CALL_AS_TEXT  # how a call is written, without what ends the answer

    def try_out(self, end_texts: Sequence[str]) -> None:
        """Find out what the template writes, and set the attributes.

        Args:
            end_texts: texts of the tokens that end answers.
        """
        for self._wants_text in (False, True):
            answer = self._answer_found()
            found = _format_of(answer)
            if found is None:
                continue
            self.format, self.writes_calls = found, True
            self._example = _ID.sub("", answer).rstrip()
            for text in end_texts:
                self._example = self._example.removesuffix(text).rstrip()
            self.writes_tools = PROBE.name in self._tried([QUESTION], tools=[PROBE.as_template()])
            both = self._native([Message(ASSISTANT, "", (PROBE_CALL,) * 2).as_template()])
            self._takes_several = len(_ARGUMENTS.findall(self._tried([QUESTION, *both]))) == 2
            return

    def _answer_found(self) -> str:
        """Return a call as the template writes it; "" if not, or if no result can follow it."""
        asked = [QUESTION, *self._native([Message(ASSISTANT, "", (PROBE_CALL,)).as_template()])]
        result = Message(TOOL, RESULT, (), PROBE_CALL.call_id, PROBE.name).as_template()
        answered = self._tried([*asked, *self._native([result])], is_prompt=True)
        base = written_in(answered, self._tried(asked))
        if not base or RESULT not in answered[len(base) :]:
            return ""
        prompted = self._tried([QUESTION], is_prompt=True)
        said = self._tried([QUESTION, Message(ASSISTANT, RESULT).as_template(), QUESTION])
        # Prompts may begin a thought, which an answer that is past lacks: one of text tells where.
        return base[common_prefix(base, prompted, said) :]

    def _tried(self, messages: Sequence[Written], **options: Any) -> str:
        try:
            return self._render(messages, **{"is_prompt": False, **options})
        except InvalidTurnError:
            return ""

    # ------------------------------------------------------------------------------------ writing

    def written(
        self, messages: Sequence[Written], tools: Sequence[Written], roles: Sequence[str]
    ) -> tuple[list[Written], list[Written]]:
        """Return messages and tools as the template can write them.

        Args:
            messages: what is said, with calls and what they returned.
            tools: those that the model is to be told of; none where it was told before.
            roles: the roles that the template knows.
        """
        said = self._native(messages) if self.writes_calls else _as_texts(messages, roles)
        if not tools or self.writes_tools:
            return said, list(tools)
        return _instructed(said, self._instructions(tools), roles), []

    def asking(self, results: Sequence[Written]) -> list[Written]:
        """Return an answer that asks for what results return, as if it had been given."""
        calls = [
            {
                "type": "function",
                "id": result["tool_call_id"],
                "function": {"name": result["name"] or NAMELESS, "arguments": PROBE_CALL.values},
            }
            for result in results
        ]
        asked = calls if self._takes_several else calls[:1]
        return self._native([{"role": ASSISTANT, "content": "", "tool_calls": asked}])

    def closing_in(self, base: str) -> str:
        """Return what the template writes behind the last call of a text."""
        return _ARGUMENTS.split(base)[-1]

    def _native(self, messages: Sequence[Written]) -> list[Written]:
        found = messages if self._takes_several else _one_by_one(messages)
        return [self._native_message(message) for message in found]

    def _native_message(self, message: Written) -> Written:
        if "tool_call_id" in message:
            call_id = short_id(message["tool_call_id"])
            return {**message, "tool_call_id": call_id, "name": message["name"] or NAMELESS}
        if "tool_calls" not in message:
            return message
        return {**message, "tool_calls": [self._native_call(one) for one in message["tool_calls"]]}

    def _native_call(self, call: Written) -> Written:
        said = dict(call["function"])
        if self._wants_text:
            said["arguments"] = json.dumps(said["arguments"], ensure_ascii=False)
        return {**call, "id": short_id(call["id"]), "function": said}

    def _instructions(self, tools: Sequence[Written]) -> str:
        listed = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        example = _ARGUMENTS.sub(lambda _found: _ANY_ARGUMENTS, self._example)
        example = example.replace(PROBE.name, _ANY_NAME).strip()
        return _INSTRUCTIONS.format(tools="\n".join(listed), example=example)

    # ------------------------------------------------------------------------------------ forcing

    def grammar_of_call(self, tools: Sequence[Tool], special: Mapping[str, int]) -> Grammar:
        """Make the grammar of an answer that is one call of one of these tools.

        Args:
            tools: those that may be called.
            special: ids of special tokens that may be among what the template writes.
        """
        parts = _NAME_OR_ARGUMENTS.split(self._example)
        rules = [" ".join(_rule(parts, tool, special)) for tool in tools]
        return Grammar(GrammarKind.LARK, "start: " + " | ".join(rules))

    def heads_of_calls(self, names: Sequence[str]) -> dict[str, str]:
        """Return what such an answer has before a call's arguments, by the name of the tool.

        Returns:
            Nothing, if the name stands behind them: then they are nobody's before it has come.
        """
        parts = _NAME_OR_ARGUMENTS.split(self._example)
        before = list(takewhile(lambda part: not _ARGUMENTS.fullmatch(part), parts))
        if PROBE.name not in before and len(names) != 1:
            return {}
        return {
            name: "".join(name if part == PROBE.name else part for part in before) for name in names
        }


def _format_of(answer: str) -> ToolFormat | None:
    """Find the format that reads an answer as the call that it is; None: there is none."""
    if not _ARGUMENTS.search(answer):
        return None
    for found in FORMATS.values():
        calls = read_whole(found.reader({PROBE.name}, None), answer).calls
        if [(call.name, call.values) for call in calls] == [(PROBE.name, PROBE_CALL.values)]:
            return found
    return None


def short_id(call_id: str) -> str:
    """Return a call's id as every template takes it."""
    return hashlib.blake2b(call_id.encode()).hexdigest()[:ID_CHARACTERS]


def _rule(parts: Sequence[str], tool: Tool, special: Mapping[str, int]) -> Iterator[str]:
    """Yield the parts of a grammar's rule: a written call with another name and any arguments."""
    for part in parts:
        if part == PROBE.name:
            yield json.dumps(tool.name)
        elif _ARGUMENTS.fullmatch(part):
            yield json_rule(tool.schema, is_strict=tool.is_strict)
        else:
            yield from _literals(part, special)


def _literals(text: str, special: Mapping[str, int]) -> list[str]:
    """Write a text as literals of a grammar, special tokens in it by their ids."""
    names = "|".join(map(re.escape, special)) or r"(?!)"
    return [
        f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False)
        for part in re.split(f"({names})", text)
        if part
    ]


def _one_by_one(messages: Sequence[Written]) -> Iterator[Written]:
    """Yield messages with one call each, and behind it what that returned."""
    waiting = deque(messages)
    while waiting:
        message = waiting.popleft()
        calls = message.get("tool_calls", ())
        if not calls:
            yield message
        content = message["content"]
        for call in calls:
            yield {**message, "content": content, "tool_calls": [call]}
            content = ""
            results = list(takewhile(lambda one: "tool_call_id" in one, waiting))
            for result in [one for one in results if one["tool_call_id"] == call["id"]][:1]:
                waiting.remove(result)
                yield result


def _as_texts(messages: Sequence[Written], roles: Sequence[str]) -> list[Written]:
    """Write calls, and what they returned, as texts of messages."""
    found: list[Written] = []
    follows_result = False
    for message in messages:
        is_result = "tool_call_id" in message
        written = _as_text(message, roles)
        if follows_result and written["role"] == found[-1]["role"] == USER:
            content = f"{found[-1]['content']}\n\n{written['content']}"
            found[-1] = {**written, "content": content}  # templates may refuse two in a row
        else:
            found.append(written)
        follows_result = is_result
    return found


def _as_text(message: Written, roles: Sequence[str]) -> Written:
    content: str = message["content"]
    if "tool_call_id" in message:
        if TOOL in roles:
            return {"role": TOOL, "content": content}
        whose = message["name"] or "The function"
        return {"role": USER, "content": f"{whose} returned:\n{content}"}
    if not message.get("tool_calls"):
        return message
    called = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    return {"role": message["role"], "content": "\n".join([content, *called]).lstrip("\n")}


def _instructed(messages: list[Written], text: str, roles: Sequence[str]) -> list[Written]:
    """Put a text behind the system message, or where one would be."""
    first = messages[0]
    if first["role"] == SYSTEM:
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    if SYSTEM in roles:
        return [{"role": SYSTEM, "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
