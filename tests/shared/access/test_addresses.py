"""Which addresses may be listened on, and how clients go to them."""

import pytest

from shared.access.addresses import UnguardedError, check_guarded, is_loopback, is_tcp
from shared.access.channels import (
    ClientCredentials,
    ConnectionOptionsError,
    channel_of,
    read_credentials,
)
from shared.access.settings import ClientSettings, TlsSettings

PLAIN = TlsSettings()
TLS = TlsSettings(certificate="c.pem", key="k.pem")
MUTUAL = TlsSettings(certificate="c.pem", key="k.pem", client_ca="ca.pem")
WITH_TOKEN = {"a": ClientSettings(token_sha256=("0" * 64,), tenants=("a",))}
WITH_CERTIFICATE = {"a": ClientSettings(certificate_names=("a",), tenants=("a",))}


@pytest.mark.parametrize(
    ("address", "tls", "clients"),
    [
        ("unix:/run/x", PLAIN, {}),
        ("127.0.0.1:1", PLAIN, WITH_TOKEN),
        ("127.9.9.9:1", PLAIN, WITH_TOKEN),
        ("[::1]:1", PLAIN, WITH_TOKEN),
        ("localhost:1", PLAIN, WITH_TOKEN),
        ("0.0.0.0:1", TLS, WITH_TOKEN),
        ("0.0.0.0:1", MUTUAL, WITH_CERTIFICATE),
        ("[::]:1", MUTUAL, WITH_TOKEN),
    ],
)
def test_guarded_addresses(address, tls, clients):
    """A Unix socket; a token that stays on this machine or under TLS; a certificate."""
    check_guarded(address, tls, clients)


@pytest.mark.parametrize(
    ("address", "tls", "clients", "missing"),
    [
        ("127.0.0.1:1", PLAIN, {}, "anybody could connect"),
        ("0.0.0.0:1", MUTUAL, {}, "anybody could connect"),
        ("0.0.0.0:1", PLAIN, WITH_TOKEN, "overheard"),
        ("localhost.evil.example:1", PLAIN, WITH_TOKEN, "overheard"),
        ("[::]:1", PLAIN, WITH_TOKEN, "overheard"),
        ("127.0.0.1:1", PLAIN, WITH_CERTIFICATE, "no client has a token"),
        ("0.0.0.0:1", TLS, WITH_CERTIFICATE, "no client has a token"),
    ],
)
def test_unguarded_addresses(address, tls, clients, missing):
    """What is missing is said in one line, with what to do."""
    with pytest.raises(UnguardedError, match=missing) as refused:
        check_guarded(address, tls, clients)
    assert refused.value.exit_code == 78
    assert refused.value.remedy
    assert "\n" not in str(refused.value)


def test_what_an_address_is():
    """Hosts by name and number, ports that there are."""
    assert all(map(is_tcp, ("h:1", "1.2.3.4:65535", "[::1]:80", "a-b.c:0")))
    assert not any(map(is_tcp, ("h", "h:", ":1", "h:65536", "h:x", "h:1\n", "[::1:80", "a b:1")))
    assert not is_loopback("128.0.0.1:1")
    assert not is_loopback("[::2]:1")


@pytest.mark.parametrize("address", ["nowhere", "h:1/path", "http://h:1", ""])
def test_a_client_is_told_what_is_no_address(address):
    """Before anything is sent anywhere."""
    with pytest.raises(ConnectionOptionsError, match="host:port"):
        channel_of(address, ClientCredentials(), ())


def test_files_of_a_command_line(tmp_path):
    """A certificate goes with its key, and files must be there."""
    with pytest.raises(ConnectionOptionsError, match="--tls-key"):
        read_credentials(tls_cert=tmp_path / "c")
    with pytest.raises(ConnectionOptionsError, match="--tls-ca"):
        read_credentials(tls_ca=tmp_path / "none")
    (tmp_path / "token").write_text("kvt_secret\n")
    found = read_credentials(token_file=tmp_path / "token")
    assert found == ClientCredentials("kvt_secret")
    assert "secret" not in repr(found)
