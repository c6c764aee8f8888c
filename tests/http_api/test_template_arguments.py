"""Chat template arguments and message names, by the official clients.

The test model's template writes them out, and gRPC shows which tokens a turn began with.
"""

from contextlib import AsyncExitStack

import openai
import pytest
from transformers import AutoTokenizer

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.serving.grpc_status import InvalidInputError
from tests.argument_templates import EFFORTFUL, NAMED
from tests.http_api.conftest import MODEL
from tests.http_api.test_chat import ask, text_of
from tests.http_api.test_listening import local_client
from tests.http_api.test_thoughts import anthropic_client
from tests.inference_processes import InferenceProcess, wait_kvd_state
from tests.integration.test_chat_command import run_piped
from tests.processes import KvdProcess
from tests.scripted_model import build_scripted_model, last_of_prompt
from tests.tool_templates import tokenizer_of

SAID = ["Hello ", "there."]
QUESTION = {"role": "user", "content": "What is a tüür?"}
LONG = {"role": "user", "content": "What is a tüür? " * 30}  # some blocks
OPTIONS = {"model": "model", "temperature": 0}
UNTHINKING = {"chat_template_kwargs": {"enable_thinking": False}}
AFTER_THOUGHT = "Well."  # where the template has written an empty one


def next_messages(answer, question=QUESTION):
    """Return the conversation with its answer, as the client sends it back, and a question."""
    return [{"role": "assistant", "content": text_of(answer)}, question]


class TemplateService:
    """The service of a model whose template writes its arguments."""

    def __init__(self, directory, family, kvd=None, environ=None):
        tokenizer = tokenizer_of(family)
        thoughtless = tokenizer.convert_tokens_to_ids("</think>")
        script = {last_of_prompt(tokenizer): SAID, thoughtless: [AFTER_THOUGHT]}
        model = build_scripted_model(directory / "model", tokenizer, script, family.ends[-1])
        self.socket = directory / "openai.sock"
        flags = ["--openai", f"unix:{self.socket}"]
        runtime_dir = kvd and kvd.runtime_dir
        self.process = InferenceProcess(model, directory, runtime_dir, flags, environ or {})
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    async def inputs(self, answer):
        """Return the beginnings of the turns of an answer's session."""
        session_id = answer.model_extra["session_id"]
        async with self.process.client() as client:
            session = await client.get_session(session_id, with_turns=True)
        return [self.tokenizer.decode(turn.input_ids) for turn in session.turn_records]


async def test_arguments_are_part_of_the_history(short_dir):
    """The same arguments find the history, others do not; the prefix of an answer is per turn.

    Computed history is read from kvd.
    """
    kvd = KvdProcess(short_dir / "kvd", ("--dram", "64MB", "--ssd", "64MB"))
    told = TemplateService(short_dir, EFFORTFUL, kvd)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(kvd.stop)
        await kvd.start()
        await stack.enter_async_context(told.process)
        client = await stack.enter_async_context(local_client(told.socket))
        grpc_client = await stack.enter_async_context(told.process.client())
        await wait_kvd_state(grpc_client, "attached")

        async def chat(messages, **fields):
            return await client.chat.completions.create(messages=messages, **OPTIONS, **fields)

        plain = await chat([LONG])
        high = await chat([LONG], reasoning_effort="high")
        assert "Effort: medium" in (await told.inputs(plain))[0]
        assert "Effort: high" in (await told.inputs(high))[0]
        longer = [LONG, *next_messages(high)]
        again = await chat(longer, reasoning_effort="high", extra_body=UNTHINKING)
        assert again.model_extra["session_id"] == high.model_extra["session_id"]
        first, second = await told.inputs(again)
        assert first.startswith("<|im_start|>system\nEffort: high")
        assert "Effort" not in second  # which is only the new part
        assert second.endswith("<|im_start|>assistant\n<think></think>")
        assert text_of(again) == AFTER_THOUGHT
        cached = again.usage.prompt_tokens_details.cached_tokens
        assert cached >= high.usage.prompt_tokens // 2
        usual = await chat(longer, reasoning_effort="medium")  # which the template treats as none
        assert usual.model_extra["session_id"] == plain.model_extra["session_id"]
        low = await chat(longer, extra_body={"chat_template_kwargs": {"reasoning_effort": "low"}})
        (whole,) = await told.inputs(low)
        assert "Effort: low" in whole
        assert whole.count("<|im_start|>user") == 2


async def test_a_session_that_is_named_keeps_its_arguments(short_dir):
    """Without arguments it uses its own; other ones are refused, for its responses too."""
    told = TemplateService(short_dir, EFFORTFUL)
    async with told.process, local_client(told.socket) as client:
        named = {"session_id": "s1"}
        effort = {"reasoning_effort": "low"}
        chat = client.chat.completions.create
        await chat(messages=[QUESTION], **OPTIONS, **effort, extra_body=named)
        second = await chat(messages=[QUESTION], **OPTIONS, extra_body=named)
        assert "Effort: low" in (await told.inputs(second))[0]
        with pytest.raises(openai.BadRequestError, match=r"the conversation differently.*or none"):
            await chat(messages=[QUESTION], **OPTIONS, reasoning_effort="high", extra_body=named)
        asked = {"input": "What?", **OPTIONS}
        first = await client.responses.create(**asked, reasoning={"effort": "high"})
        assert first.reasoning.effort == "high"
        assert "Effort: high" in (await told.inputs(first))[0]
        for reasoning in ({"effort": "high"}, {}):
            following = await client.responses.create(
                **asked, previous_response_id=first.id, reasoning=reasoning
            )
            assert following.output_text == "".join(SAID)
        with pytest.raises(openai.BadRequestError, match="the conversation differently"):
            await client.responses.create(
                **asked, previous_response_id=first.id, reasoning={"effort": "low"}
            )


