"""Conversations of OpenAI's API go on at any of the servers that share a store."""

import asyncio

import openai
import pytest

from inference_svc.client import turn_request
from tests.examples.pairs import check_identical
from tests.http_api.talks import ask, listed, question, refusal, session_of, texts
from tests.integration.test_moving_responses import client_of, silent
from tests.integration.test_unnamed_conversations import SAID, running
from tests.kvd_polling import eventually

LONG = {"max_output_tokens": 400, "extra_body": {"ignore_eos": True}}


async def said_in(server, conversation):
    """What is said in a conversation, as a server lists it."""
    async with client_of(server) as client:
        return texts(await listed(client, conversation))


async def asked(server, conversation, given, **options):
    """A response in a conversation, at a server."""
    async with client_of(server) as client:
        return await ask(client, conversation, given, **options)


async def check_unknown(server, conversation):
    """A server has no such conversation: nothing of it is shown, and nobody goes on with it."""
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


async def test_a_conversation_goes_on_when_its_server_is_lost(tiny_model, short_dir, oracle):
    """Back and forth before, in one session; every answer is that of recomputation."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, _):
        async with client_of(first) as client:
            made = await client.conversations.create(items=[question(SAID)], metadata={"for": "é"})
        answers = [await asked(first, made, "One?", instructions="Be brief.")]
        async with client_of(second) as client:
            assert await client.conversations.retrieve(made.id) == made
            assert texts(await listed(client, made)) == [SAID, "One?", answers[0].output_text]
            await client.conversations.items.create(made.id, items=[question("Two!")])
        answers += [await asked(server, made, "And?") for server in (second, first)]
        said = await said_in(first, made)
        assert said == await said_in(second, made)
        assert said[3:] == ["Two!", "And?", answers[1].output_text, "And?", answers[2].output_text]
        async with client_of(first) as client:
            item = (await listed(client, made))[-1]
            await client.conversations.items.delete(item["id"], conversation_id=made.id)
        await first.lose()
        answers.append(await asked(second, made, "So?"))
        assert (await said_in(second, made))[-3:] == ["And?", "So?", answers[3].output_text]
        sessions = [session_of(answer) for answer in answers]
        assert sessions[:3] == [made.id] * 3
        assert sessions[3] != made.id, "it has read what was deleted"
        assert await second.num_turns(sessions[3]) == 3
        await check_identical({second.name: second}, oracle, sessions[3:])


async def test_what_is_deleted_is_deleted_everywhere(tiny_model, short_dir):
    """By its id, or by its session; with that, and its responses."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, _):
        async with client_of(first) as client:
            made = [await client.conversations.create() for _ in range(3)]
        answer = await asked(first, made[0], "Hi")
        await asked(second, made[1], "Hi")
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


async def test_of_two_turns_at_once_one_is_refused(tiny_model, short_dir, oracle):
    """What is told to be there is, once; the other client asks again, and follows it."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, _):
        async with client_of(first) as client:
            made = await client.conversations.create(items=[question(SAID)])
        await asked(second, made, "Begin.")
        found = await asyncio.gather(
            asked(first, made, "First?", **LONG),
            asked(second, made, "Second?", **LONG),
            return_exceptions=True,
        )
        (error,) = [one for one in found if isinstance(one, Exception)]
        (answer,) = [one for one in found if not isinstance(one, Exception)]
        assert (error.status_code, error.code) == (409, "session_moved")
        assert error.response.headers["x-should-retry"] == "true"
        server, text = (first, "First?") if found[0] is error else (second, "Second?")
        said = "Second?" if text == "First?" else "First?"
        again = await asked(server, made, text)
        for one in (first, second):
            ends = [said, answer.output_text, text, again.output_text]
            assert (await said_in(one, made))[3:] == ends
        assert session_of(again) == session_of(answer) == made.id
        await check_identical({second.name: second}, oracle, [made.id])


async def test_a_turn_follows_what_others_have_added_to_its_session(tiny_model, short_dir):
    """By gRPC, at another server: it is not the conversation's."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, _):
        async with client_of(first) as client:
            made = await client.conversations.create()
        await asked(first, made, "Hi")
        async with second.service.client() as client:
            await client.submit(turn_request("Something else.", made.id))
        answer = await asked(first, made, "And?")
        assert session_of(answer) != made.id
        assert len(await said_in(second, made)) == 4


async def test_while_the_store_is_silent_what_is_here_goes_on(tiny_model, short_dir):
    """Nobody knows of the rest; what came meanwhile gets there, also by the next start."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, store):
        async with client_of(first) as client:
            made, other = [await client.conversations.create() for _ in range(2)]
        await asked(first, made, "Hi")
        with silent(store):
            answer = await asked(first, made, "And?")
            async with client_of(first) as client:
                new = await client.conversations.create(items=[question("New.")])
                await client.conversations.items.create(other.id, items=[question("More.")])
            for wanted in (said_in(second, made), asked(second, new, "Hi")):
                error = await refusal(wanted)
                assert (error.status_code, error.code) == (503, "transcript_unavailable")
                assert error.response.headers["Retry-After"]
            async with client_of(first) as client:
                assert (await refusal(client.conversations.delete(made.id))).status_code == 503
            await first.kill()
        await first.start_service()

        async def arrived():
            try:
                return [await said_in(second, one) for one in (made, other, new)][1:]
            except openai.APIStatusError as error:
                return error.status_code

        await eventually(arrived, [["More."], ["New."]])
        assert (await said_in(second, made))[2:] == ["And?", answer.output_text]
        assert session_of(await asked(second, made, "So?")) == made.id
