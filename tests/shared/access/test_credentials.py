"""TLS of both kinds of servers: valid files, renewed files, and callers over HTTP."""

import asyncio
import socket
import ssl

import aiohttp
import pytest
from aiohttp import web
from cryptography.hazmat.primitives import serialization

from shared.access.clients import Clients
from shared.access.credentials import TlsFilesError, server_credentials, ssl_context
from shared.access.identity import socket_identity
from shared.access.settings import ClientSettings, TlsSettings
from shared.access.tokens import token_digest
from shared.serving.http_server import HttpServer, identity_of
from shared.types.errors import UnauthenticatedError
from tests.shared.access.guarded_server import guarded_server
from tests.tls_files import Authority

CLIENTS = {
    "web": ClientSettings(
        token_sha256=(token_digest("kvt_right"),), tenants=("*",), roles=("reader",)
    ),
    "probe": ClientSettings(
        certificate_names=("probe.example",), tenants=("*",), roles=("reader",)
    ),
}


def certificate_of(address: str, authority: Authority) -> bytes:
    """Return the certificate that a server shows at a new connection."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), ca_certs=str(authority.path)).encode()


async def test_a_renewed_certificate_is_used_at_the_next_connection(tmp_path):
    """By gRPC's server and by aiohttp's, without a restart; half a renewal changes nothing."""
    authority = Authority(tmp_path)
    tls = authority.server(wants_certificates=False)
    http = HttpServer(web.Application(), {"127.0.0.1:0": ssl_context(tls)})
    await http.start()
    try:
        async with guarded_server(CLIENTS, tls=tls) as grpc_server:
            addresses = (grpc_server.address, http.addresses[0])

            async def shown() -> list[bytes]:
                return [await asyncio.to_thread(certificate_of, a, authority) for a in addresses]

            first = await shown()
            assert first[0] == first[1]
            tls.key.write_text("half of a renewal")
            assert await shown() == first
            authority.issue("server", "localhost", "127.0.0.1")
            second = await shown()
            assert second[0] == second[1]
            assert second[0] != first[0]
            assert second == await shown()
    finally:
        await http.stop(1)


def test_unusable_files_are_named(tmp_path):
    """Missing, no PEM, another certificate's key, a key with a password: the start is refused."""
    authority = Authority(tmp_path)
    good, other = authority.issue("good", "a.example"), authority.issue("other", "b.example")
    broken = tmp_path / "broken.pem"
    broken.write_text("no PEM")
    locked = tmp_path / "locked.key"
    locked.write_bytes(_with_password(good.key.read_bytes()))
    cases = (
        (TlsSettings(certificate=tmp_path / "none", key=good.key), "tls.certificate"),
        (TlsSettings(certificate=good.certificate, key=other.key), "tls.key"),
        (TlsSettings(certificate=good.certificate, key=locked), "tls.key"),
        (TlsSettings(certificate=broken, key=good.key), "tls.certificate"),
        (TlsSettings(certificate=good.certificate, key=good.key, client_ca=broken), "client_ca"),
    )
    for tls, named in cases:
        for use in (server_credentials, ssl_context):
            with pytest.raises(TlsFilesError, match=named) as refused:
                use(tls)
            assert "\n" not in str(refused.value)


def _with_password(pem: bytes) -> bytes:
    key = serialization.load_pem_private_key(pem, password=None)
    locked = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, form, locked)


def test_a_bare_name_is_a_systemd_credential(tmp_path, monkeypatch):
    """As LoadCredential= provides it."""
    pair = Authority(tmp_path).issue("server", "localhost")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    ssl_context(TlsSettings(certificate=pair.certificate.name, key=pair.key.name))
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    with pytest.raises(TlsFilesError, match=r"server\.pem"):
        ssl_context(TlsSettings(certificate=pair.certificate.name, key=pair.key.name))


async def test_the_caller_of_an_http_request(tmp_path):
    """By token, by certificate, by neither: as for gRPC."""
    authority = Authority(tmp_path)
    clients = Clients(CLIENTS)

    async def who(request: web.Request) -> web.Response:
        try:
            return web.Response(text=identity_of(request, clients).name)
        except UnauthenticatedError:
            return web.Response(status=401)

    app = web.Application()
    app.router.add_get("/", who)
    server = HttpServer(
        app, {"127.0.0.1:0": ssl_context(authority.server(wants_certificates=True))}
    )
    await server.start()
    try:
        for name, header, answer in (
            ("probe.example", {}, (200, "probe")),
            ("probe.example", {"Authorization": "Bearer kvt_right"}, (200, "web")),
            ("probe.example", {"Authorization": "Bearer kvt_wrong"}, (401, "")),
            ("stranger.example", {}, (401, "")),
        ):
            pair = authority.issue("client", name)
            context = ssl.create_default_context(cafile=str(authority.path))
            context.load_cert_chain(pair.certificate, pair.key)
            async with (
                aiohttp.ClientSession() as session,
                session.get(
                    f"https://{server.addresses[0]}/", ssl=context, headers=header
                ) as found,
            ):
                assert (found.status, await found.text()) == answer
        context = ssl.create_default_context(cafile=str(authority.path))
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"https://{server.addresses[0]}/", ssl=context)
    finally:
        await server.stop(1)


async def test_an_http_socket_identifies_its_users(short_dir):
    """The identity belongs to the socket, and is not in the request."""
    own = socket_identity("socket", ("acme",), ("client",))
    seen = []

    async def who(request: web.Request) -> web.Response:
        seen.append(identity_of(request, Clients({}), own))
        return web.Response()

    app = web.Application()
    app.router.add_get("/", who)
    server = HttpServer(app, {f"unix:{short_dir}/s": None})
    await server.start()
    try:
        connector = aiohttp.UnixConnector(path=f"{short_dir}/s")
        async with aiohttp.ClientSession(connector=connector) as session:
            await session.get("http://localhost/", headers={"Authorization": "Bearer unused"})
    finally:
        await server.stop(1)
    assert seen == [own]


async def test_a_client_of_a_removed_authority_is_refused(tmp_path):
    """Also when it resumes a TLS session, without its certificate."""
    authority = Authority(tmp_path)
    tls = authority.server(wants_certificates=True)
    pair = authority.issue("client", "probe.example")
    context = ssl.create_default_context(cafile=str(authority.path))
    context.load_cert_chain(pair.certificate, pair.key)
    server = HttpServer(web.Application(), {"127.0.0.1:0": ssl_context(tls)})
    await server.start()
    try:
        answer, session = await asyncio.to_thread(_ask, context, server.addresses[0])
        assert answer.startswith(b"HTTP/1.0 404")
        Authority(tmp_path, "ca")  # replacing the first
        answer, _ = await asyncio.to_thread(_ask, context, server.addresses[0], session)
        assert not answer
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # resumes without tickets
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(_ask, context, server.addresses[0])
    finally:
        await server.stop(1)


def _ask(context: ssl.SSLContext, address: str, session: ssl.SSLSession | None = None):
    """Return an HTTPS server's answer, if any, and the session for a resumption."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port))) as plain,
        context.wrap_socket(plain, server_hostname=host, session=session) as wire,
    ):
        wire.sendall(b"GET / HTTP/1.0\r\n\r\n")
        try:
            return wire.recv(4096), wire.session
        except (ssl.SSLError, ConnectionError):
            return b"", None
