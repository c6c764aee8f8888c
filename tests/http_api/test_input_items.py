"""/v1/responses/{id}/input_items, by the official client."""

import contextlib
import sqlite3

import openai
import pytest

from tests.http_api.conftest import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "4"}


async def ask(client, given, **options):
    return await client.responses.create(model=MODEL, input=given, max_output_tokens=2, **options)


async def list_input(client, response, **options):
    """Return all items of a response, page by page."""
    found = client.responses.input_items.list(response.id, order="asc", **options)
    return [item.to_dict() async for item in found]


async def refusal_of(client, response):
    with pytest.raises(openai.NotFoundError) as error:
        await client.responses.input_items.list(response.id)
    return error.value


async def test_a_response_has_its_own_input(api, opening):
    """Without those of its predecessor and its instructions; a text is a user's message."""
    async with api.client() as client:
        first = await ask(client, opening)
        second = await ask(client, "And then?", previous_response_id=first.id)
        (item,) = await list_input(client, second)
        assert (item["type"], item["role"]) == ("message", "user")
        assert item["content"] == [{"type": "input_text", "text": "And then?"}]
        items = await list_input(client, first)
    assert [item["role"] for item in items] == ["system", "user"]
    assert [item["content"][0]["text"] for item in items] == [m["content"] for m in opening]


async def test_pages_follow_one_another(api, opening):
    """By the client's own iteration; calls and results are items and may be sent again."""
    said = {"role": "assistant", "content": "I look."}
    given = [*opening, said, CALL, RESULT, {"role": "user", "content": "So?"}]
    async with api.client() as client:
        answer = await ask(client, given, instructions="Be brief.")
        items = await list_input(client, answer, limit=2)
        page = await client.responses.input_items.list(answer.id, limit=5)
        again = await ask(client, items, instructions="Be brief.")
        assert [item | {"id": ""} for item in await list_input(client, again)] == [
            item | {"id": ""} for item in items
        ]
    assert [item["type"] for item in items[-3:]] == [CALL["type"], RESULT["type"], "message"]
    assert len({item["id"] for item in items}) == 6
    assert [item.id for item in page.data] == [item["id"] for item in items[:0:-1]]
    assert page.has_more
    assert again.output_text == answer.output_text


async def test_bad_list_parameters_are_refused(api, opening):
    """The error names the parameter."""
    async with api.client() as client:
        answer = await ask(client, opening)
        for options, param in (
            ({"limit": 0}, "limit"),
            ({"after": "msg_none"}, "after"),
            ({"extra_query": {"before": "msg_1"}}, "before"),
        ):
            with pytest.raises(openai.BadRequestError) as error:
                await client.responses.input_items.list(answer.id, **options)
            assert error.value.param == param


async def test_an_input_belongs_to_its_tenant(api, opening):
    """Other tenants cannot read it, and no client can if it was not stored."""
    async with api.client() as client, api.client("globex") as other:
        answer = await ask(client, opening)
        hidden = await ask(client, opening, store=False)
        assert (await refusal_of(other, answer)).code == "response_not_found"
        assert (await refusal_of(client, hidden)).code == "response_not_found"
        assert await list_input(client, answer)


async def test_an_input_that_is_too_long_is_not_stored(api):
    """The response is kept; the error has the reason."""
    parts = [{"type": "input_text", "text": text} for text in ["Hello", *[""] * 4000]]
    async with api.client() as client:
        answer = await ask(client, [{"role": "user", "content": parts}])
        error = await refusal_of(client, answer)
        assert (error.code, error.status_code) == ("input_not_kept", 404)
        assert "at most 131072 are stored" in error.message
        assert (await client.responses.retrieve(answer.id)).output_text == answer.output_text


async def test_an_input_is_deleted_with_its_response_and_its_session(api, opening):
    """Deletion by any API removes it from the file."""
    told = f"A secret of {opening[0]['content'][8:40]}"
    options = {"extra_body": {"session_id": f"inputs-{opening[0]['content'][8:40]}"}}

    def is_kept():
        path = api.service.log_path.parent / "state" / "openai.sqlite"
        with contextlib.closing(sqlite3.connect(path)) as db:
            (items,) = db.execute("SELECT group_concat(items) FROM inputs").fetchone()
        return told in (items or "")

    async with api.client() as client:
        for _ in range(2):
            answer = await ask(client, told, **options)
            assert await list_input(client, answer)
            assert is_kept()
            await client.responses.delete(answer.id)
            assert not is_kept()
            assert (await refusal_of(client, answer)).code == "response_not_found"
        answer = await ask(client, told, **options)
        assert is_kept()
        async with api.service.client() as grpc_client:
            await grpc_client.delete_session(answer.model_extra["session_id"], tenant="acme")
        assert not is_kept()
        assert (await refusal_of(client, answer)).code == "response_not_found"


async def test_an_input_survives_a_restart(api, opening):
    """As its response is."""
    async with api.client() as client:
        answer = await ask(client, opening)
        items = await list_input(client, answer)
    await api.service.stop()
    await api.start()
    async with api.client() as client:
        assert await list_input(client, answer) == items
