"""Addresses that need authentication."""

import pytest

from shared.access.settings import ClientSettings, TlsSettings, UnguardedError, check_guarded

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
def test_protected_addresses(address, tls, clients):
    """A Unix socket; a token with TLS or on this machine; a certificate."""
    check_guarded([address], tls, clients)


@pytest.mark.parametrize(
    ("address", "tls", "clients", "missing"),
    [
        ("127.0.0.1:1", PLAIN, {}, "anybody could connect"),
        ("0.0.0.0:1", MUTUAL, {}, "anybody could connect"),
        ("0.0.0.0:1", PLAIN, WITH_TOKEN, "could be read on the network"),
        ("localhost.evil.example:1", PLAIN, WITH_TOKEN, "could be read on the network"),
        ("[::]:1", PLAIN, WITH_TOKEN, "could be read on the network"),
        ("127.0.0.1:1", PLAIN, WITH_CERTIFICATE, "no client has a token"),
        ("0.0.0.0:1", TLS, WITH_CERTIFICATE, "no client has a token"),
    ],
)
def test_unprotected_addresses(address, tls, clients, missing):
    """One line names what is missing, and the remedy."""
    with pytest.raises(UnguardedError, match=missing) as refused:
        check_guarded(["unix:/run/x", address], tls, clients)
    assert refused.value.exit_code == 78
    assert refused.value.remedy
    assert "\n" not in str(refused.value)
