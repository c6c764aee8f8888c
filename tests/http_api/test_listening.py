"""Addresses of the API: TLS with client certificates, a Unix socket, or none."""

import asyncio
import json
import ssl
import stat

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from inference_svc.config import load_inference_settings
from shared.access.settings import UnguardedError
from shared.access.tokens import token_digest
from shared.children.child_process import ChildFailedError
from shared.types.errors import DeniedError, NotFoundError
from tests.http_api.conftest import MODEL
from tests.inference_processes import InferenceProcess
from tests.tls_files import Authority

HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
NO_KEY = {"extra_headers": {"Authorization": openai.Omit()}}
TLS = """
[openai]
listen = "127.0.0.1:0"
[tls]
certificate = "{server.certificate}"
key = "{server.key}"
client_ca = "{ca}"
[clients.notebook]
certificate_names = ["notebook.example"]
tenants = ["research"]
"""


def service_with(model_dir, directory, settings):
    """Run a service with these settings, without kvd."""
    path = directory / "inference-svc.toml"
    path.write_text(settings)
    return InferenceProcess(model_dir, directory, None, ["--config", str(path)])


def address_of(service):
    lines = service.log_path.read_text().splitlines()
    (ready,) = [json.loads(line) for line in lines if '"openai_ready"' in line]
    return ready["listen"][-1]


def local_client(path):
    """Return a client that uses a socket."""
    transport = httpx2.AsyncHTTPTransport(uds=str(path))
    http = httpx2.AsyncClient(transport=transport)
    return AsyncOpenAI(api_key="anything", base_url="http://localhost/v1", http_client=http)


async def test_a_certificate_identifies_its_client(tiny_model, short_dir):
    """It needs a configured client's name and the right authority's signature."""
    authority, other = Authority(short_dir), Authority(short_dir, "other")
    server = authority.issue("server", "127.0.0.1")
    known = authority.issue("known", "notebook.example")
    nobody = authority.issue("nobody", "nobody.example")
    foreign = other.issue("foreign", "notebook.example")
    settings = TLS.format(server=server, ca=authority.path)

    def client(pair):
        context = ssl.create_default_context(cafile=authority.path)
        if pair is not None:
            context.load_cert_chain(pair.certificate, pair.key)
        return AsyncOpenAI(
            api_key="wrong",
            base_url=f"https://{address_of(service)}/v1",
            http_client=httpx2.AsyncClient(verify=context),
            max_retries=0,
        )

    async with service_with(tiny_model, short_dir, settings) as service:
        async with client(known) as notebook:
            answer = await notebook.chat.completions.create(**HELLO, **NO_KEY)
            with pytest.raises(openai.AuthenticationError):
                await notebook.models.list()
        async with service.client() as grpc_client:
            session = answer.model_extra["session_id"]
            with pytest.raises(DeniedError):  # the socket belongs to another
                await grpc_client.get_session(session, tenant="research")
        async with client(nobody) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list(**NO_KEY)
        for pair in (None, foreign):
            async with client(pair) as stranger:
                with pytest.raises(openai.APIConnectionError):
                    await stranger.models.list(**NO_KEY)


async def test_a_unix_socket_has_its_mode_and_the_default_tenant(tiny_model, short_dir):
    """Everyone who may open it is served, with any key; it is removed with the service."""
    path = short_dir / "openai.sock"
    async with service_with(
        tiny_model, short_dir, f'[openai]\nlisten = "unix:{path}"\n'
    ) as service:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        async with local_client(path) as client:
            answer = await client.chat.completions.create(**HELLO)
        async with service.client() as grpc_client:
            assert (await grpc_client.get_session(answer.model_extra["session_id"])).turns == 1
    assert not path.exists()


async def test_a_socket_beside_a_port(tiny_model, short_dir):
    """The socket needs no account and the port a token: each has its own tenant."""
    path, token = short_dir / "openai.sock", "kvt_" + "a" * 40
    settings = (
        f'[openai]\nlisten = ["unix:{path}", "127.0.0.1:0"]\n'
        f'[clients.web]\ntoken_sha256 = ["{token_digest(token)}"]\ntenants = ["acme"]\n'
    )
    async with service_with(tiny_model, short_dir, settings) as service:
        base = f"http://{address_of(service)}/v1"
        sessions = {}
        for tenant, client, options in (
            ("default", local_client(path), NO_KEY),
            ("acme", AsyncOpenAI(api_key=token, base_url=base), {}),
        ):
            async with client:
                answer = await client.chat.completions.create(**HELLO, **options)
                sessions[tenant] = answer.model_extra["session_id"]
        async with AsyncOpenAI(api_key="anything", base_url=base, max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        async with service.client() as grpc_client:
            assert (await grpc_client.get_session(sessions["default"])).turns == 1
            with pytest.raises(NotFoundError):
                await grpc_client.get_session(sessions["acme"])


@pytest.mark.long
async def test_an_address_in_use_refuses_the_start(tiny_model, short_dir):
    """One line names the address and the remedy."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = TLS.format(server=Authority(short_dir).issue("server", "127.0.0.1"), ca="")
    settings = settings.replace("127.0.0.1:0", f"127.0.0.1:{port}").replace(
        'client_ca = ""', f'client_ca = "{short_dir}/ca.pem"'
    )
    service = service_with(tiny_model, short_dir, settings)
    with pytest.raises(ChildFailedError):
        await service.start()
    *_, last = service.log_path.read_text().strip().splitlines()
    assert f"127.0.0.1:{port}" in last
    assert "choose a free address" in last
    server.close()


@pytest.mark.parametrize("listen", ["127.0.0.1:8000", "0.0.0.0:8000", "[::1]:8000"])
def test_a_port_without_clients_is_refused(tmp_path, listen):
    """On the loopback interface, too: clients could not identify themselves."""
    path = tmp_path / "settings.toml"
    path.write_text(f'[openai]\nlisten = "{listen}"\n')
    with pytest.raises(UnguardedError, match="8000"):
        load_inference_settings(path, {})
