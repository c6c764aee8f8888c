"""Who may come without an account: this machine's own programs, and no pages from elsewhere."""

import pytest

from shared.access.local_callers import NotLocalError, check_local

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
def test_who_is_here(peer, host, origins):
    """By every name of the loopback; a page that this machine serves itself is of it."""
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
    with pytest.raises(NotLocalError, match="no name of this machine") as refused:
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
    with pytest.raises(NotLocalError, match=r"the page of .* is not of this machine"):
        check_local("127.0.0.1", HERE, origins)


@pytest.mark.parametrize("peer", ["10.0.0.1", "192.168.0.7", "::2", "fe80::1%eth0", "", "localhos"])
def test_a_peer_from_elsewhere_is_refused(peer):
    """As a rule of the firewall may bring it to a loopback address."""
    with pytest.raises(NotLocalError, match="the connection comes from"):
        check_local(peer, HERE, [])
