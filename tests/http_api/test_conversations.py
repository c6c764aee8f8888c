"""/v1/conversations, and responses in conversations, by the official client."""

import uuid

import pytest

from tests.http_api.conftest import MODEL
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

pytestmark = pytest.mark.asyncio(loop_scope="session")

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
LOOK = {"type": "function", "name": "look", "parameters": NOTHING}


async def test_a_conversation_continues_in_its_session(api, opening):
    """It has one session of its name; its items are questions and answers in order."""
    async with api.client() as client:
        made = await client.conversations.create(metadata={"a": "é"})
        first = await ask(client, made, opening)
        await api.until_saved(first)
        second = await ask(client, made, "And then?")
        items = await list_items(client, made)
        found = await client.conversations.retrieve(made.id)
    assert found == made
    assert (made.object, made.metadata) == ("conversation", {"a": "é"})
    assert session_of(first) == session_of(second) == made.id
    assert first.conversation.id == made.id
    assert await api.num_turns(made.id) == 2
    assert second.usage.input_tokens_details.cached_tokens > 0
    said = [opening[0]["content"], opening[1]["content"], first.output_text]
    assert texts(items) == [*said, "And then?", second.output_text]
    assert [items[2]["id"], items[4]["id"]] == [first.output[0].id, second.output[0].id]


async def test_the_answers_are_those_of_the_whole_conversation(api, opening):
    """A chain of responses gives the same answers."""
    async with api.client() as client:
        made = await client.conversations.create(items=opening[:1])
        first = await ask(client, made, opening[1:])
        second = await ask(client, made, "And then?")
        options = {"model": MODEL, "max_output_tokens": LENGTH}
        options["extra_body"] = {"ignore_eos": True}
        one = await client.responses.create(input=opening, **options)
        two = await client.responses.create(
            input="And then?", previous_response_id=one.id, **options
        )
    assert [first.output_text, second.output_text] == [one.output_text, two.output_text]


async def test_items_that_are_added_lead_the_next_input(api, opening):
    """Nothing is computed until then; this also holds at the beginning."""
    async with api.client() as client:
        made = await client.conversations.create(items=opening)
        assert await api.num_turns(made.id) == -1
        first = await ask(client, made, [])
        added = await client.conversations.items.create(
            made.id, items=[question("One."), {"role": "assistant", "content": "Two."}]
        )
        assert await api.num_turns(made.id) == 1
        second = await ask(client, made, "Three.")
        items = await list_items(client, made)
        one = await client.conversations.items.retrieve(added.last_id, conversation_id=made.id)
    assert [item.id for item in added.data] == [item["id"] for item in items[3:5]]
    assert texts(items)[2:] == [
        first.output_text,
        *("One.", "Two.", "Three."),
        second.output_text,
    ]
    assert texts([one.to_dict()]) == ["Two."]
    assert first.usage.input_tokens > 100


async def test_pages_follow_one_another(api):
    """Newest first by default, oldest first on request; by the client's own iteration."""
    async with api.client() as client:
        made = await client.conversations.create(items=[question(str(n)) for n in range(20)])
        await client.conversations.items.create(made.id, items=[question("last")])
        page = await client.conversations.items.list(made.id)
        assert page.has_more
        assert texts(item.to_dict() for item in page.data)[:2] == ["last", "19"]
        assert texts(await list_items(client, made, limit=4)) == [*map(str, range(20)), "last"]
        rest = await client.conversations.items.list(made.id, after=page.last_id)
        assert (texts(item.to_dict() for item in rest.data), rest.has_more) == (["0"], False)
        for options, param in (
            ({"limit": 0}, "limit"),
            ({"after": "msg_none"}, "after"),
            ({"extra_query": {"before": "msg_1"}}, "before"),
        ):
            error = await refusal(client.conversations.items.list(made.id, **options))
            assert (error.status_code, error.param) == (400, param)


async def test_impossible_ids_are_not_found(api):
    """The id may have any bytes that a path can have."""
    async with api.client() as client:
        made = await client.conversations.create(items=[question("Hi")])
        for name in ("%FF", "%ED%B0%80", "%00", "a" * 4000):
            for path in (f"{name}", f"conv_{name}/items", f"{made.id}/items/{name}"):
                error = await refusal(client.get(f"/conversations/{path}", cast_to=object))
                assert error.status_code == 404
            path = f"/conversations/{made.id}/items?after={name}"
            error = await refusal(client.get(path, cast_to=object))
            assert (error.status_code, error.param) == (400, "after")


