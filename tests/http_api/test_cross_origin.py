"""openai.cors_origins: pages of other sites, as a browser has them call the real service."""

import aiohttp
import openai
import pytest

from tests.http_api.conftest import CLIENTS, MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = "https://chat.example:8443"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


async def call(api, method, path, headers, **body):
    """Return what a browser gets: status, headers and bytes."""
    url = f"{api.url.removesuffix('/v1')}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, headers=headers, json=body or None) as answer,
    ):
        return answer.status, answer.headers, await answer.read()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/models"),
        ("GET", "/health"),
    ],
)
async def test_a_preflight_needs_no_account(api, method, path):
    """A preflight needs no account; pages of other sites get no answer to it."""
    asks = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "x-a"}
    status, headers, body = await call(api, "OPTIONS", path, {"Origin": PAGE, **asks})
    assert (status, body) == (204, b"")
    assert method in headers["Access-Control-Allow-Methods"].split(", ")
    assert headers["Access-Control-Allow-Headers"] == "x-a"
    other = {"Origin": "https://evil.example", **asks}
    status, headers, _ = await call(api, "OPTIONS", path, other)
    assert status == 401
    assert "Access-Control-Allow-Methods" not in headers


@pytest.mark.parametrize("stream", [False, True])
async def test_the_page_may_read_the_answer(api, stream):
    """By the official client, whole or streamed, with the response ids."""
    async with api.client(default_headers={"Origin": PAGE}) as client:
        raw = await client.chat.completions.with_raw_response.create(**HELLO, stream=stream)
    assert raw.headers["Access-Control-Allow-Origin"] == PAGE
    assert raw.headers["Vary"] == "Origin"
    shown = raw.headers["Access-Control-Expose-Headers"].split(", ")
    assert {name for name in shown if name in raw.headers} >= {"x-request-id", "X-Session-Id"}


async def test_the_page_may_read_errors(api):
    """A wrong token, an unknown path, and a bad body."""
    async with api.client("nobody", default_headers={"Origin": PAGE}) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.models.list()
    assert refused.value.response.headers["Access-Control-Allow-Origin"] == PAGE
    headers = {"Origin": PAGE, "Authorization": f"Bearer {CLIENTS['acme']}"}
    for method, path, status in (("GET", "/v1/none", 404), ("POST", "/v1/responses", 400)):
        found, sent, _ = await call(api, method, path, headers, x=1)
        assert (found, sent["Access-Control-Allow-Origin"]) == (status, PAGE)


async def test_a_bad_preflight_is_refused(api):
    """The page may read the reason."""
    asks = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "a;b"}
    status, headers, _ = await call(api, "OPTIONS", "/v1/models", {"Origin": PAGE, **asks})
    assert (status, headers["Access-Control-Allow-Origin"]) == (400, PAGE)


async def test_the_root_answers_probes(api):
    """Probes use the root path without an account; nothing else is there."""
    status, headers, body = await call(api, "GET", "/", {})
    assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    assert body.startswith(b"inference-svc")
    for path in ("/", "/health"):
        status, headers, body = await call(api, "HEAD", path, {})
        assert (status, body) == (200, b"")
    assert (await call(api, "POST", "/", {}, x=1))[0] == 401
    known = {"Authorization": f"Bearer {CLIENTS['acme']}"}
    assert (await call(api, "DELETE", "/", known))[0] == 405
