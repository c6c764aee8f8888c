"""examples/ray/serve.yaml: conversations stay on their servers, and outlive them."""

import asyncio
from copy import deepcopy
from functools import partial

import openai
import pytest
import pytest_asyncio
from aiohttp import ClientSession, UnixConnector

from inference_svc.client import InferenceClient, turn_request
from shared.types.errors import InvalidInputError, NotFoundError, StateError, UnavailableError
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
from tests.kvd_polling import eventually

pytest.importorskip("ray", reason="needs the extra `ray`: make test-ray")

from ray import serve

from tests.examples.ray_cluster import RayCluster

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.ray,
    pytest.mark.timeout(600),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tiny_model, tmp_path_factory):
    cluster = RayCluster(tiny_model, tmp_path_factory.mktemp("ray"))
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(running):
    """Return the pairs, restored after the previous test."""
    await running.mend()
    return running


# ----------------------------------------------------------------------------------- while all run


async def test_conversations_stay(cluster, oracle):
    """Each conversation has a server with its history, streamed or not."""
    talks = some_talks("stays")
    async with cluster.openai() as client:
        for _ in range(2):
            await say_all(talks, client)
        begun = asyncio.Semaphore(0)
        await asyncio.gather(*(talk.stream(client, begun, LENGTH) for talk in talks))
    assert all(len(set(talk.answers)) == 1 for talk in talks)
    for talk in talks:
        first, *later = talk.cached
        assert first == 0
        assert all(later)
    assert set(await by_pair(cluster.pairs, talks)) == set(cluster.pairs)
    await check_identical(cluster.pairs, oracle, answers_of(talks))


@pytest.mark.parametrize("header", ["X-Claude-Code-Session-Id", "Session-Id"])
async def test_agents_name_their_conversations(cluster, header):
    talks = [
        Talk(cluster.session_of(name, f"{header}-{number}"), header)
        for name in cluster.pairs
        for number in range(2)
    ]
    async with cluster.openai() as client:
        for _ in range(2):
            await say_all(talks, client)
    found = [await holder(cluster.pairs, talk.answers[-1]) for talk in talks]
    assert found == [name for name in cluster.pairs for _ in range(2)]
    assert all(talk.cached[-1] for talk in talks)


async def send_request(http: ClientSession, method: str, path: str, **fields):
    """Return status, headers and body of an answer."""
    async with http.request(method, path, **fields) as response:
        return response.status, response.headers.copy(), await response.read()


async def test_answers_equal_those_of_a_pair_without_ray(cluster):
    """Status, body and headers of answers and of errors are equal; Anthropic's API as well."""
    message = [{"role": "user", "content": "Why? " * 20}]
    body = {"model": MODEL, "messages": message, "max_tokens": LENGTH, "temperature": 0}
    requests = [
        ("GET", "/v1/models", {}),
        ("GET", "/v1/models/no%2Fbody?a=%20b", {}),
        ("HEAD", "/v1/models", {}),
        ("POST", "/v1/messages", {"json": body}),
        ("POST", "/v1/chat/completions", {"json": {**body, "stream": True}}),
        ("POST", "/v1/chat/completions", {"json": {**body, "model": "other"}}),
        ("POST", "/v1/chat/completions", {"data": b"{", "headers": {"Accept": "*/*"}}),
        ("PUT", "/v1/models", {"data": b"x"}),
        ("OPTIONS", "/v1/models", {"headers": {"Origin": "https://a.example"}}),
    ]
    socket = cluster.service_of("pair1")["http"].removeprefix("unix:")
    through_ray = cluster.plain_http()
    directly = ClientSession("http://localhost", connector=UnixConnector(socket))
    async with through_ray, directly:
        for method, path, fields in requests:
            status, headers, answer = await send_request(
                through_ray, method, path, **deepcopy(fields)
            )
            expected = await send_request(directly, method, path, **deepcopy(fields))
            assert status == expected[0], path
            assert texts_of(answer) == texts_of(expected[2]), path
            assert headers.keys() >= {
                name for name in expected[1] if name.lower() not in {"connection", "server"}
            }
            assert len(headers.getall("Date")) == 1