async def test_metadata_is_replaced(api):
    """The new metadata replaces all of the old."""
    async with api.client() as client:
        made = await client.conversations.create(metadata={"a": "1"})
        changed = await client.conversations.update(made.id, metadata={"b": "2"})
        assert changed.metadata == {"b": "2"}
        assert await client.conversations.retrieve(made.id) == changed
        error = await refusal(client.conversations.update(made.id, metadata={"a": "x" * 513}))
        assert (error.status_code, error.param) == (400, "metadata")


async def test_a_conversation_exists_only_for_its_tenant(api, opening):
    """For other tenants it does not exist in any request; unknown ids do not either."""
    async with api.client() as client, api.client("globex") as other:
        made = await client.conversations.create(items=opening)
        item = (await list_items(client, made))[0]["id"]
        for name in (made.id, "conv_" + uuid.uuid4().hex, "resp_1", "é"):
            who = other if name == made.id else client
            items = who.conversations.items
            for asked in (
                who.conversations.retrieve(name),
                who.conversations.update(name, metadata={}),
                who.conversations.delete(name),
                items.list(name),
                items.create(name, items=[question("Hi")]),
                items.retrieve(item, conversation_id=name),
                items.delete(item, conversation_id=name),
                who.responses.create(model=MODEL, input="Hi", conversation=name),
            ):
                error = await refusal(asked)
                assert (error.status_code, error.code) == (404, "conversation_not_found")
        assert len(await list_items(client, made)) == 2


async def test_a_conversation_is_deleted_with_its_session(api, opening):
    """By any API; its responses are deleted, too."""
    async with api.client() as client, api.service.client() as grpc_client:
        for by_grpc in (False, True):
            made = await client.conversations.create()
            answer = await ask(client, made, opening)
            if by_grpc:
                await grpc_client.delete_session(made.id, tenant="acme")
            else:
                deleted = await client.conversations.delete(made.id)
                assert (deleted.object, deleted.deleted) == ("conversation.deleted", True)
            assert await api.num_turns(made.id) == -1
            error = await refusal(client.conversations.items.list(made.id))
            assert error.code == "conversation_not_found"
            error = await refusal(client.responses.retrieve(answer.id))
            assert error.code == "response_not_found"
        made = await client.conversations.create()
        await client.conversations.delete(made.id)
        assert (await refusal(client.conversations.retrieve(made.id))).status_code == 404


async def test_an_item_that_was_not_read_is_deleted(api, opening):
    """The session continues."""
    async with api.client() as client:
        made = await client.conversations.create()
        await ask(client, made, opening)
        added = await client.conversations.items.create(
            made.id, items=[question("One."), question("Two.")]
        )
        await client.conversations.items.delete(added.first_id, conversation_id=made.id)
        second = await ask(client, made, "Three.")
        items = await list_items(client, made)
        error = await refusal(
            client.conversations.items.delete(added.first_id, conversation_id=made.id)
        )
    assert texts(items)[3:5] == ["Two.", "Three."]
    assert session_of(second) == made.id
    assert (error.status_code, error.code) == (404, "item_not_found")


async def test_an_item_that_was_read_is_deleted(api, opening):
    """The conversation continues in a fork of what precedes the deleted item."""
    async with api.client() as client:
        made = await client.conversations.create()
        first = await ask(client, made, opening)
        second = await ask(client, made, "Forget this.")
        third = await ask(client, made, "And then?")
        items = await list_items(client, made)
        alike = await client.responses.create(
            model=MODEL,
            input=[*items[5:], question("So?")],
            previous_response_id=first.id,
            max_output_tokens=LENGTH,
            extra_body={"ignore_eos": True},
        )
        for item in items[3:5]:
            await client.conversations.items.delete(item["id"], conversation_id=made.id)
        fourth = await ask(client, made, "So?")
        left = await list_items(client, made)
        fifth = await ask(client, made, "And?")
        assert (await client.responses.retrieve(first.id)).output_text == first.output_text
        error = await refusal(client.responses.retrieve(second.id))
    assert error.code == "response_not_found"
    assert texts(left)[3:] == ["And then?", third.output_text, "So?", fourth.output_text]
    assert fourth.output_text == alike.output_text
    assert fourth.usage.input_tokens == alike.usage.input_tokens
    assert session_of(fourth) not in {made.id, session_of(alike)}
    assert session_of(fourth) == session_of(fifth)
    assert await api.num_turns(session_of(fourth)) == 3
    await until_gone(api, made.id)


