"""Every route of the HTTP API with arbitrary requests: each is answered or refused.

The routes are those of the server's own table, so new ones are fuzzed, too. Each request has to
end, a refusal has the form of its client's API with a remedy, and answers can be parsed.
"""

import asyncio
import json
import re
from collections.abc import Iterator

import aiohttp
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from inference_svc.http_api.serving import ROUTES
from tests.fuzz.amounts import few, many
from tests.fuzz.http_requests import KINDS, NUM_MARKS, Request, requests_of, right_request, scenes
from tests.fuzz.judged_log import JudgedLog
from tests.fuzz.right_bodies import ASKED, MODEL, VALID
from tests.http_api.conftest import CLIENTS, ApiService

pytestmark = pytest.mark.asyncio(loop_scope="module")

HANGS_S = 60.0
# tokens of an answer whose request has no limit
FEW_TOKENS = "\n[scheduler]\ndefault_max_tokens = 8\n"
PLAIN = {"model": MODEL, "messages": ASKED, "max_tokens": 2}
PATHS = [(method, path) for method, path, _ in ROUTES]
# Ids that later requests name; compacting stores none.
TOLD = {kind: re.compile(rf"\b{prefix}[0-9a-f]{{16,}}(?:_\d+)?") for kind, prefix in KINDS.items()}
MADE = {
    "chat": "/v1/chat/completions",
    "response": "/v1/responses",
    "conversation": "/v1/conversations",
    "item": "/v1/conversations/{id}/items",
}
UNTOLD = "/v1/responses/compact"


