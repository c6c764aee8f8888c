"""Hostile HTTP clients learn nothing, cost little and disturb no other client."""

import asyncio
import gzip
import json
from contextlib import AsyncExitStack, asynccontextmanager

import openai
import pytest

from tests.http_api.conftest import CLIENTS, MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

MAX_REQUESTS = 32  # of the service's settings, as are the next two
MAX_BODY = 200_000
TURNS_PER_MINUTE = 2
CHATS = "/v1/chat/completions"
ACME = f"Authorization: Bearer {CLIENTS['acme']}"
ANSWER_S = 60.0


class Wire:
    """One raw connection."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self):
        """Return status, headers and JSON body of the next response."""
        async with asyncio.timeout(ANSWER_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            status, *lines = head.strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), headers, json.loads(body)


@asynccontextmanager
async def connect(api):
    reader, writer = await asyncio.open_connection(*api.address)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


def head(*lines, method="POST", path=CHATS, length=None):
    """Return a request without its body."""
    rows = [f"{method} {path} HTTP/1.1", "Host: here", *lines]
    if length is not None:
        rows.append(f"Content-Length: {length}")
    return ("\r\n".join(rows) + "\r\n\r\n").encode()


async def refusal_of(api, *lines, body=b"", method="POST", path=CHATS):
    """Return status and error object of one request."""
    async with connect(api) as wire:
        await wire.send(head(*lines, method=method, path=path, length=len(body)) + body)
        status, _, answer = await wire.answer()
    return status, answer["error"]


async def is_served(api, opening):
    """Whether another client gets an answer meanwhile."""
    async with api.client("globex") as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=opening, max_tokens=2, extra_body={"ignore_eos": True}
        )
    return answer.usage.completion_tokens == 2


@pytest.mark.parametrize("name", ["nobody", ""])
async def test_a_client_without_a_token_is_refused_before_its_body_is_read(api, name):
    """Every path has the same answer, and the service waits for no body."""
    paths = (CHATS, "/v1/responses", "/v1/responses/resp_1", "/v1/models", "/v1/nowhere", "/")
    methods = ("POST", "POST", "GET", "GET", "GET", "DELETE")
    for method, path in zip(methods, paths, strict=True):
        async with connect(api) as wire:
            authorization = [f"Authorization: Bearer {name}"] if name else []
            await wire.send(head(*authorization, method=method, path=path, length=MAX_BODY))
            status, headers, answer = await wire.answer()
        assert status == 401
        assert answer["error"]["code"] == "invalid_api_key"
        assert headers["www-authenticate"] == "bearer"
        assert headers["server"] == "inference-svc"


async def test_a_client_is_limited_to_its_tenants_and_role(api, opening):
    """Other tenants and roles are refused; with several tenants the client names one."""
    messages = [{"role": "user", "content": opening[0]["content"][:40]}]
    options = {"model": MODEL, "messages": messages, "max_tokens": 2}
    for name, project in (("acme", "globex"), ("gateway", "small"), ("monitor", "acme")):
        async with api.client(name, project=project) as client:
            with pytest.raises(openai.PermissionDeniedError) as refused:
                await client.chat.completions.create(**options)
        assert refused.value.code in {"tenant_denied", "role_denied"}
    async with api.client("gateway", project="globex") as client:
        answer = await client.chat.completions.create(**options)
    session_id = answer.model_extra["session_id"]
    assert await api.num_turns(session_id, tenant="globex") == 1
    assert await api.num_turns(session_id, tenant="acme") == -1


async def test_tenants_do_not_share_histories(api, opening):
    """The same conversation of two tenants is two, and neither uses the other's KV."""
    options = {"model": MODEL, "max_tokens": 8}
    async with api.client("acme") as acme, api.client("globex") as globex:
        first = await acme.chat.completions.create(messages=opening, **options)
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        messages = [*opening, answer, {"role": "user", "content": "?"}]
        second = await globex.chat.completions.create(messages=messages, **options)
    assert second.usage.prompt_tokens_details.cached_tokens == 0
    assert await api.num_turns(second.model_extra["session_id"], tenant="globex") == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nowhere", 404, "unknown_url"),
        ("POST", "/v1/moderations", 404, "unknown_url"),
        ("GET", "/v1/responses/%2e%2e%2fetc", 404, "response_not_found"),
        ("GET", "/v1/responses/resp_%ff%00", 404, "response_not_found"),
        ("GET", "/v1/nowhere/%ff", 404, "unknown_url"),
        ("GET", "/v1/responses/resp_1?stream=true", 404, "response_not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("PATCH", CHATS, 405, "method_not_allowed"),
    ],
)
async def test_unknown_paths_are_refused(api, method, path, status, code):
    """The error object lists what exists."""
    found, error = await refusal_of(api, ACME, method=method, path=path)
    assert (found, error["code"]) == (status, code)
    assert error["message"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{" * 100_000, "invalid_json"),
        (b'{"messages":' * 10_000, "invalid_json"),
        (b'{"model": "tiny", "messages": "hello"}', "invalid_value"),
        (b'{"model": "tiny", "messages": [], "tools": [1]}', "invalid_value"),
        (b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}', "model_not_found"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": ""}]}', "empty_turn"),
        (
            b'{"model":"tiny", "session_id":"/x", "messages":[{"role":"user", "content":"x"}]}',
            "invalid_name",
        ),
        (b'\x80\x81{"model": "tiny"}', "invalid_json"),
    ],
    ids=["empty", "deep", "deeper", "type", "tools", "model", "no-text", "path", "no-utf8"],
)
async def test_bad_bodies_are_refused(api, body, code):
    """Each gets one error object."""
    status, error = await refusal_of(api, ACME, body=body)
    assert (status, error["code"]) == (404 if code == "model_not_found" else 400, code)


