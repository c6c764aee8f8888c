"""Three real pairs behind a real HAProxy with the settings of examples/haproxy."""

import asyncio
import hashlib
import re
import socket
import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from aiohttp import ClientSession, TCPConnector
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from inference_svc.client import InferenceClient
from shared.access.channels import ClientCredentials
from tests.examples.pairs import Pair
from tests.kvd_polling import eventually
from tests.tls_files import Authority

CONFIG = Path(__file__).parents[2] / "examples" / "haproxy" / "haproxy.cfg"
NUM_PAIRS = 3
TOKEN = "token-of-acme-0123456789abcdef"  # noqa: S105  # test data
SETTINGS = """
[server]
socket_tenants = ["acme"]
[openai]
listen = "127.0.0.1:{http}"
temperature = 0
[metrics]
listen = "0.0.0.0:{metrics}"
[tls]
certificate = "{certificate}"
key = "{key}"
[clients.acme]
token_sha256 = ["{digest}"]
tenants = ["acme"]
"""


class TlsPair(Pair):
    """A pair with ports, as on a server of its own.

    Args:

    name: of the server, as HAProxy has it.

    authority: of its certificate.

    ports: of its HTTP API, its gRPC and its probes.

    store: see Pair.
    """

    def __init__(
        self,
        name: str,
        model_dir: Path,
        directory: Path,
        authority: Authority,
        ports: list[int],
        store: Path | None,
    ) -> None:
        directory.mkdir()
        self.http, self.grpc, self.metrics = ports
        made = authority.issue(name, f"{name}.internal")
        settings = directory / "inference-svc.toml"
        settings.write_text(
            SETTINGS.format(
                http=self.http,
                metrics=self.metrics,
                certificate=made.certificate,
                key=made.key,
                digest=hashlib.sha256(TOKEN.encode()).hexdigest(),
            )
        )
        flags = ["--config", str(settings), "--listen", f"127.0.0.1:{self.grpc}"]
        super().__init__(name, model_dir, directory, flags, store)


