"""Who comes from this machine itself, and not through a browser's page that comes from elsewhere.

A loopback address is reached by every process of this machine, a browser among them; and what a
browser sends, a page of any site may have written. Two things give such a page away:

    Host     names the page's own site, if that site had its name resolve to this machine (DNS
             rebinding): the page could read the answers
    Origin   names the page's site in requests across sites: the page could not read the answers,
             but its turns would be computed

Pure. *Source:* RFC 9110 (Host), RFC 6454 (Origin), as browsers send them.
"""

import re
from collections.abc import Sequence

from shared.access.addresses import is_loopback_host
from shared.types.errors import DeniedError

MOST_SHOWN = 80  # characters of what a stranger sent
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:\d{1,5})?", re.IGNORECASE)
_REMEDY = (
    "call 127.0.0.1 or localhost from this machine; for others, name clients in [clients.NAME]"
)


class NotLocalError(DeniedError):
    """Without an account come only callers from this machine, and no pages from elsewhere."""

    reason = "not_local"


def check_local(peer: str, hosts: Sequence[str], origins: Sequence[str]) -> None:
    """Refuse an HTTP request that may come without an account, but from this machine only.

    Args:
        peer: the address that the connection comes from, "" if nobody knows.
        hosts: the values of its header Host, of which there has to be one.
        origins: the values of its header Origin; only browsers send one.

    Raises:
        NotLocalError: naming what is not local.
    """
    if not is_loopback_host(peer):
        raise NotLocalError(f"the connection comes from {peer[:MOST_SHOWN] or 'nowhere'}", _REMEDY)
    if len(hosts) != 1 or not _is_local_authority(hosts[0]):
        said = ", ".join(hosts)[:MOST_SHOWN]
        raise NotLocalError(f"the host {said!r} is no name of this machine", _REMEDY)
    for origin in origins:
        scheme, _, authority = origin.partition("://")
        if scheme not in ("http", "https") or not _is_local_authority(authority):
            raise NotLocalError(
                f"the page of {origin[:MOST_SHOWN]!r} is not of this machine", _REMEDY
            )


def _is_local_authority(text: str) -> bool:
    """Whether it is a loopback host, with or without a port."""
    found = _AUTHORITY.fullmatch(text)
    return found is not None and is_loopback_host(found[1])
