"""Addresses: "unix:/path" or "host:port", and which of them may be listened on. Pure."""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING

from shared.types.errors import ConfigError

if TYPE_CHECKING:  # a client on a command line needs no settings
    from shared.access.settings import ClientSettings, TlsSettings

UNIX = "unix:"
_TCP = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})\Z")


class UnguardedError(ConfigError):
    """A port would be open to strangers."""

    reason = "unguarded"


def is_unix(address: str) -> bool:
    """Whether it is a Unix socket, which its mode and group guard."""
    return address.startswith(UNIX)


def is_tcp(address: str) -> bool:
    """Whether it is a host and a port."""
    found = _TCP.match(address)
    return found is not None and int(found[2]) < 1 << 16


def is_loopback(address: str) -> bool:
    """Whether a TCP address is reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_guarded(
    address: str, tls: "TlsSettings", clients: Mapping[str, "ClientSettings"]
) -> None:
    """Refuse an address where strangers could come in, or what they say could be overheard.

    Raises:
        UnguardedError: naming what is missing.
    """
    if is_unix(address):
        return
    if not clients:
        raise UnguardedError(
            f"anybody could connect to {address}",
            "name who may, in [clients.NAME] (see: kvd token), or use a Unix socket",
        )
    if not tls.is_on and not is_loopback(address):
        raise UnguardedError(
            f"tokens could be overheard on the way to {address}",
            "set tls.certificate and tls.key, or listen on 127.0.0.1",
        )
    if tls.client_ca is None and not any(client.token_sha256 for client in clients.values()):
        raise UnguardedError(
            f"nobody could connect to {address}: no client has a token",
            "set tls.client_ca for certificates, or give a client a token (kvd token)",
        )
