"""How a model's chat template writes tools, calls of tools, and their results.

This is found out when the service starts: the template writes a call, and the format that reads it
back as that call is the model's. If the template writes no calls, or in a form that no format
reads, it gets plain texts instead: the tools, and how to call them, in the system message; past
calls in the answers that made them; results in messages of their own.

The KV cache works the same either way: tools stand at the beginning of a session, and results are
appended to it.
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
NAMELESS = "function"  # name of a result's tool if that is not known
ID_CHARACTERS = 9  # of a call's id: some templates accept no other length

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
    """Adapts tools, calls and results to a chat template.

    Args:
        render: renders messages with the template: (messages, tools=…, is_prompt=…).

    Attributes:
        format: how the model writes calls.
        writes_calls: whether the template writes calls and their results.
        writes_tools: whether it also lists the tools.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self.format: ToolFormat = FORMATS["json"]
        self.writes_tools = False
        self.writes_calls = False
        self._wants_text = False  # the template takes arguments of calls as JSON text, not objects
        self._takes_several = True  # the template takes several calls in one message
        self._example = _CALL_AS_TEXT  # how a call is written, without what ends the answer

    def try_out(self, end_texts: Sequence[str]) -> None:
        """Find out what the template writes, and set the attributes.

        Args:
            end_texts: texts of the tokens that end answers.
        """
        for self._wants_text in (False, True):
            answer = self._find_call()
            found = _format_of(answer)
            if found is None:
                continue
            self.format, self.writes_calls = found, True
            self._example = _ID.sub("", answer).rstrip()
            for text in end_texts:
                self._example = self._example.removesuffix(text).rstrip()
            self.writes_tools = PROBE.name in self._try_render(
                [QUESTION], tools=[PROBE.as_template()]
            )
            both = self._native([Message(ASSISTANT, "", (PROBE_CALL,) * 2).as_template()])
            self._takes_several = len(_ARGUMENTS.findall(self._try_render([QUESTION, *both]))) == 2
            return

    def _find_call(self) -> str:
        """Return a call as the template writes it; "" if it writes none, or no result behind it."""
        called = [QUESTION, *self._native([Message(ASSISTANT, "", (PROBE_CALL,)).as_template()])]
        result = Message(TOOL, RESULT, (), PROBE_CALL.call_id, PROBE.name).as_template()
        answered = self._try_render([*called, *self._native([result])], is_prompt=True)
        base = written_in(answered, self._try_render(called))
        if not base or RESULT not in answered[len(base) :]:
            return ""
        prompted = self._try_render([QUESTION], is_prompt=True)
        spoken = self._try_render([QUESTION, Message(ASSISTANT, RESULT).as_template(), QUESTION])
        # A prompt may begin a thought, which past answers lack: a past answer of text shows where
        # the answer itself begins.
        return base[common_prefix(base, prompted, spoken) :]

    def _try_render(self, messages: Sequence[Written], **options: Any) -> str:
        """Render messages; "" if the template refuses them."""
        try:
            return self._render(messages, **{"is_prompt": False, **options})
        except InvalidTurnError:
            return ""

    # ------------------------------------------------------------------------------------ writing

    def adapt(
        self, messages: Sequence[Written], tools: Sequence[Written], roles: Sequence[str]
    ) -> tuple[list[Written], list[Written]]:
        """Return messages and tools as the template can write them.

        Args:
            messages: the messages, with calls and their results.
            tools: the tools to list; none if the context lists them already.
            roles: the roles that the template knows.
        """
        adapted = self._native(messages) if self.writes_calls else _as_texts(messages, roles)
        if not tools or self.writes_tools:
            return adapted, list(tools)
        return _add_instructions(adapted, self._instructions(tools), roles), []

    def calling_answer(self, results: Sequence[Written]) -> list[Written]:
        """Make an answer with calls to which these results can be the response."""
        calls = [
            {
                "type": "function",
                "id": result["tool_call_id"],
                "function": {"name": result["name"] or NAMELESS, "arguments": PROBE_CALL.values},
            }
            for result in results
        ]
        taken = calls if self._takes_several else calls[:1]
        return self._native([{"role": ASSISTANT, "content": "", "tool_calls": taken}])

    def closing_in(self, base: str) -> str:
        """Return the text that the template writes behind the last call in `base`."""
        return _ARGUMENTS.split(base)[-1]

    def _native(self, messages: Sequence[Written]) -> list[Written]:
        """Return messages in the template's own form of calls and results."""
        found = messages if self._takes_several else _one_by_one(messages)
        return [self._native_message(message) for message in found]

    def _native_message(self, message: Written) -> Written:
        """Return a message whose calls, or whose call's id, have the template's form."""
        if "tool_call_id" in message:
            call_id = short_id(message["tool_call_id"])
            return {**message, "tool_call_id": call_id, "name": message["name"] or NAMELESS}
        if "tool_calls" not in message:
            return message
        return {
            **message,
            "tool_calls": [self._native_call(call) for call in message["tool_calls"]],
        }

    def _native_call(self, call: Written) -> Written:
        function = dict(call["function"])
        if self._wants_text:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "id": short_id(call["id"]), "function": function}

    def _instructions(self, tools: Sequence[Written]) -> str:
        """Return the text that lists tools and shows how to call them."""
        listed = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        example = _ARGUMENTS.sub(lambda _found: _ANY_ARGUMENTS, self._example)
        example = example.replace(PROBE.name, _ANY_NAME).strip()
        return _INSTRUCTIONS.format(tools="\n".join(listed), example=example)

    # ------------------------------------------------------------------------------------ forcing

    def grammar_of_call(self, tools: Sequence[Tool], special: Mapping[str, int]) -> Grammar:
        """Make the grammar of an answer that is one call of one of these tools.

        Args:
            tools: the tools that may be called.
            special: ids of special tokens that calls may be written with, by their texts.
        """
        parts = _NAME_OR_ARGUMENTS.split(self._example)
        rules = [" ".join(_rule(parts, tool, special)) for tool in tools]
        return Grammar(GrammarKind.LARK, "start: " + " | ".join(rules))

    def heads_of_calls(self, names: Sequence[str]) -> dict[str, str]:
        """Return the text before a call's arguments in such an answer, by the tool's name.

        Returns:
            {} if the template writes the name behind the arguments: until it comes, the tool is
            not known.
        """
        parts = _NAME_OR_ARGUMENTS.split(self._example)
        before = list(takewhile(lambda part: not _ARGUMENTS.fullmatch(part), parts))
        if PROBE.name not in before and len(names) != 1:
            return {}
        return {
            name: "".join(name if part == PROBE.name else part for part in before) for name in names
        }


