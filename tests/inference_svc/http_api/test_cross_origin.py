"""Which other sites' pages a browser lets in, and which clients need no account."""

from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from inference_svc.http_api.cross_origin import (
    MAX_REQUESTED,
    NotLocalError,
    check_local,
    origin_headers,
    preflight_middleware,
    requested_header_names,
)
from inference_svc.http_api.errors import RequestError

PAGE = "https://chat.example:8443"
ASKS = {"Origin": PAGE, "Access-Control-Request-Method": "DELETE"}
OF_CORS = ("Access-Control-Allow-Origin", "Access-Control-Expose-Headers", "Vary")


@asynccontextmanager
async def site(*origins):
    """Make a site with one path, which needs an account."""

    @web.middleware
    async def deny(request, handler):
        raise web.HTTPUnauthorized

    async def answer(_request):
        raise AssertionError("nobody gets here")

    app = web.Application(middlewares=[preflight_middleware(origins), deny])
    app.on_response_prepare.append(origin_headers(origins))
    app.router.add_get("/one", answer)
    app.router.add_delete("/one", answer)
    async with TestClient(TestServer(app)) as client:
        yield client


async def test_a_preflight_lists_methods_and_requested_headers():
    """Without an account; and never credentials."""
    async with site("https://other.example", PAGE) as client:
        names = "authorization,content-type, x-stainless-os"
        asks = ASKS | {"Access-Control-Request-Headers": names}
        async with client.options("/one", headers=asks) as told:
            assert told.status == 204
            assert told.headers["Access-Control-Allow-Origin"] == PAGE
            assert told.headers["Access-Control-Allow-Methods"] == "DELETE, GET, HEAD"
            assert told.headers["Access-Control-Allow-Headers"] == names
            assert int(told.headers["Access-Control-Max-Age"]) > 0
            assert told.headers["Vary"] == "Origin"
            assert "Access-Control-Allow-Credentials" not in told.headers


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/one", ASKS | {"Origin": "https://evil.example"}),
        ("/one", ASKS | {"Origin": PAGE.upper()}),
        ("/one", ASKS | {"Origin": f"{PAGE}.evil.example"}),
        ("/one", ASKS | {"Origin": "null"}),
        ("/one", {"Access-Control-Request-Method": "GET"}),
        ("/one", {"Origin": PAGE}),
        ("/none", ASKS),
    ],
    ids=["other", "capitals", "longer", "null", "no-origin", "no-preflight", "no-path"],
)
async def test_other_requests_pass_the_gates(path, headers):
    """With other origins, without a path, or without a preflight."""
    async with site(PAGE) as client, client.options(path, headers=headers) as told:
        assert told.status == 401
        assert "Access-Control-Allow-Methods" not in told.headers


async def test_only_options_are_a_preflight():
    """Not another method that the path lacks, whatever headers it has."""
    async with site(PAGE) as client, client.patch("/one", headers=ASKS) as told:
        assert told.status == 401


async def test_a_refusal_is_shown_to_the_page():
    """Otherwise the page could not see the error; caches keep it for that page only."""
    async with site(PAGE) as client, client.get("/one", headers={"Origin": PAGE}) as told:
        origin, exposed, vary = map(told.headers.get, OF_CORS)
        assert (told.status, origin, vary) == (401, PAGE, "Origin")
        assert {"x-request-id", "X-Session-Id", "Retry-After"} <= set(exposed.split(", "))


@pytest.mark.parametrize("origins", [(), (PAGE,)], ids=["none", "one"])
async def test_other_pages_get_no_headers(origins):
    """Except that answers depend on the origin, where any are allowed."""
    async with (
        site(*origins) as client,
        client.get("/one", headers={"Origin": "https://evil.example"}) as told,
    ):
        assert [told.headers.get(name) for name in OF_CORS] == [
            None,
            None,
            "Origin" if origins else None,
        ]