@pytest.mark.parametrize("name", ["OpenAI-Project", "Idempotency-Key"])
@pytest.mark.parametrize(
    "value", [b"\xff\xfe", "é".encode(), b"x" * 300], ids=["byte", "e", "long"]
)
async def test_bad_headers_are_refused(api, name, value):
    """The error names them, also for a client that may name any tenant."""
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}]}'
    gateway = f"Authorization: Bearer {CLIENTS['gateway']}"
    request = head(gateway, "HERE", length=len(body)).replace(
        b"HERE", name.encode() + b": " + value
    )
    async with connect(api) as wire:
        await wire.send(request + body)
        status, _, answer = await wire.answer()
    assert (status, answer["error"]["code"]) == (400, "invalid_value")
    assert name in answer["error"]["message"]


async def test_a_body_that_is_too_large_is_not_read(api, opening):
    """By its length, in chunks, or after decompression."""
    too_large = b"x" * (MAX_BODY + 1)
    status, error = await refusal_of(api, ACME, body=too_large)
    assert (status, error["code"]) == (413, "request_too_large")
    async with connect(api) as wire:
        await wire.send(head(ACME, "Transfer-Encoding: chunked"))
        for _ in range(4):
            await wire.send(b"%x\r\n%s\r\n" % (MAX_BODY // 2, b"x" * (MAX_BODY // 2)))
        status, _, answer = await wire.answer()
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    bomb = gzip.compress(b" " * 50_000_000)
    status, error = await refusal_of(api, ACME, "Content-Encoding: gzip", body=bomb)
    assert (status, error["code"]) == (400, "unsupported_value")
    assert await is_served(api, opening)


async def test_a_body_declared_too_large_is_refused_at_once(api):
    """The headers suffice: refused at once and finally, and no more is read."""

    async def refused(*expects):
        async with connect(api) as wire:
            await wire.send(head(ACME, *expects, length=5_000_000_000))
            status, headers, answer = await wire.answer()
            async with asyncio.timeout(ANSWER_S):
                assert await wire.reader.read() == b""
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        assert headers["connection"] == "close"
        assert headers["x-should-retry"] == "false"

    await asyncio.gather(refused(), refused("Expect: 100-continue"))


async def test_expect_continue_is_answered_for_authorised_clients_only(api):
    """100 Continue goes only to authorised clients; other expectations are refused."""
    body = b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}'
    for authorization, expected, found in (
        (ACME, "100-continue", b" 100 "),
        ("Authorization: Bearer nobody", "100-continue", b" 401 "),
        (ACME, "miracles", b" 417 "),
    ):
        async with connect(api) as wire:
            await wire.send(head(authorization, f"Expect: {expected}", length=len(body)))
            async with asyncio.timeout(ANSWER_S):
                line = await wire.reader.readline()
            assert found in line
            if found == b" 100 ":
                await wire.reader.readline()
                await wire.send(body)
                assert (await wire.answer())[0] == 404


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_broken_chunks_are_refused(api, is_awaited):
    """They are refused, whether the client waits or not, and are not logged."""
    async with connect(api) as wire:
        chunked, broken = "Transfer-Encoding: chunked", b"4\r\n{ SESAME-IN-A-CHUNK\r\n"
        async with asyncio.timeout(ANSWER_S):
            if is_awaited:
                await wire.send(head(ACME, chunked, "Expect: 100-continue"))
                assert b" 100 " in await wire.reader.readuntil(b"\r\n\r\n")
                await wire.send(broken)
            else:
                await wire.send(head(ACME, chunked) + broken)
            answer = await wire.reader.read()
    assert (b" 408 " if is_awaited else b" 400 ") in answer.partition(b"\r\n")[0]
    assert b"SESAME" not in answer
    log = api.service.log_path.read_text()
    assert "SESAME" not in log
    assert "Traceback" not in log


async def test_one_client_may_use_all_places(api):
    """Its bodies may use all places at once: each is read and answered."""
    body = b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}'
    request = head(ACME, "Expect: 100-continue", length=len(body))
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connect(api)) for _ in range(MAX_REQUESTS)]
        for wire in wires:
            await wire.send(request)
        for wire in wires:
            async with asyncio.timeout(ANSWER_S):
                assert b" 100 " in await wire.reader.readuntil(b"\r\n\r\n")
        for wire in wires:
            await wire.send(body)
        answers = [await wire.answer() for wire in wires]
    assert {(status, answer["error"]["code"]) for status, _, answer in answers} == {
        (404, "model_not_found")
    }