def texts_of(answer: bytes) -> list[bytes]:
    """Return the texts of an answer without ids and times: those of more than a few letters."""
    pieces = answer.replace(b'"', b" ").replace(b"\n", b" ").split()
    return [piece for piece in pieces if not any(48 <= one <= 57 for one in piece)]


async def test_requests_without_a_session_go_wherever_there_is_room(cluster):
    before = {name: await pair.counter("turns_finished") for name, pair in cluster.pairs.items()}
    body = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]}
    async with cluster.plain_http() as http:
        asking = [send_request(http, "POST", "/v1/chat/completions", json=body) for _ in range(8)]
        assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
    for name, pair in cluster.pairs.items():
        assert await pair.counter("turns_finished") > before[name]


async def until_stopped(pair, num_cancelled: int) -> None:
    """Return when a pair is idle, and this many of its turns were cancelled."""
    await pair.until_running(0)
    await eventually(partial(pair.counter, "turns_cancelled"), wanted=num_cancelled)


async def test_a_disconnected_clients_turn_is_cancelled(cluster):
    """The service notices the disconnect, through HTTP and through gRPC."""
    talk = Talk(cluster.session_of("pair1", "leaves"))
    pair = cluster.pairs["pair1"]
    before = await pair.counter("turns_cancelled")
    async with cluster.openai() as client:
        asking = asyncio.create_task(talk.say(client, LONG))
        await pair.until_running(1)
        asking.cancel()
        await until_stopped(pair, before + 1)
    async with cluster.grpc_client() as client:
        telling = asyncio.create_task(tell(client, talk.name, LONG))
        await pair.until_running(1)
        telling.cancel()
        await until_stopped(pair, before + 2)


# ------------------------------------------------------------------------------------------- gRPC


async def test_sessions_of_grpc(cluster, oracle):
    """They stay on the servers that HTTP chooses; errors are the service's own."""
    names = [f"tale-{number}" for number in range(6)]
    talks = [Talk(name) for name in names]
    async with cluster.openai() as http, cluster.grpc_client() as client:
        await say_all(talks, http)
        for number in range(2):
            turns = [tell(client, name, expected_turn=number) for name in names]
            for result in await asyncio.gather(*turns):
                assert result.accepted.turn == number
                assert result.usage.reused_tokens or not number
        for talk in talks:
            own = await holder(cluster.pairs, talk.answers[0])
            assert await holder(cluster.pairs, talk.name) == own
        assert (await client.get_model()).name == MODEL  # of no session
        unnamed = await client.submit(turn_request("Whose is this?"))
        again = turn_request("Mine.", unnamed.accepted.session_id, expected_turn=1)
        assert (await client.submit(again)).accepted.turn == 1
        with pytest.raises(StateError) as refused:
            await tell(client, names[0], expected_turn=7)
        assert refused.value.reason == "turn_mismatch"
        with pytest.raises(NotFoundError) as missed:
            await client.get_session("nobody")
        assert missed.value.remedy
        with pytest.raises(InvalidInputError) as too_long:
            await client.submit(turn_request("Too long. " * 5000, names[0]))
        assert too_long.value.reason == "input_too_long"
    await check_identical(cluster.pairs, oracle, names)


# ------------------------------------------------------------------------------- servers that end


