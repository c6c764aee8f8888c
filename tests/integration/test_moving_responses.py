"""Responses can be continued by their ids at any of the servers that share a store."""

from contextlib import contextmanager

import openai
import pytest

from tests.examples.pairs import check_identical
from tests.http_api.conftest import MODEL
from tests.http_api.test_listening import local_client
from tests.integration.test_unnamed_conversations import LENGTH, SAID, running

TENANTS = '[server]\nsocket_tenants = ["default", "other"]\n'
BRIEF = "Be brief."
LOOK_UP = {
    "type": "function",
    "name": "look_up",
    "parameters": {
        "type": "object",
        "properties": {"word": {"enum": ["tier", "turn"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
}


def client_of(server, **options):
    return local_client(server.socket).with_options(max_retries=0, **options)


async def ask(server, said, **options):
    """Create a greedy response of its full length."""
    given = {"max_output_tokens": LENGTH, "extra_body": {"ignore_eos": True}, **options}
    async with client_of(server) as client:
        return await client.responses.create(model=MODEL, input=said, **given)


async def show_response(server, response_id, **options):
    """Return a response and its input, as a server shows them."""
    async with client_of(server, **options) as client:
        response = await client.responses.retrieve(response_id)
        items = [one async for one in client.responses.input_items.list(response_id)]
    return response.model_dump(), [item.model_dump() for item in items]


async def delete(server, response_id):
    async with client_of(server) as client:
        await client.responses.delete(response_id)


async def check_unknown(server, response_id, **options):
    """Check that a server does not know a response: it shows nothing, and no turn continues it."""
    async with client_of(server, **options) as client:
        responses = client.responses
        for asked in (
            responses.retrieve(response_id),
            responses.input_items.list(response_id),
            responses.delete(response_id),
        ):
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                await asked
        with pytest.raises(openai.BadRequestError, match="there is no response"):
            await responses.create(model=MODEL, input="Go on.", previous_response_id=response_id)


@contextmanager
def silent(store):
    """Make a store unreadable and unwritable inside the block."""
    aside = store.with_name("aside")
    store.rename(aside)
    store.touch()
    yield
    store.unlink()
    aside.rename(store)


async def test_a_response_can_be_continued_when_its_server_is_lost(tiny_model, short_dir, oracle):
    """It is shown unchanged, and continues in its session; every answer equals recomputation."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, _):
        begun = await ask(first, SAID, instructions=BRIEF, metadata={"a": "b"})
        gone_on = await ask(first, "And?", previous_response_id=begun.id, instructions=BRIEF)
        was_shown = [await show_response(first, one.id) for one in (begun, gone_on)]
        await first.lose()
        last = gone_on
        for said in ("So?", "And then?"):
            last = await ask(second, said, previous_response_id=last.id, instructions=BRIEF)
        assert [await show_response(second, one.id) for one in (begun, gone_on)] == was_shown
        branch = await ask(second, "Or else?", previous_response_id=begun.id)
        sessions = [one.model_extra["session_id"] for one in (begun, last, branch)]
        assert sessions[0] == sessions[1] != sessions[2]
        assert [await second.num_turns(one) for one in sessions] == [4, 4, 2]
        with pytest.raises(openai.BadRequestError, match="differ from those of the conversation"):
            await ask(second, "Go on.", previous_response_id=last.id, instructions="Be long.")
        await check_identical({second.name: second}, oracle, sessions)


async def test_branches_work_across_servers(tiny_model, short_dir, oracle):
    """They may begin at an earlier answer, or at one that a server takes for the last."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, _):
        made = [await ask(first, SAID)]
        for server in (second, first, first, second):
            said = f"Go on at {server.name}."
            made.append(await ask(server, said, previous_response_id=made[-1].id))
        names = {one.model_extra["session_id"] for one in made}
        (name,) = names
        assert await second.num_turns(name) == 5
        for before, num_turns in ((made[0], 3), (made[3], 6)):
            other = await ask(first, "Or else?", previous_response_id=before.id)
            other = await ask(second, "And then?", previous_response_id=other.id)
            branch = other.model_extra["session_id"]
            names.add(branch)
            assert await second.num_turns(branch) == num_turns
        assert len(names) == 3
        await check_identical({second.name: second}, oracle, names)


async def test_tool_calls_are_answered_elsewhere(tiny_model, short_dir):
    """They are identified by the ids that their client got."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, _):
        asks = {"tool_choice": "required", "max_output_tokens": 100, "extra_body": {}}
        called = await ask(first, "Look it up.", tools=[LOOK_UP], **asks)
        (call,) = [item for item in called.output if item.type == "function_call"]
        assert await show_response(second, called.id) == await show_response(first, called.id)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "A level."}
        offered = {"tools": [LOOK_UP], "tool_choice": "none"}
        told = await ask(second, [result], previous_response_id=called.id, **offered)
        here = await ask(first, [result], previous_response_id=called.id, **offered)
        assert told.output_text == here.output_text
        assert told.usage.input_tokens == here.usage.input_tokens


async def test_what_is_deleted_is_deleted_everywhere(tiny_model, short_dir):
    """Any server may have created it; its session is deleted with the last unnamed response."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, _):
        begun = await ask(first, SAID)
        name = begun.model_extra["session_id"]
        second_one = await ask(second, "And?", previous_response_id=begun.id)
        await delete(second, begun.id)
        await check_unknown(second, begun.id)
        async with client_of(first) as client:
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(begun.id)
        await check_unknown(first, begun.id)
        assert (await show_response(first, second_one.id))[0]["id"] == second_one.id
        await delete(first, second_one.id)
        assert await first.num_turns(name) is None
        assert await second.num_turns(name) is None, "gRPC asks the store"
        for server in (first, second):
            await check_unknown(server, second_one.id)


async def test_other_tenants_cannot_read_a_response(tiny_model, short_dir):
    """A response that was not to be stored cannot be read at all."""
    async with running(tiny_model, short_dir, 100, 100, more=TENANTS) as (first, second, _):
        begun = await ask(first, SAID)
        await check_unknown(second, begun.id, project="other")
        assert (await show_response(second, begun.id))[0]["id"] == begun.id
        passing = await ask(first, SAID, store=False)
        for server in (first, second):
            await check_unknown(server, passing.id)


async def test_unknown_responses_while_the_store_is_silent(tiny_model, short_dir):
    """Local ones continue; for others clients are told to retry, and then they are found."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, store):
        begun, other = [await ask(first, SAID) for _ in range(2)]
        await show_response(second, begun.id)
        with silent(store):
            last = await ask(second, "Go on.", previous_response_id=begun.id)
            assert (await show_response(second, last.id))[0]["id"] == last.id
            for asked in (
                show_response(second, other.id),
                ask(second, "Go on.", previous_response_id=other.id),
                delete(second, begun.id),
            ):
                with pytest.raises(openai.InternalServerError, match="is not known") as refused:
                    await asked
                assert refused.value.status_code == 503
                assert refused.value.response.headers["Retry-After"]
                assert refused.value.code == "transcript_unavailable"
        await second.until_caught_up()
        assert await show_response(first, last.id) == await show_response(second, last.id)
        assert await ask(second, "Go on.", previous_response_id=other.id)
