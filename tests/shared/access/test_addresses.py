"""Addresses, lists of them, and how clients use them."""

import pytest

from shared.access.addresses import is_loopback, is_tcp, validate_ports, validate_sockets
from shared.access.channels import (
    ClientCredentials,
    ConnectionOptionsError,
    channel_of,
    read_credentials,
)


def test_valid_addresses():
    """Hosts by name and number, with valid ports."""
    assert all(map(is_tcp, ("h:1", "1.2.3.4:65535", "[::1]:80", "a-b.c:0")))
    assert not any(map(is_tcp, ("h", "h:", ":1", "h:65536", "h:x", "h:1\n", "[::1:80", "a b:1")))
    assert not is_loopback("128.0.0.1:1")
    assert not is_loopback("[::2]:1")


def test_lists_of_addresses_keep_their_order():
    """Any number of them; of one kind where no other is allowed."""
    both = ("unix:/run/x", "127.0.0.1:1", "[::1]:1")
    assert validate_sockets(both) == both
    assert validate_ports(both[1:]) == both[1:]
    assert validate_sockets(()) == validate_ports(()) == ()


@pytest.mark.parametrize("address", ["nonsense", "unix:relative", "unix:/" + "x" * 200, ":1", ""])
def test_what_is_no_address_is_named(address):
    """With what may stand there, wherever in the list it is."""
    with pytest.raises(
        ValueError, match=r"not an address: write unix:/path .* or host:port, or auto$"
    ):
        validate_sockets(["127.0.0.1:1", address], also=", or auto")
    with pytest.raises(ValueError, match=r"not an address: write host:port$"):
        validate_ports(["127.0.0.1:1", address])


def test_mixed_kinds_and_repeated_addresses_are_refused():
    """Binding would fail, without naming the setting."""
    with pytest.raises(ValueError, match="unix:/run/x"):
        validate_ports(["unix:/run/x"])
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1 is listed twice"):
        validate_sockets(["127.0.0.1:1", "unix:/run/x", "127.0.0.1:1"])


@pytest.mark.parametrize("address", ["nowhere", "h:1/path", "http://h:1", ""])
def test_a_client_refuses_an_invalid_address(address):
    """Before anything is sent."""
    with pytest.raises(ConnectionOptionsError, match="host:port"):
        channel_of(address, ClientCredentials(), ())


def test_files_of_a_command_line_are_checked(tmp_path):
    """A certificate needs its key, and files must exist."""
    with pytest.raises(ConnectionOptionsError, match="--tls-key"):
        read_credentials(tls_cert=tmp_path / "c")
    with pytest.raises(ConnectionOptionsError, match="--tls-ca"):
        read_credentials(tls_ca=tmp_path / "none")
    (tmp_path / "token").write_text("kvt_secret\n")
    found = read_credentials(token_file=tmp_path / "token")
    assert found == ClientCredentials("kvt_secret")
    assert "secret" not in repr(found)
