"""Addresses: "unix:/path" or "host:port", alone and in lists. Pure."""

import re
from collections.abc import Callable, Sequence
from ipaddress import ip_address

from shared.process.runtime_dir import MAX_SOCKET_PATH

UNIX = "unix:"
_TCP = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})\Z")


def is_unix(address: str) -> bool:
    """Whether it is a Unix socket, which its mode and group guard."""
    return address.startswith(UNIX)


def is_tcp(address: str) -> bool:
    """Whether it is a host and a port."""
    found = _TCP.match(address)
    return found is not None and int(found[2]) < 1 << 16


def usable_sockets(addresses: Sequence[str], *, also: str = "") -> tuple[str, ...]:
    """Check a setting that lists addresses to listen at, each a Unix socket or a host and a port.

    Args:
        addresses: as they are written.
        also: what else the setting takes, for the error.

    Raises:
        ValueError: naming the first that is no address, or is there twice.
    """
    kinds = f"unix:/path (at most {MAX_SOCKET_PATH} bytes) or host:port"
    return _distinct(addresses, lambda one: is_tcp(one) or _is_socket_path(one), kinds + also)


def usable_ports(addresses: Sequence[str]) -> tuple[str, ...]:
    """Check a setting that lists addresses to listen at, each a host and a port.

    Raises:
        ValueError: naming the first that is no address, or is there twice.
    """
    return _distinct(addresses, is_tcp, "host:port")


def _is_socket_path(address: str) -> bool:
    path = address.removeprefix(UNIX)
    return address.startswith("unix:/") and len(path.encode()) <= MAX_SOCKET_PATH


def _distinct(
    addresses: Sequence[str], is_usable: Callable[[str], bool], kinds: str
) -> tuple[str, ...]:
    for index, one in enumerate(addresses):
        if not is_usable(one):
            raise ValueError(f"{one!r} is no address: write {kinds}")
        if one in addresses[:index]:
            raise ValueError(f"{one} is there twice, name it once")
    return tuple(addresses)


def is_loopback(address: str) -> bool:
    """Whether a TCP address is reached from this machine only."""
    return is_loopback_host(address.rpartition(":")[0])


def is_loopback_host(host: str) -> bool:
    """Whether a host, an address in brackets or not, can be this machine only."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
