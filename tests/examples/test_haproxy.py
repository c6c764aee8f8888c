"""examples/haproxy/haproxy.cfg: conversations stay on their servers, and outlive them."""

import asyncio
import re
import shutil
from collections import Counter

import openai
import pytest
import pytest_asyncio

from inference_svc.client import turn_request
from inference_svc.http_api.agents import CONVERSATIONS
from shared.types.errors import StateError, UnavailableError
from tests.examples.balanced_pairs import CONFIG, NUM_PAIRS, BalancedPairs
from tests.examples.pairs import check_identical, holder
from tests.examples.talks import (
    LENGTH,
    LONG,
    MODEL,
    Talk,
    answers_of,
    by_pair,
    say_all,
    some_talks,
    tell,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        shutil.which("haproxy") is None, reason="needs haproxy: apt install haproxy"
    ),
]

TEXT = CONFIG.read_text(encoding="utf-8")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tiny_model, tmp_path_factory):
    balanced = BalancedPairs(tiny_model, tmp_path_factory.mktemp("balanced"))
    try:
        await balanced.start()
        yield balanced
    finally:
        await balanced.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def balanced(running):
    """Return the pairs, restored after the previous test."""
    await running.mend()
    return running


# ---------------------------------------------------------------------------------------- the file


async def test_names_are_found_as_by_the_service():
    """The same headers, in the same order."""
    http = TEXT.partition("frontend http")[2].partition("frontend grpc")[0]
    assert re.findall(r"set-var\(txn\.session\) req\.fhdr\(([\w-]+)\)", http) == [*CONVERSATIONS]


async def test_each_server_is_equal_in_every_backend():
    """A name's place on the hash ring depends on id and weight, and one drain applies to all."""
    lines = re.findall(
        r"^    server (\w+) ([\d.]+):\d+ id (\d+) .*?(track .*)?$", TEXT, re.MULTILINE
    )
    assert len(lines) == 4 * NUM_PAIRS
    assert len({(name, address, number) for name, address, number, _ in lines}) == NUM_PAIRS
    tracked = [(name, track) for name, _, _, track in lines if track]
    assert Counter(tracked) == {
        (f"pair{number}", f"track sessions/pair{number}"): 3 for number in (1, 2, 3)
    }


# ----------------------------------------------------------------------------------- while all run


async def test_conversations_stay(balanced, oracle):
    """Each conversation has a server with its history, streamed or not."""
    talks = some_talks("stays")
    async with balanced.openai() as client:
        for _ in range(2):
            await say_all(talks, client)
        begun = asyncio.Semaphore(0)
        await asyncio.gather(*(talk.stream(client, begun, LENGTH) for talk in talks))
    assert all(len(set(talk.answers)) == 1 for talk in talks)
    for talk in talks:
        first, *later = talk.cached
        assert first == 0
        assert all(later)
    assert set(await by_pair(balanced.pairs, talks)) == set(balanced.pairs)
    await check_identical(balanced.pairs, oracle, answers_of(talks))


async def test_similar_names_are_spread(balanced):
    """No server has more than twice another's share; unnamed requests go where there is room."""

    async def asked(backend: str, *names: str) -> dict[str, int]:
        before = await balanced.stats(backend)
        async with balanced.plain_http() as http:
            for name in names:
                headers = {"Session-Id": name} if name else {}
                async with http.get("/v1/models", headers=headers) as response:
                    assert response.status == 200
        after = await balanced.stats(backend)
        return {
            name: int(after[name]["stot"]) - int(before[name]["stot"]) for name in balanced.pairs
        }

    named = await asked("sessions", *(f"session-{number}" for number in range(90)))
    assert sum(named.values()) == 90
    assert max(named.values()) <= 2 * min(named.values())
    unnamed = await asked("anybody", *[""] * 6)
    assert sum(unnamed.values()) == 6
    assert min(unnamed.values()) > 0


async def test_a_disconnected_clients_turn_is_cancelled(balanced):
    """The service notices the disconnect through the balancer."""
    talk = Talk("leaves")
    async with balanced.openai() as client:
        await talk.say(client)
        pair = balanced.pairs[await holder(balanced.pairs, talk.answers[-1])]
        before = await pair.counter("turns_cancelled")
        asking = asyncio.create_task(talk.say(client, LONG))
        await pair.until_running(1)
        asking.cancel()
        await pair.until_running(0)
    assert await pair.counter("turns_cancelled") == before + 1


async def test_a_server_is_drained(balanced, oracle):
    """Its turns finish, its conversations move and later return; others stay."""
    talks, begun = some_talks("drained"), asyncio.Semaphore(0)
    async with balanced.openai() as client:
        await say_all(talks, client)
        own = await by_pair(balanced.pairs, talks)
        name = max(own, key=lambda name: len(own[name]))
        leaving = own[name]
        streams = asyncio.gather(*(talk.stream_unread(client, begun, 400) for talk in talks))
        for _ in talks:
            await begun.acquire()
        await balanced.drain(name)
        assert not streams.done()
        await streams
        await balanced.until(name, "DRAIN")
        await say_all(talks, client)
        moved = [talk for talk in talks if talk.answers[-1] != talk.answers[0]]
        assert moved == leaving
        assert name not in await by_pair(balanced.pairs, talks)
        assert all(bool(talk.cached[-1]) == (talk not in leaving) for talk in talks)
        await balanced.put_back(name)
        await balanced.until(name, "UP")
        await say_all(talks, client)
    assert set(await by_pair(balanced.pairs, talks)) == set(balanced.pairs)
    assert all(talk.answers[-1] == talk.answers[0] and talk.cached[-1] for talk in talks)
    await check_identical(balanced.pairs, oracle, answers_of(talks))