async def test_two_origins_count_as_none():
    """No browser sends them."""
    headers = [("Origin", PAGE), ("Origin", PAGE)]
    async with site(PAGE) as client, client.get("/one", headers=headers) as told:
        assert "Access-Control-Allow-Origin" not in told.headers


async def test_pages_of_any_origin():
    """The header says so, without their names."""
    async with site("*") as client, client.get("/one", headers={"Origin": "null"}) as told:
        assert told.headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize(
    "sent", ["a b", "a,,b", ",", "a;b", "a\tb", "é", "a" * 129, "a," * MAX_REQUESTED + "a"]
)
def test_invalid_header_names_are_refused(sent):
    """A stranger's text is not returned in a header."""
    with pytest.raises(RequestError, match="Access-Control-Request-Headers"):
        requested_header_names([sent])


def test_names_in_several_headers():
    """They are one list, as in HTTP; and there may be none."""
    assert requested_header_names(["a, b", "c"]) == "a, b, c"
    assert requested_header_names([]) == requested_header_names([""]) == ""


HERE = ["127.0.0.1:8000"]


@pytest.mark.parametrize(
    ("peer", "host", "origins"),
    [
        ("127.0.0.1", "127.0.0.1:8000", []),
        ("127.0.0.1", "localhost", []),
        ("127.0.0.1", "LocalHost:65535", []),
        ("127.9.9.9", "127.1.2.3:1", []),
        ("::1", "[::1]:8000", []),
        ("::1", "[::1]", ["http://[::1]:3000"]),
        ("127.0.0.1", "localhost:8000", ["http://localhost:3000"]),
        ("127.0.0.1", "localhost:8000", ["https://127.0.0.1"]),
    ],
)
def test_local_clients(peer, host, origins):
    """By every name of the loopback; pages that this machine serves count as well."""
    check_local(peer, [host], origins)


@pytest.mark.parametrize(
    "hosts",
    [
        ["evil.example"],
        ["evil.example:8000"],
        ["localhost.evil.example:8000"],
        ["127.0.0.1.evil.example"],
        ["evil.localhost"],
        ["0.0.0.0:8000"],
        ["192.168.0.7:8000"],
        ["[::2]:8000"],
        ["127.1"],
        ["2130706433"],
        ["localhost:8000@evil.example"],
        ["evil.example@localhost"],
        ["localhost:"],
        ["localhost:8000\n"],
        [" localhost"],
        [""],
        [],
        ["localhost", "evil.example"],
        ["localhost", "localhost"],
    ],
    ids=str,
)
def test_a_host_that_may_be_a_pages_own_is_refused(hosts):
    """DNS rebinding: the browser says the name that it knows this machine by."""
    with pytest.raises(NotLocalError, match="not a name of this machine") as refused:
        check_local("127.0.0.1", hosts, [])
    assert (refused.value.grpc_code, refused.value.reason) == ("PERMISSION_DENIED", "not_local")
    assert "call 127.0.0.1 or localhost" in refused.value.remedy


@pytest.mark.parametrize(
    "origins",
    [
        ["https://evil.example"],
        ["http://localhost.evil.example"],
        ["http://localhost@evil.example"],
        ["http://evil.example/?http://localhost"],
        ["null"],
        [""],
        ["localhost"],
        ["file://localhost"],
        ["chrome-extension://127.0.0.1"],
        ["http://localhost", "https://evil.example"],
    ],
    ids=str,
)
def test_a_page_from_elsewhere_is_refused(origins):
    """Whatever it calls itself, and also where it has no origin that it may name."""
    with pytest.raises(NotLocalError, match=r"the page .* does not come from this machine"):
        check_local("127.0.0.1", HERE, origins)


@pytest.mark.parametrize("peer", ["10.0.0.1", "192.168.0.7", "::2", "fe80::1%eth0", "", "localhos"])
def test_a_remote_peer_is_refused(peer):
    """A firewall's rule may redirect it to a loopback address."""
    with pytest.raises(NotLocalError, match="the connection comes from"):
        check_local(peer, HERE, [])
