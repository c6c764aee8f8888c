"""openai.local_clients: who is on this machine needs no account; pages from elsewhere stay out."""

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


def served(tiny_model, directory, *addresses, settings=""):
    """A service as `inference-svc serve --openai ADDRESS` starts it."""
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
    async with served(tiny_model, directory, socket, "127.0.0.1:0") as one:
        yield one


def answer_to(service, method, path, headers, body=None):
    """What a browser would get: status and body."""
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
    """Whatever key a client sends, or none; the socket of gRPC finds the sessions."""
    base = f"http://{address_of(service)}/v1"
    for key, options in (("sk-anything", {}), ("", NO_KEY), ("kvt_" + "c" * 40, {})):
        async with AsyncOpenAI(api_key=key or "x", base_url=base, max_retries=0) as client:
            answer = await client.chat.completions.create(**HELLO, **options)
        async with service.client() as grpc_client:
            assert (await grpc_client.get_session(answer.model_extra["session_id"])).turns == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_not_stored_is_gone_on_with(service):
    """As agents ask for it, which keep conversations themselves: by its id it is not there."""
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
async def test_the_log_warns_of_it_once(service):
    """With the ports only: a socket has its group."""
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
    ],
    ids=str,
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("OPTIONS", "/v1/models")])
def test_a_page_of_a_browser_does_not_get_in(service, method, path, headers):
    """By DNS rebinding, or across sites: refused before anything of a body is read."""
    status, body = answer_to(service, method, path, headers)
    assert status == 403
    assert (body["error"]["type"], body["error"]["code"]) == ("permission_error", "not_local")
    assert "127.0.0.1 or localhost" in body["error"]["message"]


def test_a_page_from_elsewhere_has_nothing_computed(service):
    """What it posts is no turn; a page of this machine's own may post."""
    for origin, status in (("https://evil.example", 403), ("http://localhost:3000", 200)):
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        assert answer_to(service, "POST", "/v1/chat/completions", headers, HELLO)[0] == status


@pytest.mark.asyncio(loop_scope="module")
async def test_a_unix_socket_takes_any_host(service):
    """No page reaches one."""
    async with local_client(service.log_path.parent / "openai.sock") as client:
        listed = await client.with_options(
            default_headers={"Host": "evil.example", "Origin": "https://evil.example"}
        ).models.list()
    assert [model.id for model in listed.data] == [MODEL]


async def test_with_clients_a_token_is_demanded(tiny_model, short_dir):
    """As ever, and nothing is warned of; hosts and pages do not count then."""
    clients = f'[clients.web]\ntoken_sha256 = ["{token_digest(TOKEN)}"]\ntenants = ["acme"]\n'
    async with served(tiny_model, short_dir, "127.0.0.1:0", settings=clients) as service:
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
def test_other_ports_than_the_loopbacks_are_refused(listen, clients):
    """With clients, too: a reload may take them away. In one line that names the remedy."""
    if clients:
        clients |= {"clients.a.token_sha256": ("0" * 64,)}
    flags = {"openai.listen": ["127.0.0.1:1", listen], "openai.local_clients": True, **clients}
    with pytest.raises(UnguardedError) as refused:
        load_inference_settings(None, flags)
    assert listen in str(refused.value)
    assert "listen on 127.0.0.1" in refused.value.remedy
    assert "\n" not in str(refused.value)


def test_grpc_is_not_opened_by_it():
    """The setting is OpenAI's API's."""
    flags = {"openai.local_clients": True, "server.listen": ["127.0.0.1:1"]}
    with pytest.raises(UnguardedError, match=r"127\.0\.0\.1:1"):
        load_inference_settings(None, flags)


def test_who_wants_a_loopback_port_is_told_of_it():
    """The first thing that one tries, without clients."""
    with pytest.raises(UnguardedError, match=r"or set openai\.local_clients"):
        load_inference_settings(None, {"openai.listen": ["localhost:8000"]})
