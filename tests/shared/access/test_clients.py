"""The client of a token or a certificate, and how a client gets its token."""

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


def test_both_tokens_of_a_client_work_during_a_replacement():
    """Each digest of a client counts."""
    for token in (OLD, TOKEN):
        found = authenticate(CLIENTS, f"Bearer {token}", (), None)
        assert (found.name, found.via, found.tenants) == ("web", "token", ("acme",))


def test_a_certificate_identifies_its_client():
    """By any of its names; a token has precedence."""
    names = ["other", "probe.example"]
    assert authenticate(CLIENTS, "", names, None).name == "probe"
    assert authenticate(CLIENTS, f"bearer  {TOKEN}", names, None).name == "web"


@pytest.mark.parametrize(
    "authorization",
    ["Bearer wrong", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, "Bearer " + "x" * 100_000],
)
@pytest.mark.parametrize("own", [None, OWN], ids=["tcp", "socket"])
def test_every_wrong_token_gets_the_same_refusal(authorization, own):
    """Also on a socket that needs none: the caller is not who it claims to be."""
    with pytest.raises(UnauthenticatedError) as refused:
        authenticate(CLIENTS, authorization, ["probe.example"], own)
    with pytest.raises(UnauthenticatedError) as other:
        authenticate(CLIENTS, "", (), None)
    assert str(refused.value) == str(other.value)


def test_a_socket_identifies_callers_without_a_token():
    """Without any clients, tokens that libraries always send are ignored."""
    assert authenticate(CLIENTS, "", (), OWN) is OWN
    assert authenticate(Clients({}), "Bearer anything", (), OWN) is OWN
    with pytest.raises(UnauthenticatedError):
        authenticate(Clients({}), "Bearer anything", (), None)


def test_a_generated_token_is_read_from_its_file(tmp_path):
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
def test_an_invalid_token_is_not_sent(tmp_path, content):
    """A missing, empty or wrong file is named, without its contents."""
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenFileError, match=str(path)) as refused:
        read_token(path)
    assert "words" not in str(refused.value)


def test_streams_are_counted_by_client():
    """Each has its own bound or the common one, which may change."""
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
def test_two_clients_cannot_have_one_digest(both):
    """They could not be distinguished; one client may list an entry twice."""
    one = ClientSettings(tenants=("a",), **{name: each * 2 for name, each in both.items()})
    assert check_distinct({"one": one}) == {"one": one}
    with pytest.raises(ValueError, match="one and other"):
        check_distinct({"one": one, "other": ClientSettings(tenants=("b",), **both)})
