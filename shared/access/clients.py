"""Clients: which one a token or a certificate belongs to, and how many streams each holds. Pure.

Tokens are random (shared/access/tokens.py), so their plain SHA-256 reveals nothing about them; only
that is ever kept. All refusals read the same: they do not say what was wrong.
"""

import hmac
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

from shared.access.identity import Identity
from shared.access.settings import ClientSettings
from shared.types.errors import ExhaustedError, UnauthenticatedError

RETRY_S = 1.0


class TooManyStreamsError(ExhaustedError):
    """A client holds as many streams as it may."""

    reason = "too_many_streams"


class StreamCounts:
    """Counts the streams that each client holds.

    Args:
        most: most streams of a client without a limit of its own. A reload may change it.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: Counter[str] = Counter()

    def hold(self, identity: Identity) -> None:
        """Count one more stream. The caller has to call `release` when it ends.

        Raises:
            TooManyStreamsError: the client holds as many as it may.
        """
        most = identity.max_streams or self.most
        if self._held[identity.name] >= most:
            raise TooManyStreamsError(
                f"{identity.name} has {most} streams open, and may not have more",
                "close one first, or raise max_streams in the settings",
                retry_after_s=RETRY_S,
            )
        self._held[identity.name] += 1

    def release(self, identity: Identity) -> None:
        """Count one stream less."""
        self._held[identity.name] -= 1
        if not self._held[identity.name]:
            del self._held[identity.name]


MAX_TOKEN_BYTES = 256  # no token of ours is longer; a longer text is not hashed as a whole


class Clients:
    """The clients of one version of the settings.

    Args:
        settings: the clients by name.
    """

    def __init__(self, settings: Mapping[str, ClientSettings]) -> None:
        self._by_digest = [
            (bytes.fromhex(digest), _identity(name, "token", client))
            for name, client in settings.items()
            for digest in client.token_sha256
        ]
        self._by_name = {
            certificate_name: _identity(name, "certificate", client)
            for name, client in settings.items()
            for certificate_name in client.certificate_names
        }

    def __bool__(self) -> bool:
        return bool(self._by_digest or self._by_name)

    def by_token(self, token: str) -> Identity:
        """Return the client with this token, in a time that does not depend on which one it is.

        Raises:
            UnauthenticatedError: no client has it.
        """
        token_bytes = token.encode("utf-8", "surrogateescape")
        digest = sha256(token_bytes[:MAX_TOKEN_BYTES]).digest()
        found = [client for known, client in self._by_digest if hmac.compare_digest(known, digest)]
        if not found or len(token_bytes) > MAX_TOKEN_BYTES:
            raise unauthenticated()
        return found[0]

    def by_certificate(self, names: Iterable[str]) -> Identity:
        """Return the client that a verified certificate with these names belongs to.

        Raises:
            UnauthenticatedError: it belongs to no client.
        """
        for name in names:
            if name in self._by_name:
                return self._by_name[name]
        raise unauthenticated()


class ClientBook:
    """The clients in force. A reload replaces all of them at once."""

    def __init__(self, clients: Clients) -> None:
        self.current = clients

    def use(self, clients: Clients) -> None:
        """Replace the clients, from now on."""
        self.current = clients


def authenticate(
    clients: Clients, authorization: str, names: Sequence[str], socket_identity: Identity | None
) -> Identity:
    """Return the caller's identity: by token, else by certificate, else that of the Unix socket.

    Args:
        clients: the clients in force.
        authorization: the header or metadata of that name; "" if there is none.
        names: names in the client's certificate, verified; empty without one.
        socket_identity: the identity of callers at the Unix socket; None for TCP.

    Raises:
        UnauthenticatedError: there is none of these, or the token or certificate is not known.
    """
    if socket_identity is not None and not clients:
        return socket_identity  # no client has a token; some libraries send one anyway
    if authorization:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise unauthenticated()
        return clients.by_token(token.strip())
    if names:
        return clients.by_certificate(names)
    if socket_identity is None:
        raise unauthenticated()
    return socket_identity


def unauthenticated() -> UnauthenticatedError:
    """Return the error for every caller that is not authenticated."""
    return UnauthenticatedError(
        "the caller is not known",
        "send a known token (authorization: Bearer TOKEN) or present a known client certificate",
    )


def _identity(name: str, via: str, client: ClientSettings) -> Identity:
    return Identity(name, via, client.tenants, frozenset(client.roles), client.max_streams)
