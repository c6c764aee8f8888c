"""Which pages of other sites a browser lets in, over a real connection."""

from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from inference_svc.http_api.cross_origin import (
    MAX_ASKED,
    answering_preflights,
    asked_names,
    naming_origins,
)
from inference_svc.http_api.errors import RequestError

PAGE = "https://chat.example:8443"
ASKS = {"Origin": PAGE, "Access-Control-Request-Method": "DELETE"}
OF_CORS = ("Access-Control-Allow-Origin", "Access-Control-Expose-Headers", "Vary")


@asynccontextmanager
async def site(*origins):
    """A site with one path, which nobody gets at without an account."""

    @web.middleware
    async def deny(request, handler):
        raise web.HTTPUnauthorized

    async def answer(_request):
        raise AssertionError("nobody gets here")

    app = web.Application(middlewares=[answering_preflights(origins), deny])
    app.on_response_prepare.append(naming_origins(origins))
    app.router.add_get("/one", answer)
    app.router.add_delete("/one", answer)
    async with TestClient(TestServer(app)) as client:
        yield client


async def test_a_preflight_has_what_the_path_takes_and_the_page_asks_for():
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
async def test_all_else_goes_through_the_gates(path, headers):
    """Of other origins, of no path, or not a preflight."""
    async with site(PAGE) as client, client.options(path, headers=headers) as told:
        assert told.status == 401
        assert "Access-Control-Allow-Methods" not in told.headers


async def test_only_options_are_a_preflight():
    """Not another method that the path has not, whatever headers it comes with."""
    async with site(PAGE) as client, client.patch("/one", headers=ASKS) as told:
        assert told.status == 401


async def test_a_refusal_is_shown_to_the_page():
    """Or it could not tell what is wrong; what caches keep of it is that page's."""
    async with site(PAGE) as client, client.get("/one", headers={"Origin": PAGE}) as told:
        origin, exposed, vary = map(told.headers.get, OF_CORS)
        assert (told.status, origin, vary) == (401, PAGE, "Origin")
        assert {"x-request-id", "X-Session-Id", "Retry-After"} <= set(exposed.split(", "))


@pytest.mark.parametrize("origins", [(), (PAGE,)], ids=["none", "one"])
async def test_other_pages_are_told_nothing(origins):
    """But that it may be another answer for others, where there are any."""
    async with (
        site(*origins) as client,
        client.get("/one", headers={"Origin": "https://evil.example"}) as told,
    ):
        assert [told.headers.get(name) for name in OF_CORS] == [
            None,
            None,
            "Origin" if origins else None,
        ]


async def test_two_origins_are_none():
    """No browser sends them."""
    headers = [("Origin", PAGE), ("Origin", PAGE)]
    async with site(PAGE) as client, client.get("/one", headers=headers) as told:
        assert "Access-Control-Allow-Origin" not in told.headers


async def test_pages_of_any_origin():
    """Are told so, and not by their names."""
    async with site("*") as client, client.get("/one", headers={"Origin": "null"}) as told:
        assert told.headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize(
    "sent", ["a b", "a,,b", ",", "a;b", "a\tb", "é", "a" * 129, "a," * MAX_ASKED + "a"]
)
def test_what_is_no_name_of_a_header_is_refused(sent):
    """Nothing that a stranger made up goes back in a header."""
    with pytest.raises(RequestError, match="Access-Control-Request-Headers"):
        asked_names([sent])


def test_names_that_come_in_several_headers():
    """Are one list, as HTTP has it; and there may be none."""
    assert asked_names(["a, b", "c"]) == "a, b, c"
    assert asked_names([]) == asked_names([""]) == ""
