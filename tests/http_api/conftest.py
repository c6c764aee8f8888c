"""One real pair with the OpenAI-compatible API, for all tests of this folder."""

import asyncio
import hashlib
import json
import uuid
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI

from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.runtime_dir import READER_SOCKET, channel_options
from shared.types.errors import NotFoundError
from tests.inference_processes import InferenceProcess, pause, wait_kvd_state
from tests.processes import KvdProcess

MODEL = "tiny"
CLIENTS = {  # tenant name -> its token
    "acme": "token-of-acme-0123456789abcdef",
    "globex": "token-of-globex-0123456789abcdef",
    "gateway": "token-of-gateway-0123456789abcdef",
    "monitor": "token-of-monitor-0123456789abcdef",
    "small": "token-of-small-0123456789abcdef",
    "slow": "token-of-slow-0123456789abcdef",
    "few": "token-of-few-0123456789abcdef",
    "pair": "token-of-pair-0123456789abcdef",
    "keyed": "token-of-keyed-0123456789abcdef",
}
TENANTS = {"acme": ["acme"], "gateway": ["acme", "globex"], "small": ["small"], "monitor": ["*"]}
ROLES = {"monitor": ["reader"]}
KVD_OPTIONS = ("--dram", "64MB", "--ssd", "256MB")
SETTINGS = """
[model]
pooling = "mean"
[server]
socket_tenants = ["*"]
[tenants.small]
turns_per_minute = 2
[tenants.slow]
turns_per_minute = 2
[tenants.few]
max_sessions = 2
[tenants.pair]
max_sessions = 2
[openai]
listen = "127.0.0.1:0"
aliases = ["gpt-4o"]
cors_origins = ["https://chat.example:8443"]
temperature = 0
unstored = "deleted"
named_by_cache_key = ["keyed"]
kept_input_bytes = "128KiB"
conversation_bytes = "1MiB"
max_body_bytes = 200000
body_s = "2s"
max_requests = 32
"""


class ApiService:
    """Run a kvd and a service; `start` after a `stop` finds the previous state.

    Args:

    kvd_options: the size of kvd, and other options.

    keep: how kvd's DRAM survives a restart.

    more: settings beside those of all tests.
    """

    def __init__(
        self,
        model_dir: Path,
        directory: Path,
        kvd_options: tuple[str, ...] = KVD_OPTIONS,
        keep: str = "file",
        more: str = "",
    ) -> None:
        settings = directory / "inference-svc.toml"
        settings.write_text(SETTINGS + more + "".join(map(_client, CLIENTS)))
        self.kvd = KvdProcess(directory / "kvd", kvd_options, keep)
        self.service = InferenceProcess(
            model_dir, directory, self.kvd.runtime_dir, ["--config", str(settings)]
        )

    async def start(self) -> None:
        await self.service.start()
        await self.until_attached()

    async def until_attached(self) -> None:
        """Return when the service has attached to kvd."""
        async with self.service.client() as client:
            await wait_kvd_state(client, "attached")

    @property
    def address(self) -> tuple[str, int]:
        """Return the address of the API; the port is chosen by the system."""
        lines = self.service.log_path.read_text().splitlines()
        ready = [json.loads(line) for line in lines if '"openai_ready"' in line]
        host, _, port = ready[-1]["listen"][0].rpartition(":")
        return host, int(port)

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://{host}:{port}/v1"

    def client(self, name="acme", **options) -> AsyncOpenAI:
        """Return the official client, without retries unless set."""
        options = {"max_retries": 0, **options}
        return AsyncOpenAI(api_key=CLIENTS.get(name, name), base_url=self.url, **options)

    def blocking_client(self, name="acme") -> OpenAI:
        return OpenAI(api_key=CLIENTS[name], base_url=self.url, max_retries=0)

    async def num_turns(self, session_id, tenant="acme") -> int:
        """Return the number of complete turns of a session by gRPC, -1 if it does not exist."""
        async with self.service.client() as client:
            try:
                return (await client.get_session(session_id, tenant=tenant)).turns
            except NotFoundError:
                return -1

    async def until_saved(self, answer) -> None:
        """Return when kvd has what an answer's turn computed: forks do not wait for it."""
        session_id, num_tokens = answer.model_extra["session_id"], answer.usage.total_tokens - 1
        address = f"unix:{self.kvd.runtime_dir / READER_SOCKET}"
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            stub = kvd_pb2_grpc.ReaderStub(channel)
            stored: dict[str, int] = {}
            async with asyncio.timeout(60):
                while stored.get(session_id, 0) < num_tokens:
                    page = await stub.ListSessions(kvd_pb2.ListSessionsRequest(limit=1000))
                    stored = {one.session.session_id: one.num_tokens for one in page.sessions}
                    await pause()

    async def counter(self, name) -> int:
        """Return the value of a counter of the service."""
        async with self.service.client() as client:
            return (await client.get_model()).counters[name]


def _client(name: str) -> str:
    digest = hashlib.sha256(CLIENTS[name].encode()).hexdigest()
    return (
        f'\n[clients.{name}]\ntoken_sha256 = ["{digest}"]\n'
        f"tenants = {json.dumps(TENANTS.get(name, [name]))}\n"
        f"roles = {json.dumps(ROLES.get(name, ['client']))}\n"
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def api(tiny_model, tmp_path_factory):
    """Run the pair that all tests of this folder share."""
    service = ApiService(tiny_model, tmp_path_factory.mktemp("api"))
    await service.kvd.start()
    try:
        await service.start()
        yield service
    finally:
        await service.service.stop()
        await service.kvd.stop()


@pytest.fixture
def opening():
    """Return the first messages of a new conversation, long enough for whole blocks."""
    name = uuid.uuid4().hex
    return [
        {"role": "system", "content": f"This is {name}. " + "Keys and values are kept. " * 40},
        {"role": "user", "content": "What is kept?"},
    ]


def name_of(messages):
    """Return a session name that no other test uses, derived from the messages."""
    return messages[0]["content"][8:40]


def next_messages(messages, answer, question="And then?"):
    """Return the conversation with an answer and the next question appended."""
    return [
        *messages,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": question},
    ]
