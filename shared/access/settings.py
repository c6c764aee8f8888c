"""Settings of access: [tls], [clients.NAME], and what an address to listen at needs. Pure."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from shared.access.addresses import is_loopback, is_unix, validate_ports, validate_sockets
from shared.access.identity import ANY
from shared.types.errors import ConfigError
from shared.types.session_key import InvalidNameError, session_key
from shared.types.setting_types import HIDDEN, PathOrNone, Section, TextList

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

C = TypeVar("C", bound="ClientSettings")


def _validate_digests(digests: tuple[str, ...]) -> tuple[str, ...]:
    if not all(_DIGEST.match(digest) for digest in digests):
        raise ValueError(
            "this is not the SHA-256 of a token: write 64 hex digits, as printed by kvd token"
        )
    return digests


def _validate_tenants(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise ValueError(
            'list the tenants that this client may use, its own first; "*" stands for all'
        )
    for name in names:
        try:
            session_key("default" if name == ANY else name, "", "any")
        except InvalidNameError as error:
            raise ValueError(str(error)) from error
    return names


ClientName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
TokenDigests = Annotated[TextList, AfterValidator(_validate_digests), HIDDEN]
Tenants = Annotated[TextList, AfterValidator(_validate_tenants)]
Listen = Annotated[TextList, AfterValidator(validate_sockets)]  # "unix:/path", "host:port"
ListenTcp = Annotated[TextList, AfterValidator(validate_ports)]  # "host:port"


class TlsSettings(Section):
    """TLS of every TCP port. A renewed file is read at the next connection.

    Attributes:
        certificate: the server's certificate with its chain, PEM.
        key: the certificate's key, PEM.
        client_ca: authorities, PEM: clients have to show a certificate that one of them has signed.
            None: clients show none, and authenticate with a token.
    """

    certificate: PathOrNone = None
    key: PathOrNone = None
    client_ca: PathOrNone = None

    @model_validator(mode="after")
    def _check_complete(self) -> "TlsSettings":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("tls.certificate and tls.key go together: give both, or none")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError(
                "tls.client_ca has no effect without tls.certificate and tls.key: set these as well"
            )
        return self

    @property
    def is_on(self) -> bool:
        """Whether TCP ports speak TLS."""
        return self.certificate is not None


class ClientSettings(Section):
    """One client. The processes define the roles.

    Attributes:
        token_sha256: SHA-256 of each of its tokens, in hex; two while one is being replaced.
        certificate_names: common names or alternative names of its certificates.
        tenants: tenants that it may name. The first is meant if it names none. "*": all.
        roles: its roles.
        max_streams: most streams held at once; None: as in [limits].
    """

    token_sha256: TokenDigests = ()
    certificate_names: TextList = ()
    tenants: Tenants
    roles: tuple[str, ...] = ()
    max_streams: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_reachable(self) -> "ClientSettings":
        if not self.token_sha256 and not self.certificate_names:
            raise ValueError(
                "this client has no way to prove its identity: set token_sha256 (see: kvd token) "
                "or certificate_names"
            )
        return self


def check_distinct(clients: Mapping[str, C]) -> Mapping[str, C]:
    """Check that no two clients share a token or name: a validator of the table of clients."""
    owners: dict[str, str] = {}
    for name, client in clients.items():
        for proof in {*client.token_sha256, *client.certificate_names}:
            if proof in owners:
                raise ValueError(
                    f"clients {owners[proof]} and {name} have the same token or certificate name: "
                    "give each client its own"
                )
            owners[proof] = name
    return clients


class UnguardedError(ConfigError):
    """An address would be open to unknown callers."""

    reason = "unguarded"


def check_guarded(
    addresses: Iterable[str], tls: TlsSettings, clients: Mapping[str, ClientSettings]
) -> None:
    """Refuse addresses that unknown callers could use, or where tokens could be overheard.

    Raises:
        UnguardedError: an address is not guarded; the message names what is missing.
    """
    for address in addresses:
        if not is_unix(address):
            _check_port(address, tls, clients)


def _check_port(address: str, tls: TlsSettings, clients: Mapping[str, ClientSettings]) -> None:
    if not clients:
        raise UnguardedError(
            f"anybody could connect to {address}, because no client is configured",
            "configure clients in [clients.NAME] (see: kvd token), or use a Unix socket",
        )
    if not tls.is_on and not is_loopback(address):
        raise UnguardedError(
            f"tokens sent to {address} could be read on the network, because it has no TLS",
            "set tls.certificate and tls.key, or listen on 127.0.0.1",
        )
    if tls.client_ca is None and not any(client.token_sha256 for client in clients.values()):
        raise UnguardedError(
            f"nobody could connect to {address}: no client has a token",
            "set tls.client_ca to accept client certificates, or give a client a token (see: "
            "kvd token)",
        )
