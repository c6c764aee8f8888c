"""/v1/chat/completions, by the official client."""

import asyncio
from contextlib import asynccontextmanager, suppress
from functools import partial

import openai
import pytest

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import NotFoundError
from tests.http_api.conftest import MODEL, name_of, next_messages
from tests.inference_processes import pause

pytestmark = pytest.mark.asyncio(loop_scope="session")

LENGTH = 8  # tokens of an answer
MAX_RUNNING = 8  # turns in a batch, by the service's settings
MAX_ADMITTED = 12  # with those that are loaded ahead of it


async def ask(client, messages, **options):
    """Request a greedy answer of its full length."""
    extra_body = {"ignore_eos": True, **options.pop("extra_body", {})}
    return await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=LENGTH, extra_body=extra_body, **options
    )


def text_of(answer):
    return answer.choices[0].message.content


async def test_models(api):
    """The model and its aliases are listed, and each can be requested."""
    async with api.client() as client:
        assert [model.id async for model in client.models.list()] == [MODEL, "gpt-4o"]
        assert (await client.models.retrieve("gpt-4o")).owned_by == "cachedattention"
        with pytest.raises(openai.NotFoundError) as refused:
            await client.models.retrieve("no/such model")
    assert refused.value.code == "model_not_found"


async def test_a_blocking_client(api, opening):
    """The synchronous client gets an answer, whole or streamed."""

    def talk():
        with api.blocking_client() as client:
            options = {"model": "gpt-4o", "messages": opening, "max_completion_tokens": 4}
            whole = client.chat.completions.create(**options)
            streamed = list(client.chat.completions.create(**options, stream=True))
            return whole, streamed

    whole, streamed = await asyncio.to_thread(talk)
    assert whole.model == "gpt-4o"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == text_of(whole)


async def test_the_answer_equals_that_of_grpc(api, opening):
    """The same messages get the same greedy answer as by gRPC."""
    messages = [pb.ChatMessage(**message) for message in opening]
    sampling = pb.Sampling(max_tokens=LENGTH, ignore_eos=True)
    async with api.service.client() as grpc_client:
        turn = await grpc_client.submit(turn_request(messages, tenant="globex", sampling=sampling))
    async with api.client() as client:
        answer = await ask(client, opening)
    assert text_of(answer) == turn.text
    assert answer.usage.completion_tokens == LENGTH
    assert answer.usage.prompt_tokens == turn.usage.new_tokens


async def test_a_stream_equals_the_whole_answer(api, opening):
    """Text, finish reason, usage and session are equal; usage comes only on request."""
    async with api.client() as client:
        whole = await ask(client, opening, store=False)
        options = {"include_usage": True}
        stream = await ask(client, opening, stream=True, stream_options=options)
        chunks = [chunk async for chunk in stream]
        plain = [chunk async for chunk in await ask(client, opening, stream=True, store=False)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == text_of(whole)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].model_extra["session_id"] == stream.response.headers["X-Session-Id"]
    assert all(chunk.choices for chunk in plain)


async def test_a_whole_history_continues_its_session(api, opening):
    """A client that sends the whole history is found: only the last message is new."""
    async with api.client() as client:
        first = await ask(client, opening)
        second = await ask(client, next_messages(opening, f"\n {text_of(first)} "))
    session_id = first.model_extra["session_id"]
    assert second.model_extra["session_id"] == session_id
    assert await api.num_turns(session_id) == 2
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached_tokens = second.usage.prompt_tokens_details.cached_tokens
    assert cached_tokens >= first.usage.prompt_tokens // 2
    assert cached_tokens < second.usage.prompt_tokens


async def test_several_answers_to_one_question(api, opening):
    """Greedy answers are equal; the prompt is computed once, and each can be continued."""
    async with api.client() as client:
        first = await ask(client, opening, n=3)
        seeded = {"n": 3, "temperature": 1, "seed": 7}
        drawn = [await ask(client, opening, **seeded) for _ in range(2)]
        texts = [choice.message.content for choice in first.choices]
        sessions = [choice.model_extra["session_id"] for choice in first.choices]
        second = await ask(client, next_messages(opening, texts[1]))
    assert len(set(texts)) == 1
    assert len(set(sessions)) == 3
    assert second.model_extra["session_id"] in sessions
    assert first.usage.completion_tokens == 3 * LENGTH
    assert first.usage.prompt_tokens < second.usage.prompt_tokens < 2 * first.usage.prompt_tokens
    texts = [[choice.message.content for choice in answer.choices] for answer in drawn]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