class BalancedPairs:
    """The pairs, the balancer, and its clients.

    Args:

    model_dir: of the model that all serve.

    directory: short, for the socket paths.

    store: directory of an object store that all pairs have; None: they share nothing.
    """

    def __init__(self, model_dir: Path, directory: Path, store: Path | None = None) -> None:
        ports = free_ports(3 * NUM_PAIRS + 3)
        self._authority = Authority(directory)
        self.http, self.grpc, self._operations = (ports.pop() for _ in range(3))
        self.pairs = {
            name: TlsPair(
                name,
                model_dir,
                directory / name,
                self._authority,
                [ports.pop() for _ in range(3)],
                store,
            )
            for name in (f"pair{number}" for number in range(1, NUM_PAIRS + 1))
        }
        self._admin = directory / "admin.sock"
        self._log_path = directory / "haproxy.log"
        self._config = directory / "haproxy.cfg"
        self._config.write_text(self._here(CONFIG.read_text(encoding="utf-8"), directory))
        self._process: asyncio.subprocess.Process | None = None

    def _here(self, config: str, directory: Path) -> str:
        """Return the shipped file with this test's addresses and files, and without its user."""
        own = self._authority.issue("balancer", "localhost")
        pem = directory / "balancer-both.pem"
        pem.write_bytes(own.certificate.read_bytes() + own.key.read_bytes())
        changes = {
            "    user haproxy\n    group haproxy\n": "",
            "log /dev/log local0": "log stdout format raw local0",
            "/run/haproxy/admin.sock": str(self._admin),
            "/etc/haproxy/balancer.pem": str(pem),
            "/etc/haproxy/servers-ca.pem": str(self._authority.path),
            "bind :443 ": f"bind 127.0.0.1:{self.http} ",
            "bind :7443 ": f"bind 127.0.0.1:{self.grpc} ",
            "bind 127.0.0.1:8404": f"bind 127.0.0.1:{self._operations}",
        }
        for number, pair in enumerate(self.pairs.values(), start=1):
            changes[f"10.0.0.1{number}:8000"] = f"127.0.0.1:{pair.http}"
            changes[f"10.0.0.1{number}:7430"] = f"127.0.0.1:{pair.grpc}"
            changes[f"verifyhost {pair.name}.internal check port 9641"] = (
                f"verifyhost {pair.name}.internal check port {pair.metrics}"
            )
        for shipped, ours in changes.items():
            assert shipped in config, shipped
            config = config.replace(shipped, ours)
        assert not re.search(r"10\.0\.0|/etc/", config)
        return config

    async def start(self) -> None:
        """Start all; return when the balancer sends turns to each pair."""
        await asyncio.gather(*(pair.start() for pair in self.pairs.values()))
        with self._log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *("haproxy", "-db", "-f", self._config), stdout=log, stderr=log
            )
        await eventually(self._is_listening, wanted=True)
        for name in self.pairs:
            await self.until(name, "UP")

    async def mend(self) -> None:
        """Restart what has ended, and put back what was taken out."""
        ended = [pair for pair in self.pairs.values() if not pair.is_running]
        await asyncio.gather(*(pair.start_service() for pair in ended))
        for name in self.pairs:
            await self.put_back(name)
            await self.until(name, "UP")

    async def stop(self) -> None:
        """Stop all."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
        await asyncio.gather(*(pair.stop() for pair in self.pairs.values()))

    # ------------------------------------------------------------------------- the balancer's side

    async def command(self, text: str) -> str:
        """Return the admin socket's answer to a command."""
        reader, writer = await asyncio.open_unix_connection(self._admin)
        writer.write(f"{text}\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        return answer

    async def stats(self, backend: str) -> Mapping[str, Mapping[str, str]]:
        """Return `show stat` of a backend's servers, by name."""
        head, *lines = (await self.command("show stat")).removeprefix("# ").split("\n")
        rows = [dict(zip(head.split(","), line.split(","), strict=True)) for line in lines if line]
        return {row["svname"]: row for row in rows if row["pxname"] == backend}

    async def until(self, name: str, status: str) -> None:
        """Return when the balancer reports this of a server, in every backend."""
        backends = ("sessions", "anybody", "grpc_sessions", "grpc_anybody")
        for backend in backends:
            await eventually(partial(self._is, name, backend, status), wanted=True)

    async def _is_listening(self) -> bool:
        assert self._process.returncode is None, self._log_path.read_text()
        return self._admin.exists()

    async def _is(self, name: str, backend: str, status: str) -> bool:
        return (await self.stats(backend))[name]["status"].startswith(status)

    async def drain(self, name: str) -> None:
        """Drain a server, as docs/scaling.md describes."""
        assert not (await self.command(f"set server sessions/{name} state drain")).strip()

    async def take_out(self, name: str) -> None:
        """Take a server out; return when it gets no more turns."""
        await self.drain(name)
        await self.until(name, "DRAIN")

    async def bring_back(self, name: str) -> None:
        """Put a server back; return when it gets turns."""
        await self.put_back(name)
        await self.until(name, "UP")

    async def put_back(self, name: str) -> None:
        """Put a server back."""
        assert not (await self.command(f"set server sessions/{name} state ready")).strip()

    # -------------------------------------------------------------------------- the clients' side

    @property
    def trust(self) -> ssl.SSLContext:
        """Return what clients check the balancer's certificate with."""
        return ssl.create_default_context(cafile=self._authority.path)

    def openai(self) -> AsyncOpenAI:
        """Return the official client, without retries."""
        return AsyncOpenAI(
            api_key=TOKEN,
            base_url=f"https://localhost:{self.http}/v1",
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(verify=self.trust),
        )

    def plain_http(self) -> ClientSession:
        """Return a client of paths and bytes."""
        return ClientSession(
            f"https://localhost:{self.http}",
            connector=TCPConnector(ssl=self.trust),
            headers={"Authorization": f"Bearer {TOKEN}"},
        )

    def grpc_client(self) -> InferenceClient:
        """Return our client of gRPC."""
        credentials = ClientCredentials(TOKEN, self._authority.path.read_bytes())
        return InferenceClient(f"localhost:{self.grpc}", credentials)


def free_ports(number: int) -> list[int]:
    """Return ports that are free at this moment."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    try:
        return [int(server.getsockname()[1]) for server in servers]
    finally:
        for server in servers:
            server.close()