class Fuzzed:
    """A service under fuzzing, with the ids that requests can name."""

    def __init__(self, api: ApiService, session: aiohttp.ClientSession) -> None:
        self._api = api
        self._session = session
        self._log = JudgedLog(api.service.log_path)
        self._num_before = len(self._log.errors())
        self._known: dict[str, list[str]] = {}

    async def send(self, request: Request) -> int:
        """Send a request, check its end, and return its status."""
        sent = request.naming(self._known)
        url = URL(self._api.url.removesuffix("/v1") + sent.path, encoded=True)
        if sent.query:
            url = URL(f"{url}?{sent.query}", encoded=True)
        headers = {"Authorization": f"Bearer {CLIENTS['acme']}", **dict(sent.headers)}
        async with (
            asyncio.timeout(HANGS_S),
            self._session.request(
                sent.method,
                url,
                data=sent.body,
                headers=headers,
                skip_auto_headers=["Content-Type"],
                allow_redirects=False,
            ) as reply,
        ):
            text = (await reply.read()).decode()
            if reply.status >= 500:
                self.is_unharmed()  # the log says more than the answer
            _judge(sent, reply, text)
        if reply.status == 404:
            self._forget(sent.path)
        elif sent.method == "DELETE" and reply.status == 200:
            self._forget(sent.path.rpartition("/")[2])
        elif sent.path != UNTOLD:
            self._learn(sent.path, text)
        return reply.status

    def _learn(self, path: str, text: str) -> None:
        for kind, told in TOLD.items():
            if kind == "item" and not path.endswith("/items"):
                continue  # of a response, or of a message
            ids = dict.fromkeys([*told.findall(text), *self._known.get(kind, ())])
            self._known[kind] = list(ids)[:NUM_MARKS]

    def _forget(self, named: str) -> None:
        for kind, ids in self._known.items():
            self._known[kind] = [each for each in ids if each not in named]

    async def knows_some(self) -> None:
        """Create one object of each kind that requests may name."""
        for kind, path in MADE.items():
            if not self._known.get(kind):
                assert await self.send(right_request("POST", path)) == 200

    async def is_served(self) -> None:
        """Check that a turn is answered as usual."""
        url, body = f"{self._api.url}/chat/completions", {**PLAIN, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {CLIENTS['globex']}"}
        async with (
            asyncio.timeout(HANGS_S),
            self._session.post(url, json=body, headers=headers) as reply,
        ):
            answer = await reply.json()
        self.is_unharmed()
        assert answer["usage"]["completion_tokens"] == PLAIN["max_tokens"], answer

    def is_unharmed(self) -> None:
        """Check that it has logged nothing that no client must be able to cause."""
        errors = self._log.errors()[self._num_before :]
        assert not errors, "\n".join(errors[:3])


def _judge(sent: Request, reply: aiohttp.ClientResponse, text: str) -> None:
    """Check that a refusal is the client's error in its API's form, and that an answer parses."""
    assert reply.status < 300 or 400 <= reply.status < 500, (reply.status, text)
    assert "Traceback" not in text
    if sent.method == "HEAD" or not text:
        assert sent.method in ("HEAD", "OPTIONS"), reply.status
    elif reply.status >= 400:
        _judge_refusal(sent, _parse(text))
    elif reply.content_type == "text/event-stream":
        assert list(_events(text))
    elif sent.path != "/":
        assert _parse(text)


def _judge_refusal(sent: Request, refused: dict) -> None:
    names = {name.lower() for name, _ in sent.headers}
    error = refused["error"]
    if sent.path.startswith("/v1/messages") or "anthropic-version" in names:
        assert refused["type"] == "error"
        assert error.keys() >= {"type", "message"}
    else:
        assert error.keys() == {"message", "type", "param", "code"}
    assert re.fullmatch(r"[a-z_]+", error["type"])
    what, _, remedy = error["message"].rpartition(": ")
    assert what, error
    assert remedy, error
    assert len(error["message"]) < 2000


def _events(text: str) -> Iterator[dict]:
    """Return the events of a stream, without the mark at its end."""
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield _parse(line.removeprefix("data: "))


def _parse(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(text, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fuzzed(tiny_model, tmp_path_factory):
    """Run one service for all tests; at the end it serves, and stops properly."""
    api = ApiService(tiny_model, tmp_path_factory.mktemp("routes"), more=FEW_TOKENS)
    await api.kvd.start()
    try:
        await api.start()
        async with aiohttp.ClientSession() as session:
            fuzzed = Fuzzed(api, session)
            yield fuzzed
            await fuzzed.is_served()
        await api.service.stop()
        fuzzed.is_unharmed()
    finally:
        await api.service.kill()
        await api.kvd.stop()


async def _play(fuzzed: Fuzzed, scene: list[list[Request]]) -> None:
    """Send the requests, those of one list at once; check that the service serves afterwards."""
    await fuzzed.knows_some()
    for at_once in scene:
        await asyncio.gather(*map(fuzzed.send, at_once))
    await fuzzed.is_served()


def _in_their_order(route: tuple[str, str]) -> tuple[bool, int]:
    """Order creation before reading, and that before deletion, inner objects first."""
    method, path = route
    return method == "DELETE", path.count("{") * (-1 if method == "DELETE" else 1)


async def test_every_route_answers_a_valid_request(fuzzed):
    """So fuzzing is not limited to refusals."""
    assert {path for method, path in PATHS if method == "POST"} == VALID.keys()
    for method, path in sorted(PATHS, key=_in_their_order):
        async with asyncio.timeout(HANGS_S):
            while (status := await fuzzed.send(right_request(method, path))) == 409:
                pass  # a response in the background is incomplete
        assert status == 200, (method, path)
    await fuzzed.is_served()


@few(6)
@given(scenes)
async def test_any_requests(fuzzed, scene):
    """Requests in any order, some at the same time."""
    await _play(fuzzed, scene)


@pytest.mark.long
@many(12)
@given(scenes)
async def test_any_requests_long(fuzzed, scene):
    """Run the same for minutes."""
    await _play(fuzzed, scene)


@pytest.mark.parametrize("route", PATHS, ids=" ".join)
@few(2)
@given(st.data())
async def test_each_route_is_fuzzed(fuzzed, route, data):
    """Separately, so that none is left out."""
    await _play(fuzzed, [[data.draw(requests_of(*route))]])


@pytest.mark.long
@pytest.mark.parametrize("route", PATHS, ids=" ".join)
@many(2)
@given(st.data())
async def test_each_route_long(fuzzed, route, data):
    """Run the same for minutes."""
    await _play(fuzzed, [[data.draw(requests_of(*route))]])
