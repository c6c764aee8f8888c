"""Settings of the HTTP API, OpenAI's and Anthropic's: the section [openai]."""

import re
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Literal

from pydantic import Field, field_validator

from shared.access.addresses import is_loopback, is_unix
from shared.access.settings import (
    ClientSettings,
    Listen,
    TlsSettings,
    UnguardedError,
    check_guarded,
)
from shared.serving.http_connections import LOOPBACK, Bounds
from shared.types.setting_types import ByteSize, Duration, Section, TextList

MIB = 2**20
ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[1-9]\d{0,4})?")
_OWN_PORTS = {"http": ":80", "https": ":443"}  # default ports, which browsers leave out


class OpenAISettings(Section):
    """Where the HTTP API is served, and the bounds of its requests and of what it stores.

    Attributes:
        listen: addresses, each "unix:/path" or "host:port"; none: the API is not served.
        local_clients: whether callers from this machine need no account at a loopback address, as
            on a Unix socket; only as long as there are no clients, and no other ports in listen.
        cors_origins: origins whose pages may call the API from a browser, as browsers write them
            ("https://chat.example:8443"); "*", any, only where every caller needs an account.
        aliases: further names that requests may call the model by.
        temperature: temperature of requests that name none; OpenAI's default, where gRPC's is 0.
        foreign_parameters: whether parameters of other servers, which have no effect here, are
            ignored, or refused by name (docs/openai.md lists them).
        named_by_header: clients, by their names in [clients.NAME], whose headers name the session,
            unless `session_id` in the body does; of all other clients headers are only hints.
        named_by_cache_key: clients whose `prompt_cache_key` names the session, unless body or
            headers do.
        unstored: how a turn is kept whose request says `store: false`. "reused": it has no id, but
            its session stays and can be continued, as that of any other request; "deleted": its
            session is deleted before the answer ends.
        max_body_bytes: bound of a request's body.
        body_s: most seconds a client may take to send a request's body.
        write_s: most seconds a client may take to read what was sent, before it is disconnected.
        ping_s: seconds of silence in a stream after which a comment is sent, so that proxies do not
            close it: some tool calls are sent only when they are complete.
        header_s: most seconds a client may take for a TLS handshake, and for a request's headers.
        idle_s: seconds that a connection is kept for the next request.
        max_requests: bound of the requests at once; more are refused. A request whose body has not
            arrived may be dropped for a new one (`http_api/requests.py` says which).
        max_connections: bound of the connections at once. For a new one, the connection is closed
            that has waited for headers, or has been idle, for longest; if all are being answered,
            the new one is closed.
        max_connections_per_address: the same bound for one address, or IPv6 network of 64 bits; 0:
            none.
        proxies: addresses and networks of proxies, each with many clients, which that bound does
            not count.
        max_sessions: bound of the sessions that requests opened without naming them; for a new one
            the least recently used session is deleted, of the tenant that has the most.
        subagent_idle_s: seconds after which an unnamed session that a sub-agent has used is ended:
            its KV is then evicted first.
        max_remembered: bound of the stored histories, and of the stored responses; the oldest are
            deleted first, of the tenant that has the most.
        kept_input_bytes: bound of the inputs of all stored responses; deleted in the same order.
            0: none are stored.
        stored_chat_bytes: bound of the chats whose requests say `store: true`; deleted in the same
            order. 0: none are stored.
        conversation_bytes: bound of each tenant's conversations, which stay until they are deleted;
            more are refused, but not those from other servers. 0: there are none.
    """

    listen: Listen = ()
    local_clients: bool = False
    cors_origins: TextList = ()
    aliases: TextList = ()
    temperature: float = Field(default=1.0, ge=0, le=2)
    foreign_parameters: Literal["ignore", "refuse"] = "ignore"
    named_by_header: TextList = ()
    named_by_cache_key: TextList = ()
    unstored: Literal["reused", "deleted"] = "reused"
    max_body_bytes: ByteSize = Field(default=4 * MIB, ge=4096)
    body_s: Duration = Field(default=30.0, gt=0, le=3600)
    write_s: Duration = Field(default=30.0, gt=0, le=3600)
    ping_s: Duration = Field(default=15.0, gt=0, le=3600)
    header_s: Duration = Field(default=10.0, gt=0, le=3600)
    idle_s: Duration = Field(default=75.0, gt=0, le=3600)
    max_requests: int = Field(default=256, ge=1, le=65536)
    max_connections: int = Field(default=1024, ge=1, le=65536)
    max_connections_per_address: int = Field(default=512, ge=0, le=65536)
    proxies: TextList = tuple(map(str, LOOPBACK))
    max_sessions: int = Field(default=10_000, ge=1)
    subagent_idle_s: Duration = Field(default=900.0, gt=0, le=7 * 86400)
    max_remembered: int = Field(default=100_000, ge=16)
    kept_input_bytes: ByteSize = Field(default=256 * MIB, ge=0)
    stored_chat_bytes: ByteSize = Field(default=256 * MIB, ge=0)
    conversation_bytes: ByteSize = Field(default=256 * MIB, ge=0)

    @field_validator("cors_origins")
    @classmethod
    def _check_cors_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            found = _ORIGIN.fullmatch(text)
            if text != ANY_ORIGIN and (not found or found[2] == _OWN_PORTS.get(found[1], "")):
                raise ValueError(
                    f"{text[:80]!r} is not an origin: write it as browsers do, such as "
                    "https://chat.example or https://chat.example:8443, in small letters and "
                    'without a path; or write "*"'
                )
        return value

    @field_validator("proxies")
    @classmethod
    def _check_proxies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                ip_network(text)
            except ValueError as error:
                raise ValueError("write addresses, or networks such as 10.0.0.0/8") from error
        return value

    def check_guarded(self, tls: TlsSettings, clients: Mapping[str, ClientSettings]) -> None:
        """Refuse addresses that would be open to unknown clients.

        Raises:
            UnguardedError: an address is open; the message names what is missing.
        """
        ports = [address for address in self.listen if not is_unix(address)]
        far = [address for address in ports if not is_loopback(address)]
        if self.local_clients and far:
            raise UnguardedError(
                f"openai.local_clients (--openai) cannot be used with {far[0]}, which other "
                "machines can reach",
                "listen on 127.0.0.1, or configure clients in [clients.NAME] and leave "
                "openai.local_clients out",
            )
        self._check_origins()
        if self.local_clients and not clients:
            return
        try:
            check_guarded(ports, tls, clients)
        except UnguardedError as error:
            if clients or far:
                raise
            remedy = (
                f"{error.remedy}; or set openai.local_clients (--openai) to serve this machine only"
            )
            raise UnguardedError(error.message, remedy) from error

    def _check_origins(self) -> None:
        """Refuse pages of any origin at addresses that need no account.

        Raises:
            UnguardedError: an address needs none; the message names it.
        """
        without = ["openai.local_clients (--openai)"] if self.local_clients else []
        without += filter(is_unix, self.listen)
        if ANY_ORIGIN in self.cors_origins and without:
            raise UnguardedError(
                f'openai.cors_origins = "{ANY_ORIGIN}" would let every web page use {without[0]}, '
                "which needs no account",
                "list the origins, or listen only on ports that need an account ([clients.NAME])",
            )

    @property
    def bounds(self) -> Bounds:
        """The bounds of connections."""
        return Bounds(
            max_connections=self.max_connections,
            max_per_address=self.max_connections_per_address,
            proxies=tuple(map(ip_network, self.proxies)),
            header_s=self.header_s,
            idle_s=self.idle_s,
            write_s=self.write_s,
        )