async def test_several_answers_are_streamed_together(api, opening):
    """Each has its index, and each has its own session with the same history."""
    async with api.client() as client:
        first = await ask(client, opening)
        longer = next_messages(opening, text_of(first))
        whole = await ask(client, longer, n=2, store=False)
        chunks = [chunk async for chunk in await ask(client, longer, n=2, stream=True)]
    texts = ["", ""]
    sessions = [set(), set()]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        sessions[choice.index].add(chunk.model_extra["session_id"])
    assert texts == [choice.message.content for choice in whole.choices]
    assert all(len(found) == 1 for found in sessions)
    assert first.model_extra["session_id"] in sessions[0] ^ sessions[1]


async def test_several_answers_in_a_named_session_are_refused(api, opening):
    """Such a request is refused and nothing starts."""
    async with api.client() as client:
        with pytest.raises(openai.BadRequestError, match="leave the session out"):
            await ask(client, opening, n=2, extra_body={"session_id": "s"})
    assert await api.num_turns("s") == -1


async def test_several_answers_are_refused_as_one(api):
    """Without room for all of them none is started, and nothing is left."""
    before = await api.counter("turns_finished")
    async with api.client("small") as client:  # two turns a minute
        with pytest.raises(openai.RateLimitError):
            await ask(client, [{"role": "user", "content": "Hello"}], n=3)
        with pytest.raises(openai.RateLimitError):
            await ask(client, [{"role": "user", "content": "Hello"}])
    assert await api.counter("turns_finished") <= before + 2


async def test_an_edited_question_forks(api, opening):
    """The session stays as it was; the fork has the part before the edit."""
    async with api.client() as client:
        first = await ask(client, opening)
        longer = next_messages(opening, text_of(first))
        second = await ask(client, longer)
        await api.until_saved(second)
        other = await ask(client, next_messages(opening, text_of(first), "And before?"))
        third = await ask(client, next_messages(longer, text_of(second)))
    sessions = [answer.model_extra["session_id"] for answer in (first, second, other, third)]
    assert sessions[0] == sessions[1] == sessions[3] != sessions[2]
    assert [await api.num_turns(sessions[0]), await api.num_turns(sessions[2])] == [3, 2]
    assert other.usage.prompt_tokens_details.cached_tokens > 0


async def test_an_unknown_history_opens_a_session(api, opening):
    """An unknown answer or another beginning is read whole, in a new session."""
    async with api.client() as client:
        first = await ask(client, opening)
        foreign = await ask(client, next_messages(opening, "This was never said."))
        moved = await ask(client, next_messages(opening[1:], text_of(first)))
    sessions = {answer.model_extra["session_id"] for answer in (first, foreign, moved)}
    assert len(sessions) == 3
    assert [await api.num_turns(session_id) for session_id in sessions] == [1, 1, 1]


async def test_simultaneous_requests_with_one_history_are_all_answered(api, opening):
    """One continues the session, the others run in forks, and all are answered."""
    async with api.client() as client:
        first = await ask(client, opening)
        messages = next_messages(opening, text_of(first))
        answers = await asyncio.gather(*(ask(client, messages) for _ in range(6)))
    assert len({text_of(answer) for answer in answers}) == 1
    sessions = [answer.model_extra["session_id"] for answer in answers]
    assert len(set(sessions)) == 6
    assert first.model_extra["session_id"] in sessions
    assert {await api.num_turns(session_id) for session_id in sessions} == {2}


async def test_a_session_is_named_by_its_id(api, opening):
    """The request may have only the new message or the whole history."""
    name = name_of(opening)
    async with api.client() as client:
        first = await ask(client, opening, extra_body={"session_id": name})
        question = [{"role": "user", "content": "And then?"}]
        second = await ask(client, question, extra_body={"session_id": name})
        assert await api.num_turns(name) == 2
        assert second.usage.prompt_tokens_details.cached_tokens > 0
        whole = f"{name}-whole"
        messages = next_messages(opening, text_of(first))
        await ask(client, opening, extra_body={"session_id": whole})
        third = await ask(client, messages, extra_body={"session_id": whole})
    assert third.model_extra["session_id"] == whole
    assert await api.num_turns(whole) == 2
    assert text_of(third) == text_of(second)


