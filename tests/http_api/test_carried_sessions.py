"""A named session continues on any server that has its transcript, in all APIs.

Two services of one model, without kvd, each with its own memory: one answers, and its transcripts
are copied to the other, which does not know the conversation. Clients send the whole conversation
each time.
"""

import shutil

import anthropic
import openai
import pytest

from tests.http_api.test_listening import local_client
from tests.http_api.test_thoughts import ANSWERS, OPTIONS, THOUGHT, anthropic_client
from tests.inference_processes import InferenceProcess
from tests.scripted_model import build_scripted_model, last_of_prompt
from tests.tool_templates import FAMILIES, tokenizer_of

QUESTION = {"role": "user", "content": "What is a tüür?"}
MORE = {"role": "user", "content": "And two?"}
LENGTH = 12  # tokens of an answer
TOOL = {"name": "look_up", "description": "Looks a word up."}
NO_PARAMETERS = {"type": "object", "properties": {}}
CALL = ["<tool_call>", '{"name": "look_up", "arguments": {}}', "</tool_call>"]
REFUSED = (openai.ConflictError, anthropic.ConflictError)


class Server:
    """One service and its clients."""

    def __init__(self, model, directory):
        directory.mkdir()
        self._socket = directory / "openai.sock"
        self.process = InferenceProcess(
            model, directory, None, ["--openai", f"unix:{self._socket}"]
        )
        self._sessions = directory / "state" / "sessions"

    def openai(self):
        return local_client(self._socket).with_options(max_retries=0)

    def anthropic(self):
        return anthropic_client(self._socket).with_options(max_retries=0)

    async def num_turns(self, session_id):
        async with self.process.client() as client:
            return (await client.get_session(session_id)).turns

    def transcripts(self):
        """Return its transcripts: a turn is on disk before its answer ends."""
        return {path.name: path.read_bytes() for path in self._sessions.glob("*.jsonl")}

    def take(self, transcripts):
        """Copy these transcripts before the service starts."""
        self._sessions.mkdir(mode=0o700, parents=True)
        for name, data in transcripts.items():
            (self._sessions / name).write_bytes(data)


class Chat:
    """A chat by OpenAI's client; it sends thoughts back."""

    name = "chat"

    def __init__(self, tools=()):
        self.said = [QUESTION]
        functions = [{**tool, "parameters": NO_PARAMETERS} for tool in tools]
        self._tools = [{"type": "function", "function": function} for function in functions]

    async def ask(self, server):
        """Ask the next question and return the answer."""
        options = {**OPTIONS, "max_tokens": LENGTH, "extra_body": {"session_id": self.name}}
        more = {"tools": self._tools} if self._tools else {}
        async with server.openai() as client:
            return await client.chat.completions.create(messages=self.said, **options, **more)

    def hear(self, answer):
        """Append an answer to the conversation."""
        message = answer.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "a word"}
            for call in message.tool_calls or ()
        ]
        self.said = [*self.said, message.to_dict(), *results, MORE]

    def heard(self, answer):
        """Return the text of an answer, and its number of cached tokens."""
        return answer.choices[0].message.content, answer.usage.prompt_tokens


class ForgetfulChat(Chat):
    """A chat whose client drops thoughts."""

    name = "forgetful"

    def hear(self, answer):
        super().hear(answer)
        for message in self.said:
            message.pop("reasoning_content", None)


class Responses:
    """Responses whose requests have the whole input."""

    name = "responses"

    def __init__(self, tools=()):
        self.said = [QUESTION]
        self._tools = [{**tool, "type": "function", "parameters": NO_PARAMETERS} for tool in tools]

    async def ask(self, server):
        options = {**OPTIONS, "max_output_tokens": LENGTH, "tools": self._tools}
        options["extra_body"] = {"session_id": self.name}
        async with server.openai() as client:
            return await client.responses.create(input=self.said, **options)

    def hear(self, answer):
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "a word"}
            for item in answer.output
            if item.type == "function_call"
        ]
        self.said = [*self.said, *(item.to_dict() for item in answer.output), *results, MORE]

    def heard(self, answer):
        return answer.output_text, answer.usage.input_tokens


class Messages:
    """Messages by Anthropic's client; it sends thoughts back."""

    name = "messages"

    def __init__(self, tools=()):
        self.said = [QUESTION]
        self._tools = [{**tool, "input_schema": NO_PARAMETERS} for tool in tools]

    async def ask(self, server):
        more = {"tools": self._tools} if self._tools else {}
        body = {"session_id": self.name, "temperature": 0}
        async with server.anthropic() as client:
            return await client.messages.create(
                model="model", messages=self.said, max_tokens=LENGTH, extra_body=body, **more
            )

    def hear(self, answer):
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "a word"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        more = {"role": "user", "content": [*results, {"type": "text", "text": MORE["content"]}]}
        self.said = [*self.said, answer.to_param(), more]

    def heard(self, answer):
        texts = [block.text for block in answer.content if block.type == "text"]
        return texts, answer.usage.input_tokens


def thinking_model(directory):
    """Build a model that always thinks, then calls a tool."""
    family = FAMILIES["qwen3"]
    tokenizer = tokenizer_of(family)
    script = {last_of_prompt(tokenizer): [*ANSWERS["qwen3"][:4], *CALL]}
    return build_scripted_model(directory / "model", tokenizer, script, family.ends[-1])


async def check_carried(model, directory, talks):
    """Check that a conversation continues on the other server as on the first.

    It then continues once more, and a different history does not.
    """
    here, there = (Server(model, directory / name) for name in ("here", "there"))
    async with here.process:
        for talk in talks:
            talk.hear(await talk.ask(here))
        transcripts = here.transcripts()
        as_here = [talk.heard(await talk.ask(here)) for talk in talks]
    assert len(transcripts) == len(talks)
    there.take(transcripts)
    async with there.process:
        for talk in talks:
            first, *rest = talk.said
            talk.said = [{**first, "content": "What is a door?"}, *rest]
            with pytest.raises(REFUSED, match="do not begin with them"):
                await talk.ask(there)
            talk.said = [first, *rest]
        answers = [await talk.ask(there) for talk in talks]
        heard = [talk.heard(answer) for talk, answer in zip(talks, answers, strict=True)]
        assert heard == as_here
        for talk, answer in zip(talks, answers, strict=True):
            assert answer.model_extra["session_id"] == talk.name
            talk.hear(answer)
            await talk.ask(there)
            assert await there.num_turns(talk.name) == 3


async def test_a_conversation_is_carried(tiny_model, short_dir):
    """Each text depends on all the texts before it."""
    model = shutil.copytree(tiny_model, short_dir / "model")
    await check_carried(model, short_dir, [Chat(), Responses(), Messages()])


async def test_thoughts_and_calls_are_carried(short_dir):
    """Clients may send thoughts back or not; calls come with their tool's result."""
    kinds = (Chat, ForgetfulChat, Responses, Messages)
    talks = [kind([TOOL]) for kind in kinds]
    await check_carried(thinking_model(short_dir), short_dir, talks)
    assert THOUGHT in str(talks[0].said)
    assert THOUGHT not in str(talks[1].said)
    assert all("look_up" in str(talk.said) for talk in talks)
