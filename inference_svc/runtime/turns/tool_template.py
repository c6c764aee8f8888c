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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inference_svc.core.chat import ASSISTANT, SYSTEM, TOOL, USER, Message, Tool, ToolCall
from inference_svc.core.errors import InvalidTurnError
from inference_svc.core.grammar import Grammar, GrammarKind
from inference_svc.core.tools.reader import read_whole
from inference_svc.core.tools.registry import FORMATS, ToolFormat
from inference_svc.core.turn_window import common_prefix

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

# Arguments have the blanks that templates write, and no others: small models would write them on.
_AS_TEMPLATES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_INSTRUCTIONS = """\
# Tools

You can call the functions below; their parameters are JSON schemas.

{tools}

To call one, answer with nothing but what follows, once for each call:

{example}

What a function returns comes in the next message."""
_EXAMPLE = '{"name": "the function\'s name", "arguments": {"a parameter": "its value"}}'
_CALL_AS_TEXT = f'{{"name": "{PROBE.name}", "arguments": {PROBE_CALL.arguments}}}'
_ARGUMENTS = re.compile(r'\{\s*"word":\s*"echo 51f7"\s*\}')
_NAME_OR_ARGUMENTS = re.compile(f"({PROBE.name}|{_ARGUMENTS.pattern})")
_ID = re.compile(r',\s*"id":\s*"[^"]*"')


class ToolTemplate:
    """See the module docstring.

    Args:
        render: writes messages by the template: (messages, tools=…, is_prompt=…).

    Attributes:
        format: how the model writes calls.
        writes_tools: whether the template tells the model of tools.
        writes_calls: whether it writes calls and what they return.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self.format: ToolFormat = FORMATS["json"]
        self.writes_tools = False
        self.writes_calls = False
        self._wants_text = False  # arguments of calls are texts to the template
        self._takes_several = False  # calls in one message
        self._example = ""  # a call as the template writes it, with what ends the answer

    def try_out(self) -> None:
        """Find out what the template writes, and set the attributes."""
        tools = [PROBE.as_template()]
        self.writes_tools = PROBE.name in self._tried([QUESTION], tools=tools)
        for wants_text in (False, True):
            self._wants_text = wants_text
            found = self._format_found()
            if found is not None:
                self.format, self.writes_calls = found, True
                self._takes_several = True
                both = self._native([Message(ASSISTANT, "", (PROBE_CALL,) * 2).as_template()])
                self._takes_several = bool(self._tried([QUESTION, *both]))
                return

    def _format_found(self) -> ToolFormat | None:
        """Find the format that reads what the template makes of a call; None: there is none."""
        asked = [QUESTION, *self._native([Message(ASSISTANT, "", (PROBE_CALL,)).as_template()])]
        result = self._native([Message(TOOL, RESULT, (), "c0ffee123", PROBE.name).as_template()])
        base = self._tried(asked)
        answered = self._tried([*asked, *result], is_prompt=True)
        if not answered.startswith(base) or RESULT not in answered[len(base) :]:
            return None
        start = common_prefix(base, self._tried([QUESTION], is_prompt=True))
        self._example = base[start:]
        if not _ARGUMENTS.search(self._example):
            return None
        for found in FORMATS.values():
            calls = read_whole(found.reader({PROBE.name}, None), self._example).calls
            if [(call.name, call.values) for call in calls] == [(PROBE.name, PROBE_CALL.values)]:
                return found
        return None

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
                "function": {"name": result["name"], "arguments": PROBE_CALL.values},
            }
            for result in results
        ]
        asked = calls if self._takes_several else calls[:1]
        return self._native([{"role": ASSISTANT, "content": "", "tool_calls": asked}])

    def closing_in(self, base: str) -> str:
        """Return what the template writes behind the last call of a text."""
        return _ARGUMENTS.split(base)[-1]

    def _native(self, messages: Sequence[Written]) -> list[Written]:
        return [written for message in messages for written in self._native_message(message)]

    def _native_message(self, message: Written) -> Iterator[Written]:
        if "tool_call_id" in message:
            call_id = short_id(message["tool_call_id"])
            yield {**message, "tool_call_id": call_id, "name": message["name"] or NAMELESS}
            return
        calls = [self._native_call(call) for call in message.get("tool_calls", ())]
        if not calls:
            yield message
        elif self._takes_several:
            yield {**message, "tool_calls": calls}
        else:
            for number, call in enumerate(calls):
                yield {
                    **message,
                    "content": "" if number else message["content"],
                    "tool_calls": [call],
                }

    def _native_call(self, call: Written) -> Written:
        said = dict(call["function"])
        if self._wants_text:
            said["arguments"] = json.dumps(said["arguments"], ensure_ascii=False)
        return {**call, "id": short_id(call["id"]), "function": said}

    def _instructions(self, tools: Sequence[Written]) -> str:
        listed = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        example = self._example.strip() if self.writes_calls else _EXAMPLE
        return _INSTRUCTIONS.format(tools="\n".join(listed), example=example)

    # ------------------------------------------------------------------------------------ forcing

    def grammar_of_call(
        self, tools: Sequence[Tool], special: Mapping[str, int], end_texts: Sequence[str]
    ) -> Grammar:
        """Make the grammar of an answer that is one call of one of these tools.

        Args:
            tools: those that may be called.
            special: ids of special tokens that may be among what the template writes.
            end_texts: texts of the tokens that end answers.
        """
        example = _ID.sub("", self._example if self.writes_calls else _CALL_AS_TEXT).rstrip()
        for text in end_texts:
            example = example.removesuffix(text).rstrip()
        parts = _NAME_OR_ARGUMENTS.split(example)
        rules = [" ".join(_rule(parts, tool, special)) for tool in tools]
        return Grammar(GrammarKind.LARK, "start: " + " | ".join(rules))


def short_id(call_id: str) -> str:
    """Return a call's id as every template takes it."""
    return hashlib.blake2b(call_id.encode()).hexdigest()[:ID_CHARACTERS]


def _rule(parts: Sequence[str], tool: Tool, special: Mapping[str, int]) -> Iterator[str]:
    """Yield the parts of a grammar's rule: a written call with another name and any arguments."""
    for part in parts:
        if part == PROBE.name:
            yield json.dumps(tool.name)
        elif _ARGUMENTS.fullmatch(part):
            yield "%json " + json.dumps({**tool.schema, "x-guidance": _AS_TEMPLATES})
        else:
            yield from _literals(part, special)


def _literals(text: str, special: Mapping[str, int]) -> list[str]:
    """Write a text as literals of a grammar, special tokens in it by their ids."""
    if not text:
        return []
    if not special:
        return [json.dumps(text, ensure_ascii=False)]
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    return [
        f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    ]


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
