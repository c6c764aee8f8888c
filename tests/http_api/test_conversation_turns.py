"""Turns of conversations: one at a time, each once, complete or not at all, within limits."""

import asyncio
import contextlib
import sqlite3

import openai
import pytest

from inference_svc.client import turn_request
from tests.http_api.conftest import MODEL, name_of
from tests.http_api.talks import (
    LENGTH,
    ask,
    list_items,
    question,
    refusal,
    session_of,
    texts,
    until_gone,
)
from tests.inference_processes import wait_kvd_state

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_one_turn_at_a_time(api, opening):
    """During a turn nothing is added or deleted; other conversations are served."""
    async with api.client() as client:
        made = await client.conversations.create(items=opening)
        item = (await list_items(client, made))[0]["id"]
        stream = await client.responses.create(
            model=MODEL,
            input="Count.",
            conversation=made.id,
            max_output_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        await anext(stream)
        for asked in (
            ask(client, made, "Hi"),
            client.conversations.items.create(made.id, items=[question("Hi")]),
            client.conversations.items.delete(item, conversation_id=made.id),
            client.conversations.delete(made.id),
        ):
            error = await refusal(asked)
            assert (error.status_code, error.code) == (409, "session_busy")
        assert len(await list_items(client, made)) == 2
        await stream.close()
        answer = None
        async with asyncio.timeout(60):
            while answer is None:  # until the abandoned turn has ended
                with contextlib.suppress(openai.ConflictError):
                    answer = await ask(client, made, "Hi")
        assert texts(await list_items(client, made))[2:] == ["Hi", answer.output_text]


async def test_two_clients_at_once(api, opening):
    """Each turn is there once and complete, or was refused."""
    async with api.client() as client:
        made = await client.conversations.create(items=opening)

        async def talk(name):
            answers = {}
            for number in range(4):
                with contextlib.suppress(openai.ConflictError):
                    answer = await ask(client, made, f"{name}{number}?")
                    answers[f"{name}{number}?"] = answer.output_text
            return answers

        found = await asyncio.gather(*map(talk, "ab"))
        answers = found[0] | found[1]
        said = texts(await list_items(client, made))[2:]
    assert said
    assert dict(zip(said[::2], said[1::2], strict=True)) == answers


async def test_a_repeat_is_one_turn(api, opening):
    """Requests with one idempotency key make one turn, simultaneous or in sequence."""
    headers = {"Idempotency-Key": name_of(opening)}
    async with api.client() as client:
        made = await client.conversations.create()
        asked = [ask(client, made, opening, extra_headers=headers) for _ in range(3)]
        answers = await asyncio.gather(*asked)
        answers.append(await ask(client, made, opening, extra_headers=headers))
        await ask(client, made, "And?")
        answers.append(await ask(client, made, opening, extra_headers=headers))
        assert len({answer.id for answer in answers}) == 1
        assert len(await list_items(client, made)) == 5
        item = (await list_items(client, made))[0]["id"]
        await client.conversations.items.delete(item, conversation_id=made.id)
        again = await ask(client, made, opening, extra_headers=headers)
        assert again.id == answers[0].id
        assert len(await list_items(client, made)) == 4


async def test_an_agent_does_not_end_a_conversation(api, opening):
    """An agent's end-of-session header applies to another session."""
    async with api.client() as client:
        made = await client.conversations.create()
        final = {"X-Dynamo-Session-Final": "true"}
        answers = [await ask(client, made, opening, extra_headers=final) for _ in range(2)]
    assert {session_of(answer) for answer in answers} == {made.id}
    assert await api.num_turns(made.id) == 2


async def test_a_turn_that_fails_adds_nothing(api, opening):
    """Items that the failed turn would have read are read by the next one."""
    async with api.client() as client:
        made = await client.conversations.create(items=opening)
        error = await refusal(ask(client, made, "word " * 6000, truncation="disabled"))
        assert error.code == "context_length_exceeded"
        assert len(await list_items(client, made)) == 2
        answer = await ask(client, made, "Hi")
        assert texts(await list_items(client, made))[2:] == ["Hi", answer.output_text]
        assert session_of(answer) == made.id


async def test_a_tenants_conversations_have_a_size_limit(api):
    """The limit is per tenant; refused items are not added, and deletion makes room."""
    text = "word " * 20_000
    async with api.client("globex") as client:
        made, other = [await client.conversations.create() for _ in range(2)]
        added = [
            await client.conversations.items.create(made.id, items=[question(text)])
            for _ in range(10)
        ]
        for asked in (
            client.conversations.items.create(made.id, items=[question(text)]),
            client.conversations.create(items=[question(text)]),
            ask(client, other, text),
        ):
            error = await refusal(asked)
            assert (error.status_code, error.code) == (429, "conversations_full")
            assert error.response.headers["x-should-retry"] == "false"
        assert len(await list_items(client, made)) == 10
        error = await refusal(ask(client, made, "Hi"))
        assert (error.status_code, error.code) == (400, "context_length_exceeded")
        await client.conversations.items.delete(added[0].first_id, conversation_id=made.id)
        await client.conversations.items.create(made.id, items=[question(text)])
        for conversation in (made, other):
            await client.conversations.delete(conversation.id)


async def test_a_conversation_counts_as_a_session_of_its_tenant(api, opening):
    """It counts from its first response; unnamed sessions are deleted for it, it for none."""
    async with api.client("few") as client:
        made = [await client.conversations.create() for _ in range(3)]
        await client.responses.create(model=MODEL, input=opening, max_output_tokens=LENGTH)
        for conversation in made[:2]:
            await ask(client, conversation, opening)
        error = await refusal(ask(client, made[2], opening))
        assert (error.status_code, error.code) == (429, "too_many_sessions")
        await refusal(client.responses.create(model=MODEL, input=opening, max_output_tokens=1))
        for conversation in made:
            await client.conversations.delete(conversation.id)


async def test_turns_added_to_its_session_are_not_in_the_conversation(api, opening):
    """The conversation continues from its own last turn."""
    async with api.client() as client, api.service.client() as grpc_client:
        made = await client.conversations.create()
        first = await ask(client, made, opening)
        alike = await client.responses.create(
            model=MODEL,
            input="And then?",
            previous_response_id=first.id,
            max_output_tokens=LENGTH,
            extra_body={"ignore_eos": True},
        )
        await grpc_client.submit(turn_request("Something else.", made.id, tenant="acme"))
        assert await api.num_turns(made.id) == 2
        second = await ask(client, made, "And then?")
        assert second.output_text == alike.output_text
        assert len(await list_items(client, made)) == 5
        began = grpc_client.stream_turn(
            turn_request(
                "Count.",
                session_of(second),
                tenant="acme",
                sampling={"max_tokens": 400, "ignore_eos": True},
            )
        )
        await anext(began)
        error = await refusal(ask(client, made, "And then?"))
        assert (error.status_code, error.code) == (409, "session_busy")
        await began.aclose()
        other = await client.conversations.create()
        await grpc_client.submit(turn_request("Something else.", other.id, tenant="acme"))
        answer = await ask(client, other, opening)
    assert answer.output_text == first.output_text


async def test_a_kill_in_the_middle_of_a_turn(api, opening):
    """The turn leaves nothing, and the conversation continues."""
    async with api.client() as client:
        made = await client.conversations.create()
        first = await ask(client, made, opening)
        item = (await list_items(client, made))[0]["id"]
        await client.conversations.items.delete(item, conversation_id=made.id)
        stream = await client.responses.create(
            model=MODEL,
            input="Count.",
            conversation=made.id,
            max_output_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        moved = session_of((await anext(stream)).response)
        path = api.service.log_path.parent / "state" / "openai.sqlite"
        with contextlib.closing(sqlite3.connect(path)) as db:
            assert ("acme", moved) in db.execute("SELECT * FROM passing").fetchall()
        await api.service.kill()
    await api.start()
    async with api.client() as client:
        assert texts(await list_items(client, made)) == [opening[1]["content"], first.output_text]
        answer = await ask(client, made, "Hi")
        assert texts(await list_items(client, made))[2:] == ["Hi", answer.output_text]
    assert moved not in {made.id, session_of(answer)}
    for session_id in (made.id, moved):
        await until_gone(api, session_id)


async def test_a_conversation_survives_a_restart(api, opening):
    """After a kill of kvd, too: lost keys and values are computed again."""
    async with api.client() as client:
        made = await client.conversations.create(metadata={"a": "b"})
        await ask(client, made, opening)
        await client.conversations.items.create(made.id, items=[question("One.")])
        items = await list_items(client, made)
    await api.service.stop()
    await api.start()
    async with api.client() as client:
        assert await client.conversations.retrieve(made.id) == made
        assert await list_items(client, made) == items
        answer = await ask(client, made, "Two.")
        assert session_of(answer) == made.id
        assert answer.usage.input_tokens_details.cached_tokens > 0
        await api.kvd.kill()
        await ask(client, made, "Three.")
        await api.kvd.start()
        async with api.service.client() as grpc_client:
            await wait_kvd_state(grpc_client, "attached")
        assert texts(await list_items(client, made))[3:5] == ["One.", "Two."]
        assert len(await list_items(client, made)) == 8