async def test_stalled_bodies_lose_their_places(api, opening):
    """A stalled body holds a place only for its time limit; others get a time to retry."""
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connect(api)) for _ in range(3 * MAX_REQUESTS)]
        for wire in wires:
            await wire.send(head(ACME, length=1000) + b"{")
        answers = [await wire.answer() for wire in wires]
    found = {(status, answer["error"]["code"]) for status, _, answer in answers}
    assert found == {(408, "request_timeout"), (429, "too_many_requests")}
    waits = [headers["retry-after"] for status, headers, _ in answers if status == 429]
    assert all(int(wait) >= 1 for wait in waits)
    assert await is_served(api, opening)


async def test_one_clients_bodies_leave_places_for_other_clients(api, opening):
    """A stalled body loses its place to another client's request, and is refused."""
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connect(api)) for _ in range(MAX_REQUESTS)]
        for wire in wires:
            await wire.send(head(ACME, length=1000) + b"{")
        assert await is_served(api, opening)
        answers = await asyncio.gather(*(wire.answer() for wire in wires))
    (refused,) = [answer for status, _, answer in answers if status == 429]
    assert refused["error"]["code"] == "too_many_requests"
    assert "acme" in refused["error"]["message"]
    assert [status for status, _, _ in answers].count(408) == MAX_REQUESTS - 1


async def test_idle_and_half_closed_connections(api, opening):
    """Hundreds of silent or half-open connections disturb no client."""
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connect(api)) for _ in range(200)]
        for wire in wires[:50]:
            await wire.send(b"POST /v1/chat/comple")
        for wire in wires[50:100]:
            await wire.send(head(ACME, length=50) + b'{"model"')
            wire.writer.write_eof()
        assert await is_served(api, opening)
        for wire in wires[50:100]:
            async with asyncio.timeout(ANSWER_S):
                await wire.reader.read()  # closed, with an answer or not
    assert await is_served(api, opening)


async def test_input_that_is_no_http_is_refused(api, opening):
    """Noise gets 400 or nothing, and the connection is closed."""
    noises = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 5000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"BREW / HTTP/1.1\r\n\r\n",
        b"POST " + CHATS.encode() + b" HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ]
    for noise in noises:
        async with connect(api) as wire:
            await wire.send(noise)
            wire.writer.write_eof()
            async with asyncio.timeout(ANSWER_S):
                answer = await wire.reader.read()
        assert not answer or b" 400 " in answer.partition(b"\r\n")[0]
        assert b"Traceback" not in answer
    assert await is_served(api, opening)


async def test_a_tenant_over_its_rate_gets_a_time_to_retry(api, opening):
    """Its refusals have a time to retry; other tenants are served."""
    options = {"model": MODEL, "messages": opening, "max_tokens": 2}
    async with api.client("slow") as client:
        for _ in range(TURNS_PER_MINUTE):
            await client.chat.completions.create(**options)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(**options)
    assert refused.value.code == "rate_limit_exceeded"
    assert float(refused.value.response.headers["retry-after"]) >= 1
    assert await is_served(api, opening)


async def test_tokens_are_never_logged(api):
    """Neither valid nor invalid ones."""
    await refusal_of(api, "Authorization: Bearer a-guess-0123456789abcdef")
    log = api.service.log_path.read_text()
    assert "openai_ready" in log
    assert not [token for token in (*CLIENTS.values(), "a-guess-0123456789") if token in log]