async def test_a_service_is_stopped(cluster, oracle):
    """Its turns finish there; new requests are served, before the routers know and after."""
    talks, begun = some_talks("stopped"), asyncio.Semaphore(0)
    async with cluster.openai() as client, cluster.grpc_client() as grpc_client:
        await say_all(talks, client)
        own = await by_pair(cluster.pairs, talks)
        name = max(own, key=lambda name: len(own[name]))
        talk, *others = own[name]
        stream = asyncio.create_task(talk.stream(client, begun, 300))
        await begun.acquire()
        cluster.pairs[name].terminate()
        for _ in range(4):  # the first before any router knows; no turn fails
            await say_all(others, client)
        await stream
        assert await cluster.pairs[name].ended() == 0
        late = [Talk(cluster.session_of(name, "late")), talk]
        await say_all([*talks, *late], client)
        assert name not in await by_pair(cluster.pairs, [*talks, *late])
        told_elsewhere = await tell(grpc_client, cluster.session_of(name, "late-tale"))
        assert told_elsewhere.accepted.turn == 0
        await cluster.mend()
        await say_all(talks, client)
    await check_identical(cluster.pairs, oracle, answers_of([*talks, *late]))


async def test_a_service_is_killed(cluster, oracle):
    """Unanswered requests go to another server; half-answered ones break off."""
    talks = some_talks("killed")
    async with cluster.openai() as client, cluster.grpc_client() as grpc_client:
        await say_all(talks, client)
        own = await by_pair(cluster.pairs, talks)
        name = max(own, key=lambda name: len(own[name]))
        streamed, waiting, *_ = own[name]
        lost = cluster.session_of(name, "lost")
        await tell(grpc_client, lost)
        begun = asyncio.Semaphore(0)
        broken = asyncio.create_task(streamed.stream(client, begun))
        await begun.acquire()
        pending = asyncio.create_task(waiting.say(client, LONG // 2))
        telling = asyncio.create_task(tell(grpc_client, lost, LONG // 2))
        await cluster.pairs[name].until_running(3)
        await cluster.pairs[name].kill()
        with pytest.raises((openai.APIError, openai.APIConnectionError)):
            await broken
        with pytest.raises(UnavailableError):
            await telling
        await pending
        assert waiting.answers[-1] != waiting.answers[0]
        rest = [talk for talk in talks if talk is not streamed]
        await say_all(rest, client)
        assert name not in await by_pair(cluster.pairs, rest)
        assert (await patient(grpc_client, f"{lost}-anew")).accepted.turn == 0
        await cluster.mend()
        await say_all(rest, client)
    await check_identical(cluster.pairs, oracle, answers_of(rest))


async def patient(client: InferenceClient, name: str):
    """Send a turn that its client retries while no server accepts it."""
    return await client.submit_patiently(turn_request("And now?", name))


# ----------------------------------------------------------------------------- what users get wrong


@pytest.mark.parametrize(
    ("services", "told"),
    [
        (
            [{"socket": "unix:/nowhere/inference.sock"}],
            "no inference service is running at unix:/nowhere/inference.sock",
        ),
        ([{"socket": "/run/inference.sock"}], "is not an address: write unix:/path"),
        ([], "no service is configured"),
    ],
)
async def test_a_deployment_without_its_service(cluster, services, told):
    """The error has the reason; the other services continue."""
    config = deepcopy(cluster.config)
    broken = deepcopy(config["applications"][0])
    broken |= {"name": "broken", "route_prefix": "/broken"}
    broken["args"] = {"services": services, "wait_s": 0}
    broken["deployments"][0] |= {"num_replicas": 1, "max_constructor_retry_count": 1}
    config["applications"].append(broken)
    deploying = asyncio.create_task(cluster.deploy(config))

    async def status() -> str:
        found = serve.status().applications.get("broken")
        return found.status.value if found else "not seen yet"

    try:
        await eventually(status, wanted="DEPLOY_FAILED")
        (deployment,) = serve.status().applications["broken"].deployments.values()
        assert told in deployment.message
        async with cluster.plain_http() as http:
            assert (await send_request(http, "GET", "/v1/models"))[0] == 200
    finally:
        deploying.cancel()
        await cluster.deploy(cluster.config)