async def test_an_operators_arguments_apply_to_every_client(short_dir):
    """For every client; a request's count first, and Anthropic's clients can disable thinking."""
    environ = {"INFERENCE_MODEL__CHAT_TEMPLATE_KWARGS": '{"reasoning_effort": "low"}'}
    told = TemplateService(short_dir, EFFORTFUL, environ=environ)
    async with (
        told.process,
        local_client(told.socket) as client,
        anthropic_client(told.socket) as other,
        told.process.client() as grpc_client,
    ):
        usual = await client.chat.completions.create(messages=[QUESTION], **OPTIONS)
        assert "Effort: low" in (await told.inputs(usual))[0]
        own = await client.chat.completions.create(
            messages=[QUESTION], **OPTIONS, reasoning_effort="max"
        )
        assert "Effort: max" in (await told.inputs(own))[0]
        message = await other.messages.create(
            model="model", max_tokens=5, messages=[QUESTION], thinking={"type": "disabled"}
        )
        assert message.content[0].text == AFTER_THOUGHT
        asked = [pb.ChatMessage(**QUESTION)]
        turn = await grpc_client.submit(turn_request(asked, "g1"))
        assert turn.text == "".join(SAID)
        other_chat = pb.ChatMessages(template_arguments='{"reasoning_effort": "high"}')
        with pytest.raises(InvalidInputError, match="the conversation differently"):
            await grpc_client.submit(turn_request(asked, "g1", chat=other_chat))
        chat = pb.ChatMessages(template_arguments='{"enable_thinking": false}')
        turn = await grpc_client.submit(turn_request(asked, "g1", chat=chat))
        assert turn.text == AFTER_THOUGHT


async def test_template_arguments_are_counted(short_dir):
    """As the turn would be read; without the generation prompt on request."""
    told = TemplateService(short_dir, EFFORTFUL)
    async with told.process, local_client(told.socket) as client:

        async def tokens(**fields):
            found = await client.post(
                "http://localhost/tokenize",
                body={"messages": [QUESTION], **fields},
                cast_to=object,
            )
            return told.tokenizer.decode(found["tokens"])

        assert (await tokens()).endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert (await tokens(**UNTHINKING)).endswith("<think></think>")
        low = await tokens(chat_template_kwargs={"reasoning_effort": "low"})
        assert low == (await tokens()).replace("medium", "low")
        bare = await tokens(add_generation_prompt=False)
        assert bare + "<|im_start|>assistant\n" == await tokens()
        begun = {"continue_final_message": True, "add_generation_prompt": False}
        messages = [QUESTION, {"role": "assistant", "content": "Well, "}]
        assert await tokens(messages=messages, **begun) == await tokens() + "Well, "


async def test_names_are_part_of_a_history_if_the_template_writes_them(short_dir):
    """In questions; an answer's author is known. Names that are not written do not count."""
    ann = {**QUESTION, "name": "Ann"}
    told = TemplateService(short_dir, NAMED)
    async with told.process, local_client(told.socket) as client:

        async def chat(*messages):
            return await client.chat.completions.create(messages=[*messages], **OPTIONS)

        first = await chat(ann)
        assert (await told.inputs(first))[0].startswith("<|im_start|>user <|Ann\n")
        answer, question = next_messages(first, ann)
        other = await chat(QUESTION, answer, question)
        assert other.model_extra["session_id"] != first.model_extra["session_id"]
        second = await chat(ann, {**answer, "name": "model"}, question)
        assert second.model_extra["session_id"] == first.model_extra["session_id"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_template_may_ignore_all_arguments(api, opening):
    """Arguments are accepted without effect; computed history is read from the cache."""
    told = {"chat_template_kwargs": {"enable_thinking": False, "style": [1, {"a": "<|end|>"}]}}
    system, question = opening
    async with api.client() as client:
        first = await ask(client, opening, extra_body=told, reasoning_effort="low")
        longer = [system, {**question, "name": "Ann"}, *next_messages(first, question)]
        second = await ask(client, longer)
        third = await ask(client, [*longer, *next_messages(second, question)], extra_body=told)
        for wrong, said in (
            ({"tools": []}, "argument 'tools': leave it out"),
            ({"a b": 1}, "is not a valid name of a chat template's argument"),
        ):
            with pytest.raises(openai.BadRequestError, match=said) as refused:
                await ask(client, opening, extra_body={"chat_template_kwargs": wrong})
            assert refused.value.param == "chat_template_kwargs"
    sessions = {answer.model_extra["session_id"] for answer in (first, second, third)}
    assert len(sessions) == 1
    for before, after in ((first, second), (second, third)):
        cached = after.usage.prompt_tokens_details.cached_tokens
        assert cached >= before.usage.prompt_tokens // 2
    assert first.model == MODEL


async def test_the_terminal_sends_template_arguments(short_dir):
    """`inference-svc chat` sends them with each question."""
    told = TemplateService(short_dir, EFFORTFUL)
    async with told.process:
        at = ("chat", "--address", told.process.address)
        code, out, err = await run_piped(*at, given="What is a tüür?\n")
        assert (code, out.decode(), err) == (0, "".join(SAID) + "\n", "")
        unthinking = ("--template-argument", "enable_thinking=false")
        code, out, err = await run_piped(*at, *unthinking, given="What is a tüür?\n")
        assert (code, out.decode(), err) == (0, AFTER_THOUGHT + "\n", "")
        code, out, err = await run_piped(*at, "--template-argument", "tools=[]", given="Hello\n")
        assert (code, out) == (2, b"")
        assert "sets the chat template's argument 'tools'" in err