def _format_of(answer: str) -> ToolFormat | None:
    """Find the format that reads an answer back as the probe's call; None: there is none."""
    if not _ARGUMENTS.search(answer):
        return None
    for found in FORMATS.values():
        calls = read_whole(found.reader({PROBE.name}, None), answer).calls
        if [(call.name, call.values) for call in calls] == [(PROBE.name, PROBE_CALL.values)]:
            return found
    return None


def short_id(call_id: str) -> str:
    """Return a short digest of a call's id, which every template accepts."""
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
    """Yield messages with one call each, and each call's result behind it."""
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
            results = list(takewhile(lambda later: "tool_call_id" in later, waiting))
            for result in [found for found in results if found["tool_call_id"] == call["id"]][:1]:
                waiting.remove(result)
                yield result


def _as_texts(messages: Sequence[Written], roles: Sequence[str]) -> list[Written]:
    """Write calls and their results as texts of messages."""
    found: list[Written] = []
    follows_result = False
    for message in messages:
        is_result = "tool_call_id" in message
        written = _as_text(message, roles)
        if follows_result and written["role"] == found[-1]["role"] == USER:
            # Templates may refuse two messages of the user in a row.
            content = f"{found[-1]['content']}\n\n{written['content']}"
            found[-1] = {**written, "content": content}
        else:
            found.append(written)
        follows_result = is_result
    return found


def _as_text(message: Written, roles: Sequence[str]) -> Written:
    """Write a message's calls, or its result, as text."""
    content: str = message["content"]
    if "tool_call_id" in message:
        if TOOL in roles:
            return {"role": TOOL, "content": content}
        name = message["name"] or "The function"
        return {"role": USER, "content": f"{name} returned:\n{content}"}
    if not message.get("tool_calls"):
        return message
    called = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    return {"role": message["role"], "content": "\n".join([content, *called]).lstrip("\n")}


def _add_instructions(messages: list[Written], text: str, roles: Sequence[str]) -> list[Written]:
    """Append a text to the system message, or make one; without that role, to the first message."""
    first = messages[0]
    if first["role"] == SYSTEM:
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    if SYSTEM in roles:
        return [{"role": SYSTEM, "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