async def test_other_instructions_cause_the_conversation_to_be_read_again(api, opening):
    """The last instructions lead the conversation; sending the same again costs nothing."""
    async with api.client() as client:
        made = await client.conversations.create()
        first = await ask(client, made, opening[1:], instructions="Be brief.")
        same = await ask(client, made, "And?", instructions="Be brief.")
        none = await ask(client, made, "And?")
        options = {"model": MODEL, "max_output_tokens": LENGTH, "instructions": "Be brief."}
        options["extra_body"] = {"ignore_eos": True}
        one = await client.responses.create(input=opening[1:], **options)
        two = await client.responses.create(input="And?", previous_response_id=one.id, **options)
        assert same.usage.input_tokens == two.usage.input_tokens
        assert {session_of(one) for one in (first, same, none)} == {made.id}
        assert none.instructions == "Be brief."
        other = await ask(client, made, "So?", instructions="Be long.")
        assert session_of(other) != made.id
        assert other.usage.input_tokens_details.cached_tokens == 0
        items = await list_items(client, made)
        await client.conversations.items.delete(items[0]["id"], conversation_id=made.id)
        last = await ask(client, made, "And?")
        assert (last.instructions, session_of(last) != session_of(other)) == ("Be long.", True)


async def test_tools_are_called_and_answered(api, opening):
    """Calls and results are items; with other tools everything is read again."""
    async with api.client() as client:
        made = await client.conversations.create()
        called = await ask(
            client, made, opening, tools=[LOOK], tool_choice="required", max_output_tokens=200
        )
        (call,) = [item for item in called.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
        told = await ask(client, made, [result], tools=[LOOK])
        items = await list_items(client, made)
        assert session_of(told) == made.id
        assert [item["type"] for item in items[2:]] == [
            *("function_call", "function_call_output", "message")
        ]
        other = await ask(client, made, "And?", tools=[{**LOOK, "name": "see"}])
        assert session_of(other) != made.id
        again = await client.conversations.create(items=items)
        alike = await ask(client, again, "And?", tools=[{**LOOK, "name": "see"}])
    assert other.output_text == alike.output_text


async def test_a_streamed_turn_is_added(api, opening):
    """By the time of its last event the conversation is free."""
    async with api.client() as client:
        made = await client.conversations.create()
        for number in range(3):
            async with client.responses.stream(
                model=MODEL,
                input=opening if not number else "And?",
                conversation={"id": made.id},
                max_output_tokens=LENGTH,
            ) as stream:
                async for event in stream:
                    last = event
                assert last.response.conversation.id == made.id
        assert len(await list_items(client, made)) == 7


async def test_a_response_of_a_conversation_works_as_any_other(api, opening):
    """Its input can be listed, and a response that follows it is in a fork."""
    async with api.client() as client:
        made = await client.conversations.create(items=opening)
        first = await ask(client, made, "One?")
        apart = await client.responses.create(
            model=MODEL, input="Two?", previous_response_id=first.id, max_output_tokens=LENGTH
        )
        (item,) = (await client.responses.input_items.list(first.id)).data
        assert item.content[0].text == "One?"
        assert session_of(apart) != made.id
        assert apart.conversation is None
        second = await ask(client, made, "Three?")
        assert session_of(second) == made.id
        await client.responses.delete(first.id)
        assert texts(await list_items(client, made))[2::2] == ["One?", "Three?"]


async def test_bad_members_are_refused(api, opening):
    """The error names the member."""
    async with api.client() as client:
        made = await client.conversations.create(items=opening)
        first = await ask(client, made, "Hi")
        create = client.responses.create
        for asked, param in (
            (create(model=MODEL, input="Hi", conversation=5), "conversation"),
            (create(model=MODEL, input="Hi", conversation={"id": ""}), "conversation"),
            (ask(client, made, "Hi", previous_response_id=first.id), "conversation"),
            (ask(client, made, "Hi", extra_body={"session_id": "a"}), "conversation"),
            (ask(client, made, "Hi", store=False), "store"),
            (create(model=MODEL, input="Hi", extra_body={"session_id": made.id}), "session_id"),
            (client.conversations.create(items=[question("Hi")] * 21), "items"),
            (client.conversations.items.create(made.id, items="Hi"), "items"),
            (
                client.conversations.items.create(made.id, items=[{"type": "item_reference"}]),
                "items[0].type",
            ),
            (client.conversations.create(extra_body={"model": MODEL}), "model"),
        ):
            error = await refusal(asked)
            assert (error.status_code, error.param) == (400, param)
            assert ": " in error.message
        assert len(await list_items(client, made)) == 4
        error = await refusal(client.conversations.items.retrieve("é", conversation_id=made.id))
        assert (error.status_code, error.code) == (404, "item_not_found")