async def test_a_named_session_is_used_only_by_its_name(api, opening):
    """The same history without the name gets a fork, and so does a new name."""
    name = name_of(opening)
    async with api.client() as client:
        first = await ask(client, opening, extra_body={"session_id": name})
        await api.until_saved(first)
        messages = next_messages(opening, text_of(first))
        unnamed = await ask(client, messages)
        renamed = await ask(client, messages, extra_body={"session_id": f"{name}-2"})
    assert unnamed.model_extra["session_id"] not in {name, f"{name}-2"}
    assert [await api.num_turns(name), await api.num_turns(f"{name}-2")] == [1, 2]
    assert renamed.usage.prompt_tokens_details.cached_tokens > 0


async def test_a_named_session_with_another_history_is_refused(api, opening):
    """Nothing is appended to the session."""
    name = name_of(opening)
    async with api.client() as client:
        await ask(client, opening, extra_body={"session_id": name})
        with pytest.raises(openai.ConflictError) as refused:
            await ask(client, next_messages(opening, "Not this."), extra_body={"session_id": name})
        with pytest.raises(openai.BadRequestError):
            await ask(client, opening, extra_body={"session_id": name}, store=False)
    assert refused.value.code == "history_unknown"
    assert await api.num_turns(name) == 1


async def test_a_reused_name_does_not_have_the_old_history(api, opening):
    """A deleted and recreated session is not forked for a client with the old history."""
    name = name_of(opening)
    async with api.client() as client, api.service.client() as grpc_client:
        first = await ask(client, opening, extra_body={"session_id": name})
        await grpc_client.delete_session(name, tenant="acme")
        await ask(client, [{"role": "user", "content": "New."}], extra_body={"session_id": name})
        second = await ask(client, next_messages(opening, text_of(first)))
    assert await api.num_turns(second.model_extra["session_id"]) == 1
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


async def test_an_answer_that_is_not_stored_leaves_nothing(api, opening):
    """The answer uses the cache, its session is deleted afterwards, and its history stays."""
    async with api.client() as client:
        first = await ask(client, opening)
        await api.until_saved(first)
        second = await ask(client, next_messages(opening, text_of(first)), store=False)
        alone = await ask(client, opening, store=False)
        stream = await ask(client, opening, store=False, stream=True)
        last = [chunk async for chunk in stream][-1]
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    assert await api.num_turns(first.model_extra["session_id"]) == 1
    for answer in (second, alone, last):
        assert await api.num_turns(answer.model_extra["session_id"]) == -1


async def test_a_repeat_gets_the_same_answer(api, opening):
    """An Idempotency-Key makes any number of requests one turn, simultaneous or in sequence."""
    headers = {"Idempotency-Key": name_of(opening)}
    async with api.client() as client:
        first = await ask(client, opening)
        messages = next_messages(opening, text_of(first))
        answers = await asyncio.gather(
            *(ask(client, messages, extra_headers=headers) for _ in range(3))
        )
        answers.append(await ask(client, messages, extra_headers=headers))
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, opening, extra_headers=headers)
    assert len({answer.id for answer in answers}) == 1
    assert len({text_of(answer) for answer in answers}) == 1
    assert {answer.model_extra["session_id"] for answer in answers} == {
        first.model_extra["session_id"]
    }
    assert await api.num_turns(first.model_extra["session_id"]) == 2
    assert refused.value.code == "request_id_reused"


async def test_sampling_reaches_the_model(api, opening):
    """A seed repeats the draw; stop strings and log-probabilities work as in OpenAI's API."""
    async with api.client() as client:
        hot = {"temperature": 1.5, "seed": 5, "top_p": 0.9, "store": False}
        drawn = [text_of(await ask(client, opening, **hot)) for _ in range(2)]
        greedy = await ask(client, opening, logprobs=True, top_logprobs=3, store=False)
        stop = text_of(greedy)[2:4]
        stopped = await ask(client, opening, stop=[stop], store=False)
    assert drawn[0] == drawn[1] != text_of(greedy)
    assert text_of(stopped) == text_of(greedy).partition(stop)[0]
    assert stopped.choices[0].finish_reason == "stop"
    rows = greedy.choices[0].logprobs.content
    assert len(rows) == LENGTH
    for row in rows:
        assert len(row.top_logprobs) == 3
        assert row.logprob == row.top_logprobs[0].logprob <= 0


