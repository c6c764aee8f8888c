"""Which client a token or a certificate belongs to, and how a token gets to its client."""

import re
import stat

import pytest

from shared.access.clients import Clients, StreamCounts, TooManyStreamsError, authenticate
from shared.access.identity import socket_identity
from shared.access.settings import ClientSettings, check_distinct
from shared.access.tokens import TokenFileError, make_token, read_token, token_digest, token_text
from shared.types.errors import UnauthenticatedError

TOKEN, OLD = "kvt_secret", "kvt_old"
CLIENTS = Clients(
    {
        "web": ClientSettings(
            token_sha256=(token_digest(OLD), token_digest(TOKEN)), tenants=("acme",), max_streams=2
        ),
        "probe": ClientSettings(
            certificate_names=("probe.example",), tenants=("*",), roles=("reader",)
        ),
    }
)
OWN = socket_identity("reader.sock", ("*",), ("reader",))


def test_a_token_names_its_client_while_it_is_replaced_too():
    """Each digest of a client counts."""
    for token in (OLD, TOKEN):
        found = authenticate(CLIENTS, f"Bearer {token}", (), None)
        assert (found.name, found.via, found.tenants) == ("web", "token", ("acme",))


def test_a_certificate_names_its_client():
    """By any of its names; a token that comes along says more."""
    names = ["other", "probe.example"]
    assert authenticate(CLIENTS, "", names, None).name == "probe"
    assert authenticate(CLIENTS, f"bearer  {TOKEN}", names, None).name == "web"


@pytest.mark.parametrize(
    "authorization",
    ["Bearer wrong", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, "Bearer " + "x" * 100_000],
)
@pytest.mark.parametrize("own", [None, OWN], ids=["tcp", "socket"])
def test_every_wrong_token_is_refused_with_the_same_words(authorization, own):
    """Also on a socket that would let the caller in without one: it is not who it says."""
    with pytest.raises(UnauthenticatedError) as refused:
        authenticate(CLIENTS, authorization, ["probe.example"], own)
    with pytest.raises(UnauthenticatedError) as other:
        authenticate(CLIENTS, "", (), None)
    assert str(refused.value) == str(other.value)


def test_a_socket_speaks_for_who_comes_without_a_token():
    """Where there are no clients at all, what libraries always send is no token."""
    assert authenticate(CLIENTS, "", (), OWN) is OWN
    assert authenticate(Clients({}), "Bearer anything", (), OWN) is OWN
    with pytest.raises(UnauthenticatedError):
        authenticate(Clients({}), "Bearer anything", (), None)


def test_a_made_token_is_read_from_its_file(tmp_path):
    """Only its owner can read the file, which is never overwritten; the settings get the digest."""
    path = tmp_path / "token"
    made = make_token(path)
    token = read_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made == {"file": str(path), "token_sha256": token_digest(token)}
    assert token not in token_text("web", made)
    assert re.search(
        r"\[clients\.web\]\ntoken_sha256 = \[\"[0-9a-f]{64}\"\]", token_text("web", made)
    )
    with pytest.raises(TokenFileError, match="File exists"):
        make_token(path)
    assert make_token(None)["token"] != make_token(None)["token"]


@pytest.mark.parametrize("content", [b"", b" \n", b"two words", b"\xff\xfe", b"line\nline", None])
def test_what_is_no_token_is_not_sent(tmp_path, content):
    """A file that is missing, empty, or something else is named; its content is not."""
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenFileError, match=str(path)) as refused:
        read_token(path)
    assert "words" not in str(refused.value)


def test_streams_are_counted_by_client():
    """Each client has its own bound or the common one, which may change."""
    counts = StreamCounts(most=1)
    web = authenticate(CLIENTS, f"Bearer {TOKEN}", (), None)
    probe = authenticate(CLIENTS, "", ["probe.example"], None)
    counts.hold(web)
    counts.hold(web)
    counts.hold(probe)
    for held in (web, probe):
        with pytest.raises(TooManyStreamsError) as refused:
            counts.hold(held)
        assert refused.value.retryable
        assert refused.value.retry_after_s
    counts.release(web)
    counts.hold(web)
    counts.most = 2
    counts.hold(probe)


@pytest.mark.parametrize("both", [{"token_sha256": ("a" * 64,)}, {"certificate_names": ("web",)}])
def test_two_clients_cannot_be_one(both):
    """Nobody could say which of them calls; one client may list what it has twice."""
    one = ClientSettings(tenants=("a",), **{name: each * 2 for name, each in both.items()})
    assert check_distinct({"one": one}) == {"one": one}
    with pytest.raises(ValueError, match="one and other"):
        check_distinct({"one": one, "other": ClientSettings(tenants=("b",), **both)})
