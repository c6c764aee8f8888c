"""/v1/responses, by the official client."""

import asyncio

import openai
import pytest

from tests.http_api.conftest import MODEL, name_of, next_messages

pytestmark = pytest.mark.asyncio(loop_scope="session")

LENGTH = 8


async def ask(client, given, **options):
    """Request a greedy response of its full length."""
    return await client.responses.create(
        model=MODEL,
        input=given,
        max_output_tokens=LENGTH,
        extra_body={"ignore_eos": True},
        **options,
    )


async def test_a_response_follows_another(api, opening):
    """By its id, in the same session, with its cache."""
    async with api.client() as client:
        first = await ask(client, opening, metadata={"a": "b"})
        second = await ask(client, "And then?", previous_response_id=first.id)
        third = await ask(client, "And then?", previous_response_id=second.id)
    sessions = {one.model_extra["session_id"] for one in (first, second, third)}
    assert len(sessions) == 1
    assert await api.num_turns(*sessions) == 3
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert second.output_text


async def test_a_response_that_is_not_the_last_is_forked(api, opening):
    """Both branches can be continued, simultaneously too."""
    async with api.client() as client:
        first = await ask(client, opening)
        answers = await asyncio.gather(
            *(ask(client, "And then?", previous_response_id=first.id) for _ in range(4))
        )
        again = await ask(client, "And then?", previous_response_id=first.id)
        after = await ask(client, "So?", previous_response_id=again.id)
    sessions = {one.model_extra["session_id"] for one in (*answers, again)}
    assert len(sessions) == 5
    assert {await api.num_turns(name) for name in sessions} == {2, 3}
    assert {one.output_text for one in answers} == {again.output_text}
    assert after.model_extra["session_id"] == again.model_extra["session_id"]


async def test_both_apis_share_one_history(api, opening):
    """A response's conversation continues as a chat, or from returned items."""
    async with api.client() as client:
        first = await ask(client, opening)
        chat = await client.chat.completions.create(
            model=MODEL, messages=next_messages(opening, first.output_text), max_tokens=LENGTH
        )
        await api.until_saved(chat)
        items = [*opening, *(item.to_dict() for item in first.output)]
        third = await ask(client, [*items, {"role": "user", "content": "And before?"}])
    assert chat.model_extra["session_id"] == first.model_extra["session_id"]
    assert chat.usage.prompt_tokens_details.cached_tokens > 0
    assert third.model_extra["session_id"] != first.model_extra["session_id"]
    assert third.usage.input_tokens_details.cached_tokens > 0


async def test_a_streamed_response_equals_the_whole_response(api, opening):
    """The client's helper assembles the events into the whole response."""
    async with api.client() as client:
        options = {"model": MODEL, "input": opening, "store": False}
        whole = await client.responses.create(**options, max_output_tokens=LENGTH)
        pieces = []
        async with client.responses.stream(**options, max_output_tokens=LENGTH) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    pieces.append(event.delta)
                last = event
    assert last.response.output_text == "".join(pieces) == whole.output_text
    assert last.response.status == whole.status
    assert last.response.usage.total_tokens == whole.usage.total_tokens


async def test_a_completed_stream_has_a_final_response(api, opening):
    """An answer that ends by itself, here by a stop string, is completed."""
    async with api.client() as client:
        whole = await ask(client, opening, store=False)
        stop = whole.output_text[3:5]
        async with client.responses.stream(
            model=MODEL, input=opening, extra_body={"stop": [stop]}
        ) as stream:
            final = await stream.get_final_response()
        stored = await client.responses.retrieve(final.id)
    assert final.status == "completed"
    assert final.output_text == whole.output_text.partition(stop)[0]
    assert stored.output_text == final.output_text


async def test_a_response_has_log_probabilities(api, opening):
    """As many as requested."""
    async with api.client() as client:
        included = ["message.output_text.logprobs"]
        answer = await ask(client, opening, include=included, top_logprobs=2, store=False)
    rows = answer.output[0].content[0].logprobs
    assert len(rows) == LENGTH
    assert all(len(row.top_logprobs) == 2 for row in rows)


async def test_a_stored_response_can_be_read(api, opening):
    """Unchanged, only by its tenant, and its id cannot be guessed."""
    async with api.client() as client, api.client("globex") as other:
        made = await ask(client, opening, instructions="Be brief.", metadata={"a": "b"})
        read = await client.responses.retrieve(made.id)
        hidden = await ask(client, opening, store=False)
        for who, name in ((other, made.id), (client, hidden.id), (client, "resp_" + "0" * 32)):
            with pytest.raises(openai.NotFoundError) as refused:
                await who.responses.retrieve(name)
            assert refused.value.code == "response_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(other, "And then?", previous_response_id=made.id)
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id"
    assert (read.id, read.output_text, read.metadata) == (made.id, made.output_text, {"a": "b"})
    assert (read.usage, read.instructions) == (made.usage, "Be brief.")


async def test_a_response_is_deleted(api, opening):
    """Its session is deleted with the last of its responses."""
    async with api.client() as client, api.client("globex") as other:
        first = await ask(client, opening)
        second = await ask(client, "And then?", previous_response_id=first.id)
        session_id = first.model_extra["session_id"]
        with pytest.raises(openai.NotFoundError):
            await other.responses.delete(first.id)
        await client.responses.delete(first.id)
        assert await api.num_turns(session_id) == 2
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        await client.responses.delete(second.id)
        with pytest.raises(openai.BadRequestError, match="there is no response"):
            await ask(client, "Really?", previous_response_id=second.id)
    assert await api.num_turns(session_id) == -1


async def test_a_named_session_outlives_its_responses(api, opening):
    """The name and the session are the client's."""
    name = name_of(opening)
    async with api.client() as client:
        made = await client.responses.create(
            model=MODEL, input=opening, max_output_tokens=LENGTH, extra_body={"session_id": name}
        )
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
    assert await api.num_turns(name) == 1


async def test_instructions_lead_the_conversation(api, opening):
    """They are its system message; they may be repeated, but not changed."""
    question = opening[0]["content"]
    options = {"instructions": "Be brief. " * 40}
    async with api.client() as client:
        first = await ask(client, question, **options)
        same = await ask(client, "And?", previous_response_id=first.id, **options)
        none = await ask(client, "And?", previous_response_id=same.id)
        await api.until_saved(none)
        chat = await client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "developer", "content": options["instructions"]},
                *next_messages([{"role": "user", "content": question}], first.output_text),
            ],
            max_tokens=LENGTH,
        )
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, "And?", previous_response_id=none.id, instructions="Be long.")
    assert none.instructions == first.instructions
    assert refused.value.param == "instructions"
    assert chat.usage.prompt_tokens_details.cached_tokens > 0


async def test_truncation_may_be_forbidden(api, opening):
    """An input that does not fit the window is refused then, as by OpenAI."""
    long = "word " * 6000
    async with api.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, long, truncation="disabled")
    assert refused.value.code == "context_length_exceeded"