async def test_a_client_that_leaves_cancels_its_turn(api, opening):
    """The session is unchanged, and a fork made for the turn is deleted."""
    async with api.client() as client:
        first = await ask(client, opening)
        messages = next_messages(opening, text_of(first))
        cancelled = await api.counter("turns_cancelled")
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, max_tokens=1500,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        other = await client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, max_tokens=1500,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        names = [(await anext(one)).model_extra["session_id"] for one in (stream, other)]
        await stream.close()
        await other.close()
        async with asyncio.timeout(60):
            while await api.counter("turns_cancelled") < cancelled + 2:
                await pause()
            while await api.num_turns(names[1]) != -1:
                await pause()
    assert names[0] == first.model_extra["session_id"] != names[1]
    assert await api.num_turns(names[0]) == 1


async def test_a_turn_that_is_cancelled_while_it_waits(api, opening):
    """A turn cancelled by gRPC is the client's own doing: it is no failure."""
    name = name_of(opening)
    async with (
        api.service.client() as grpc_client,
        api.client() as client,
        full_service(grpc_client, name),
    ):
        asked = asyncio.create_task(ask(client, opening, extra_body={"session_id": name}))
        await until_waiting(grpc_client, 2)
        assert await cancel_when_there(grpc_client, name) == 1
        with pytest.raises(openai.ConflictError) as refused:
            await asked
    assert refused.value.code == "cancelled"


@asynccontextmanager
async def full_service(grpc_client, name):
    """Occupy every place of the service, so that the next turn waits.

    New turns also wait while they are admitted: the service is full only when all of these are
    accepted and one still waits.
    """
    accepted = set()

    def note(session_id, event):
        if event.HasField("accepted"):
            accepted.add(session_id)

    sampling = pb.Sampling(max_tokens=100_000, ignore_eos=True)
    turns = [
        turn_request("Keys.", f"{name}-{number}", tenant="globex", sampling=sampling)
        for number in range(MAX_ADMITTED + 1)
    ]
    busy = [
        asyncio.create_task(grpc_client.submit(turn, on_event=partial(note, turn.session_id)))
        for turn in turns
    ]
    try:
        async with asyncio.timeout(60):
            while len(accepted) < len(busy):
                await grpc_client.get_model()
        await until_waiting(grpc_client, 1)
        yield
    finally:
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)


async def until_waiting(grpc_client, num_turns):
    """Return when exactly this many turns wait and the batch is full."""
    async with asyncio.timeout(60):
        while True:
            model = await grpc_client.get_model()  # each round asks the service
            if (model.running_turns, model.waiting_turns) == (MAX_RUNNING, num_turns):
                return


async def cancel_when_there(grpc_client, name):
    """Cancel turns on their way into the service; return how many."""
    async with asyncio.timeout(60):
        while True:
            with suppress(NotFoundError):
                return await grpc_client.cancel(name, tenant="acme")


async def test_the_oldest_unnamed_session_makes_room(api, opening):
    """A tenant at its session limit opens another; a named session is never deleted."""
    messages = [{"role": "user", "content": opening[0]["content"][:40]}]
    async with api.client("few") as client:
        named = await ask(client, messages, extra_body={"session_id": name_of(opening)})
        answers = [await ask(client, messages) for _ in range(3)]
        sessions = [answer.model_extra["session_id"] for answer in (named, *answers)]
        assert [await api.num_turns(name, "few") for name in sessions] == [1, -1, -1, 1]
        await ask(client, messages, extra_body={"session_id": f"{name_of(opening)}-2"})
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(client, messages, extra_body={"session_id": f"{name_of(opening)}-3"})
    assert refused.value.code == "too_many_sessions"
    async with api.service.client() as grpc_client:  # the sessions that no newer one replaces
        for name in (name_of(opening), f"{name_of(opening)}-2"):
            await grpc_client.delete_session(name, tenant="few")


async def test_a_session_used_by_name_counts_as_recent(api, opening):
    """A session used by its name counts as recent, also if the service named it."""
    messages = [{"role": "user", "content": opening[0]["content"][:40]}]
    async with api.client("pair") as client:
        first, second = [(await ask(client, messages)).model_extra["session_id"] for _ in "ab"]
        await ask(client, messages, extra_body={"session_id": first})
        third = (await ask(client, messages)).model_extra["session_id"]
    turns = [await api.num_turns(name, "pair") for name in (first, second, third)]
    assert turns == [2, -1, 1]
