"""openai.local_clients: local clients need no account; pages of other sites are refused."""

import http.client
import json

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from inference_svc.config import load_inference_settings
from shared.access.settings import UnguardedError
from shared.access.tokens import token_digest
from tests.http_api.conftest import MODEL
from tests.http_api.test_listening import HELLO, NO_KEY, address_of, local_client
from tests.inference_processes import InferenceProcess

TOKEN = "kvt_" + "b" * 40


def run_local_service(tiny_model, directory, *addresses, settings=""):
    """Run a service as `inference-svc serve --openai ADDRESS` does."""
    path = directory / "inference-svc.toml"
    path.write_text(settings)
    flags = ["--config", str(path)]
    for address in addresses:
        flags += ["--openai", address]
    return InferenceProcess(tiny_model, directory, None, flags)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("local")
    socket = f"unix:{directory}/openai.sock"
    settings = '[openai]\ncors_origins = ["https://chat.example"]\n'
    async with run_local_service(
        tiny_model, directory, socket, "127.0.0.1:0", settings=settings
    ) as one:
        yield one


def answer_to(service, method, path, headers, body=None):
    """Return what a browser would get: status and body."""
    host, _, port = address_of(service).rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_no_account_is_needed(service):
    """With any key or none; the sessions are visible by the gRPC socket."""
    base = f"http://{address_of(service)}/v1"
    for key, options in (("sk-anything", {}), ("", NO_KEY), ("kvt_" + "c" * 40, {})):
        async with AsyncOpenAI(api_key=key or "x", base_url=base, max_retries=0) as client:
            answer = await client.chat.completions.create(**HELLO, **options)
        async with service.client() as grpc_client:
            assert (await grpc_client.get_session(answer.model_extra["session_id"])).turns == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_that_is_not_stored_can_be_continued(service):
    """Agents that keep conversations themselves use it; its id is not found."""
    said = [{"role": "user", "content": "What is kept? " * 40}]
    options = {"model": MODEL, "store": False, "max_output_tokens": 8}
    async with local_client(service.log_path.parent / "openai.sock") as client:
        first = await client.responses.create(input=said, **options)
        said += [*(item.model_dump() for item in first.output), {"role": "user", "content": "Why?"}]
        second = await client.responses.create(input=said, **options)
        assert second.model_extra["session_id"] == first.model_extra["session_id"]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_log_warns_once(service):
    """Only for ports: a socket has its group."""
    lines = [line for line in service.log_path.read_text().splitlines() if "no_account" in line]
    (warned,) = map(json.loads, lines)
    assert (warned["level"], warned["listen"]) == ("warning", [address_of(service)])


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "localhost.evil.example:8000", "Authorization": "Bearer sk-anything"},
        {"Origin": "https://evil.example"},
        {"Origin": "null", "Content-Type": "text/plain"},
        {"Origin": "https://evil.example", "Access-Control-Request-Method": "GET"},
        {"Origin": "https://chat.example", "Host": "evil.example"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("OPTIONS", "/v1/models")])
def test_pages_of_other_sites_are_refused(service, method, path, headers):
    """DNS rebinding and cross-site requests are refused before the body is read."""
    status, body = answer_to(service, method, path, headers)
    assert status == 403
    assert (body["error"]["type"], body["error"]["code"]) == ("permission_error", "not_local")
    assert "127.0.0.1 or localhost" in body["error"]["message"]


def test_pages_of_other_sites_start_no_turns(service):
    """Its posts are no turns; a local page may post, and so may a configured origin."""
    pages = ("https://evil.example", 403), ("http://localhost:3000", 200)
    for origin, status in (*pages, ("https://chat.example", 200), ("https://chat.example:1", 403)):
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        assert answer_to(service, "POST", "/v1/chat/completions", headers, HELLO)[0] == status


@pytest.mark.asyncio(loop_scope="module")
async def test_a_unix_socket_takes_any_host(service):
    """No page can reach a socket."""
    async with local_client(service.log_path.parent / "openai.sock") as client:
        listed = await client.with_options(
            default_headers={"Host": "evil.example", "Origin": "https://evil.example"}
        ).models.list()
    assert [model.id for model in listed.data] == [MODEL]


async def test_with_clients_a_token_is_required(tiny_model, short_dir):
    """Without a warning; hosts and origins do not matter then."""
    clients = f'[clients.web]\ntoken_sha256 = ["{token_digest(TOKEN)}"]\ntenants = ["acme"]\n'
    async with run_local_service(tiny_model, short_dir, "127.0.0.1:0", settings=clients) as service:
        base = f"http://{address_of(service)}/v1"
        headers = {"Host": "behind.example", "Origin": "https://behind.example"}
        async with AsyncOpenAI(
            api_key=TOKEN, base_url=base, default_headers=headers, max_retries=0
        ) as client:
            answer = await client.models.list()
            assert [model.id for model in answer.data] == [MODEL]
            for options in (NO_KEY, {"extra_headers": {"Authorization": "Bearer sk-anything"}}):
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list(**options)
        assert "no_account" not in service.log_path.read_text()


@pytest.mark.parametrize("listen", ["0.0.0.0:8000", "10.0.0.1:8000", "[::]:8000", "gpu7:8000"])
@pytest.mark.parametrize("clients", [{}, {"clients.a.tenants": ("a",)}], ids=["nobody", "clients"])
def test_addresses_off_the_loopback_are_refused(listen, clients):
    """With clients, too, since a reload may remove them. One line names the remedy."""
    if clients:
        clients |= {"clients.a.token_sha256": ("0" * 64,)}
    flags = {"openai.listen": ["127.0.0.1:1", listen], "openai.local_clients": True, **clients}
    with pytest.raises(UnguardedError) as refused:
        load_inference_settings(None, flags)
    assert listen in str(refused.value)
    assert "listen on 127.0.0.1" in refused.value.remedy
    assert "\n" not in str(refused.value)


def test_it_does_not_permit_unguarded_grpc():
    """The setting applies to OpenAI's API only."""
    flags = {"openai.local_clients": True, "server.listen": ["127.0.0.1:1"]}
    with pytest.raises(UnguardedError, match=r"127\.0\.0\.1:1"):
        load_inference_settings(None, flags)


def test_the_error_of_a_loopback_port_names_the_setting():
    """Without clients, the error of a loopback port names the setting."""
    with pytest.raises(UnguardedError, match=r"or set openai\.local_clients"):
        load_inference_settings(None, {"openai.listen": ["localhost:8000"]})
