"""Conversations of OpenAI's API continue at any of the servers that share a store."""

import asyncio

import openai
import pytest

from inference_svc.client import turn_request
from tests.examples.pairs import check_identical
from tests.http_api.talks import ask, list_items, question, refusal, session_of, texts
from tests.integration.test_moving_responses import client_of, silent
from tests.integration.test_unnamed_conversations import SAID, running
from tests.kvd_polling import eventually

LONG = {"max_output_tokens": 400, "extra_body": {"ignore_eos": True}}


async def messages_at(server, conversation):
    """Return the messages of a conversation as a server lists them."""
    async with client_of(server) as client:
        return texts(await list_items(client, conversation))


async def respond_at(server, conversation, given, **options):
    """Create a response in a conversation, at a server."""
    async with client_of(server) as client:
        return await ask(client, conversation, given, **options)


async def check_unknown(server, conversation):
    """Check that a server does not know a conversation: it cannot be read or continued."""
    async with client_of(server) as client:
        kept = client.conversations
        for wanted in (
            kept.retrieve(conversation.id),
            kept.items.list(conversation.id),
            kept.update(conversation.id, metadata={}),
            kept.items.create(conversation.id, items=[question("Hi")]),
            kept.delete(conversation.id),
            ask(client, conversation, "Go on."),
        ):
            error = await refusal(wanted)
            assert (error.status_code, error.code) == (404, "conversation_not_found")


async def test_a_conversation_continues_when_its_server_is_lost(tiny_model, short_dir, oracle):
    """Before that it goes back and forth, in one session; every answer equals recomputation."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, _):
        async with client_of(first) as client:
            made = await client.conversations.create(items=[question(SAID)], metadata={"for": "é"})
        answers = [await respond_at(first, made, "One?", instructions="Be brief.")]
        async with client_of(second) as client:
            assert await client.conversations.retrieve(made.id) == made
            assert texts(await list_items(client, made)) == [SAID, "One?", answers[0].output_text]
            await client.conversations.items.create(made.id, items=[question("Two!")])
        answers += [await respond_at(server, made, "And?") for server in (second, first)]
        said = await messages_at(first, made)
        assert said == await messages_at(second, made)
        assert said[3:] == ["Two!", "And?", answers[1].output_text, "And?", answers[2].output_text]
        async with client_of(first) as client:
            item = (await list_items(client, made))[-1]
            await client.conversations.items.delete(item["id"], conversation_id=made.id)
        await first.lose()
        answers.append(await respond_at(second, made, "So?"))
        assert (await messages_at(second, made))[-3:] == ["And?", "So?", answers[3].output_text]
        sessions = [session_of(answer) for answer in answers]
        assert sessions[:3] == [made.id] * 3
        assert sessions[3] != made.id, "it has read what was deleted"
        assert await second.num_turns(sessions[3]) == 3
        await check_identical({second.name: second}, oracle, sessions[3:])


async def test_what_is_deleted_is_deleted_everywhere(tiny_model, short_dir):
    """It is deleted by its id, or by its session; its responses are deleted with it."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, _):
        async with client_of(first) as client:
            made = [await client.conversations.create() for _ in range(3)]
        answer = await respond_at(first, made[0], "Hi")
        await respond_at(second, made[1], "Hi")
        async with client_of(second) as client:
            await client.conversations.delete(made[0].id)
            await client.conversations.delete(made[2].id)
        async with first.service.client() as client:
            await client.delete_session(made[1].id)
        for server in (first, second):
            for conversation in made:
                await check_unknown(server, conversation)
                assert await server.num_turns(conversation.id) is None
            async with client_of(server) as client:
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve(answer.id)


async def test_one_of_two_simultaneous_turns_is_refused(tiny_model, short_dir, oracle):
    """The accepted turn is stored once; the other client asks again, and its turn follows."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, _):
        async with client_of(first) as client:
            made = await client.conversations.create(items=[question(SAID)])
        await respond_at(second, made, "Begin.")
        found = await asyncio.gather(
            respond_at(first, made, "First?", **LONG),
            respond_at(second, made, "Second?", **LONG),
            return_exceptions=True,
        )
        (error,) = [one for one in found if isinstance(one, Exception)]
        (answer,) = [one for one in found if not isinstance(one, Exception)]
        assert (error.status_code, error.code) == (409, "session_moved")
        assert error.response.headers["x-should-retry"] == "true"
        server, text = (first, "First?") if found[0] is error else (second, "Second?")
        said = "Second?" if text == "First?" else "First?"
        again = await respond_at(server, made, text)
        for one in (first, second):
            ends = [said, answer.output_text, text, again.output_text]
            assert (await messages_at(one, made))[3:] == ends
        assert session_of(again) == session_of(answer) == made.id
        await check_identical({second.name: second}, oracle, [made.id])


async def test_a_turn_follows_what_others_have_added_to_its_session(tiny_model, short_dir):
    """They came over gRPC at another server and are not the conversation's own."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, _):
        async with client_of(first) as client:
            made = await client.conversations.create()
        await respond_at(first, made, "Hi")
        async with second.service.client() as client:
            await client.submit(turn_request("Something else.", made.id))
        answer = await respond_at(first, made, "And?")
        assert session_of(answer) != made.id
        assert len(await messages_at(second, made)) == 4


async def test_local_conversations_continue_while_the_store_is_silent(tiny_model, short_dir):
    """Others are unknown; new turns reach the store later, even after a restart."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, store):
        async with client_of(first) as client:
            made, other = [await client.conversations.create() for _ in range(2)]
        await respond_at(first, made, "Hi")
        with silent(store):
            answer = await respond_at(first, made, "And?")
            async with client_of(first) as client:
                new = await client.conversations.create(items=[question("New.")])
                await client.conversations.items.create(other.id, items=[question("More.")])
            for wanted in (messages_at(second, made), respond_at(second, new, "Hi")):
                error = await refusal(wanted)
                assert (error.status_code, error.code) == (503, "transcript_unavailable")
                assert error.response.headers["Retry-After"]
            async with client_of(first) as client:
                assert (await refusal(client.conversations.delete(made.id))).status_code == 503
            await first.kill()
        await first.start_service()

        async def arrived():
            try:
                return [await messages_at(second, one) for one in (made, other, new)][1:]
            except openai.APIStatusError as error:
                return error.status_code

        await eventually(arrived, [["More."], ["New."]])
        assert (await messages_at(second, made))[2:] == ["And?", answer.output_text]
        assert session_of(await respond_at(second, made, "So?")) == made.id