# ------------------------------------------------------------------------------------------- gRPC


async def test_sessions_of_grpc(balanced, oracle):
    """They stay on the servers that HTTP chooses; another server refuses further turns."""
    names = [f"tale-{number}" for number in range(6)]
    talks = [Talk(name) for name in names]
    async with balanced.openai() as http, balanced.grpc_client() as client:
        await say_all(talks, http)
        for number in range(2):
            turns = [tell(client, name, expected_turn=number) for name in names]
            for result in await asyncio.gather(*turns):
                assert bool(result.usage.reused_tokens) == bool(number)
        for talk in talks:
            assert await holder(balanced.pairs, talk.name) == await holder(
                balanced.pairs, talk.answers[0]
            )
        assert (await client.get_model()).name == MODEL  # of no session
        unnamed = await client.submit(turn_request("Whose is this?"))
        again = turn_request("Mine.", unnamed.accepted.session_id, expected_turn=1)
        assert (await client.submit(again)).accepted.turn == 1

        leaving = await holder(balanced.pairs, names[0])
        running = asyncio.create_task(tell(client, names[0], LONG // 2))
        await balanced.pairs[leaving].until_running(1)
        await balanced.drain(leaving)
        assert len((await running).token_ids) == LONG // 2
        with pytest.raises(StateError) as refused:
            await tell(client, names[0], expected_turn=3)
        assert refused.value.reason == "turn_mismatch"
        assert (await tell(client, f"{names[0]}-anew")).accepted.turn == 0
        await balanced.put_back(leaving)
        await balanced.until(leaving, "UP")
        back = await tell(client, names[0], expected_turn=3)
        assert back.usage.reused_tokens
    session = await balanced.pairs[leaving].session(names[0])
    turns = [(turn.input_ids, turn.output_ids) for turn in session.turn_records]
    assert oracle.judge(turns).is_identical


# ------------------------------------------------------------------------------- servers that end


async def test_a_service_is_stopped(balanced, oracle):
    """It reports not ready, finishes its turns, and others serve new requests."""
    talks, begun = some_talks("stopped"), asyncio.Semaphore(0)
    async with balanced.openai() as client:
        await say_all(talks, client)
        name, (talk, *_) = max(
            (await by_pair(balanced.pairs, talks)).items(), key=lambda own: len(own[1])
        )
        stream = asyncio.create_task(talk.stream(client, begun, 300))
        await begun.acquire()
        balanced.pairs[name].terminate()
        late = some_talks("late")
        await say_all(late, client)  # the balancer may not know yet: it tries another
        await stream
        assert await balanced.pairs[name].ended() == 0
        others = [other for other in talks if other is not talk]
        await say_all([*talks, *late], client)
        assert name not in await by_pair(balanced.pairs, talks)
        await balanced.mend()
        await say_all([*others, talk], client)
    assert all(other.answers[-1] == other.answers[0] and other.cached[-1] for other in others)
    await check_identical(balanced.pairs, oracle, answers_of([*talks, *late]))


async def test_a_service_is_killed(balanced, oracle):
    """Unanswered requests go to another server; half-answered ones break off."""
    talks = some_talks("killed")
    async with balanced.openai() as client, balanced.grpc_client() as grpc_client:
        await say_all(talks, client)
        own = await by_pair(balanced.pairs, talks)
        name = max(own, key=lambda name: len(own[name]))
        streamed, waiting, *_ = own[name]
        names = [f"lost-{number}" for number in range(6)]
        await asyncio.gather(*(tell(grpc_client, each) for each in names))
        (lost, *_) = [each for each in names if await holder(balanced.pairs, each) == name]
        begun = asyncio.Semaphore(0)
        broken = asyncio.create_task(streamed.stream(client, begun))
        await begun.acquire()
        pending = asyncio.create_task(waiting.say(client, LONG // 2))
        telling = asyncio.create_task(tell(grpc_client, lost, LONG // 2))
        await balanced.pairs[name].until_running(3)
        await balanced.pairs[name].kill()
        with pytest.raises(openai.APIConnectionError):
            await broken
        with pytest.raises(UnavailableError):
            await telling
        await pending
        assert waiting.answers[-1] != waiting.answers[0]
        rest = [talk for talk in talks if talk is not streamed]
        await say_all(rest, client)
        assert name not in await by_pair(balanced.pairs, rest)
        moved = {talk for talk in rest if talk.answers[-1] != talk.answers[0]}
        assert moved == set(own[name]) - {streamed}
        assert (await tell(grpc_client, f"{lost}-anew")).accepted.turn == 0
        await balanced.mend()
        await say_all(rest, client)
    assert all(talk.answers[-1] == talk.answers[0] for talk in rest)
    await check_identical(balanced.pairs, oracle, answers_of(rest))
