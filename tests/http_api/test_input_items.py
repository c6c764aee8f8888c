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


async def listed(client, response, **options):
    """All of its items, page by page."""
    found = client.responses.input_items.list(response.id, order="asc", **options)
    return [item.to_dict() async for item in found]


async def refused(client, response):
    with pytest.raises(openai.NotFoundError) as error:
        await client.responses.input_items.list(response.id)
    return error.value


async def test_a_response_has_its_own_input(api, opening):
    """Not that of the one before, nor its instructions; a text is a user's message."""
    async with api.client() as client:
        first = await ask(client, opening)
        second = await ask(client, "And then?", previous_response_id=first.id)
        (item,) = await listed(client, second)
        assert (item["type"], item["role"]) == ("message", "user")
        assert item["content"] == [{"type": "input_text", "text": "And then?"}]
        items = await listed(client, first)
    assert [item["role"] for item in items] == ["system", "user"]
    assert [item["content"][0]["text"] for item in items] == [m["content"] for m in opening]


async def test_pages_follow_one_another(api, opening):
    """The client's own iteration; calls and results are items, and they may be sent again."""
    said = {"role": "assistant", "content": "I look."}
    given = [*opening, said, CALL, RESULT, {"role": "user", "content": "So?"}]
    async with api.client() as client:
        answer = await ask(client, given, instructions="Be brief.")
        items = await listed(client, answer, limit=2)
        page = await client.responses.input_items.list(answer.id, limit=5)
        again = await ask(client, items, instructions="Be brief.")
        assert [item | {"id": ""} for item in await listed(client, again)] == [
            item | {"id": ""} for item in items
        ]
    assert [item["type"] for item in items[-3:]] == [CALL["type"], RESULT["type"], "message"]
    assert len({item["id"] for item in items}) == 6
    assert [item.id for item in page.data] == [item["id"] for item in items[:0:-1]]
    assert page.has_more
    assert again.output_text == answer.output_text


async def test_what_is_off_in_a_list_is_refused(api, opening):
    """By the name of the parameter."""
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


async def test_an_input_is_its_tenants(api, opening):
    """And nobody's if it was not to be stored."""
    async with api.client() as client, api.client("globex") as other:
        answer = await ask(client, opening)
        hidden = await ask(client, opening, store=False)
        assert (await refused(other, answer)).code == "response_not_found"
        assert (await refused(client, hidden)).code == "response_not_found"
        assert await listed(client, answer)


async def test_an_input_that_is_too_long_is_not_kept(api):
    """The response is; the error says why."""
    parts = [{"type": "input_text", "text": text} for text in ["Hello", *[""] * 4000]]
    async with api.client() as client:
        answer = await ask(client, [{"role": "user", "content": parts}])
        error = await refused(client, answer)
        assert (error.code, error.status_code) == ("input_not_kept", 404)
        assert "up to 131072 are kept" in error.message
        assert (await client.responses.retrieve(answer.id)).output_text == answer.output_text


async def test_an_input_goes_with_its_response_and_its_session(api, opening):
    """Whichever API deletes that; nothing of it is left in the file."""
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
            assert await listed(client, answer)
            assert is_kept()
            await client.responses.delete(answer.id)
            assert not is_kept()
            assert (await refused(client, answer)).code == "response_not_found"
        answer = await ask(client, told, **options)
        assert is_kept()
        async with api.service.client() as grpc_client:
            await grpc_client.delete_session(answer.model_extra["session_id"], tenant="acme")
        assert not is_kept()
        assert (await refused(client, answer)).code == "response_not_found"


async def test_an_input_is_there_after_a_restart(api, opening):
    """As its response is."""
    async with api.client() as client:
        answer = await ask(client, opening)
        items = await listed(client, answer)
    await api.service.stop()
    await api.start()
    async with api.client() as client:
        assert await listed(client, answer) == items
