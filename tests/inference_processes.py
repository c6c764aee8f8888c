"""The real `inference-svc serve` as a child process of a test."""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Self

from inference_svc.client import InferenceClient
from shared.access.channels import ClientCredentials
from shared.children.child_process import ChildProcess
from tests.warm_python import WarmProcess, WarmPython

STATE_S = 60.0
PAUSE_S = 0.02
# What a service imports at start: see tests/warm_python.py.
SERVICE = WarmPython(
    "inference_svc.cli.main",
    "inference_svc.server",
    "inference_svc.assembly",
    "inference_svc.runtime.calibration.remembered_proofs",
    "inference_svc.runtime.calibration.proof",
    "inference_svc.cli.serve",
    "inference_svc.service.lifecycle",
    "inference_svc.service.servicer",
    "inference_svc.service_assembly",
    "inference_svc.http_api.serving",
    "inference_svc.metrics.values",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "llguidance.hf",
    "pydantic.type_adapter",
    "tests.warm_transformers",
)


class InferenceProcess:
    """One service; `start` returns when gRPC health says that it serves.

    Args:
        directory: a short path (it holds a socket); transcripts and logs there survive restarts.
        kvd_runtime_dir: of the kvd to use; None: `--mode recompute`.
        environ: additional environment variables.
        address: its listening address; "": a socket in `directory`.
        credentials: of its clients.
    """

    def __init__(
        self,
        model_dir: Path,
        directory: Path,
        kvd_runtime_dir: Path | None = None,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] = MappingProxyType({}),
        address: str = "",
        credentials: ClientCredentials | None = None,
    ) -> None:
        self.address = address or f"unix:{directory}/inference.sock"
        self.log_path = directory / "inference.log"
        cache = ["--mode", "recompute"]
        if kvd_runtime_dir is not None:
            cache = ["--mode", "cached", "--kvd-runtime-dir", str(kvd_runtime_dir)]
            # Off, so that every reused token comes from kvd; flags may override this.
            cache += ["--load-policy", "always", "--no-residents"]
        arguments = [
            *("inference_svc.cli.main", "serve", "--model", str(model_dir), "--dtype", "float32"),
            *("--threads", "1", "--listen", self.address, "--state-dir", str(directory / "state")),
            *cache,
            *flags,
        ]
        self._child = _WarmChild(
            "inference", tuple(arguments), self.address, self.log_path, environ, credentials
        )
        self._credentials = credentials

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start or restart it."""
        await self._child.start()

    async def stop(self) -> None:
        """End it with SIGTERM and wait."""
        await self._child.stop()

    async def kill(self) -> None:
        """End it with SIGKILL and wait."""
        await self._child.kill()

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal and return at once."""
        self._child.send_signal(number)

    async def exit_code(self) -> int:
        """Wait until it has ended by itself, or by a signal; return its exit code."""
        return await self._child.wait()

    @property
    def pid(self) -> int:
        """Return the pid of the running process."""
        return self._child._running().pid

    def rss_bytes(self) -> int:
        """Return its resident memory in bytes."""
        return self._child.rss_bytes()

    def client(self) -> InferenceClient:
        """Open a new connection."""
        return InferenceClient(self.address, self._credentials)


class _WarmChild(ChildProcess):
    """A service forked from a process that has imported torch already."""

    def _spawn(self, log: int) -> WarmProcess:
        module, *arguments = map(str, self._arguments)
        return SERVICE.spawn(module, arguments, self._whole_environ, log)


async def pause() -> None:
    """Sleep before asking again, so that the polled process gets the processor."""
    await asyncio.sleep(PAUSE_S)


async def wait_kvd_state(client: InferenceClient, state: str) -> None:
    """Return when the service says that kvd is "attached" or "detached"."""
    async with asyncio.timeout(STATE_S):
        while (await client.get_model()).kvd_state != state:
            await pause()  # there is nothing to subscribe to


async def wait_saved(client: InferenceClient) -> None:
    """Return when kvd has the KV of all turns so far.

    Otherwise only a session's own next turn waits for its saves, and kvd starts no saves once it
    stops.
    """
    async with asyncio.timeout(STATE_S):
        while (await client.get_model()).gauges["saves_under_way"]:
            await pause()
