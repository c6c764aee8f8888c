"""Addresses: "unix:/path" or "host:port", alone and in lists. Pure."""

import re
from collections.abc import Callable, Sequence
from ipaddress import ip_address

from shared.process.runtime_dir import MAX_SOCKET_PATH

UNIX = "unix:"
_TCP = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})\Z")


def is_unix(address: str) -> bool:
    """Whether an address is a Unix socket, which is guarded by its mode and group."""
    return address.startswith(UNIX)


def is_tcp(address: str) -> bool:
    """Whether an address is a host and a port."""
    found = _TCP.match(address)
    return found is not None and int(found[2]) < 1 << 16


def validate_sockets(addresses: Sequence[str], *, also: str = "") -> tuple[str, ...]:
    """Check a setting that lists addresses to listen at, each a Unix socket or a host and a port.

    Args:
        addresses: the addresses as written in the settings.
        also: what else the setting accepts, for the error message.

    Raises:
        ValueError: one is no address, or is listed twice; the first such one is named.
    """
    kinds = f"unix:/path (at most {MAX_SOCKET_PATH} bytes) or host:port"
    return _validate(addresses, lambda a: is_tcp(a) or _is_socket_path(a), kinds + also)


def validate_ports(addresses: Sequence[str]) -> tuple[str, ...]:
    """Check a setting that lists addresses to listen at, each a host and a port.

    Raises:
        ValueError: one is no address, or is listed twice; the first such one is named.
    """
    return _validate(addresses, is_tcp, "host:port")


def _is_socket_path(address: str) -> bool:
    path = address.removeprefix(UNIX)
    return address.startswith("unix:/") and len(path.encode()) <= MAX_SOCKET_PATH


def _validate(
    addresses: Sequence[str], is_usable: Callable[[str], bool], kinds: str
) -> tuple[str, ...]:
    for index, address in enumerate(addresses):
        if not is_usable(address):
            raise ValueError(f"{address!r} is not an address: write {kinds}")
        if address in addresses[:index]:
            raise ValueError(f"the address {address} is listed twice: list it once")
    return tuple(addresses)


def is_loopback(address: str) -> bool:
    """Whether a TCP address is reachable from this machine only."""
    return is_loopback_host(address.rpartition(":")[0])


def is_loopback_host(host: str) -> bool:
    """Whether a host, an address in brackets or not, is this machine only."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
