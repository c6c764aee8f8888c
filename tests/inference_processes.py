"""The real `inference-svc serve` as a child process of a test."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from inference_svc.client import InferenceClient
from shared.child_process import ChildProcess

STATE_S = 60.0


class InferenceProcess:
    """One service; `start` returns when gRPC health says that it serves.

    Args:
        directory: short (a socket lies in it); transcripts and logs survive restarts there.
        kvd_runtime_dir: of a kvd; None: `--mode recompute`.
    """

    def __init__(
        self,
        model_dir: Path,
        directory: Path,
        kvd_runtime_dir: Path | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        self.address = f"unix:{directory}/inference.sock"
        self.log_path = directory / "inference.log"
        cache = ["--mode", "recompute"]
        if kvd_runtime_dir is not None:
            cache = ["--mode", "cached", "--kvd-runtime-dir", str(kvd_runtime_dir)]
            # So that what a turn reuses is what kvd has of it; flags may say otherwise.
            cache += ["--load-policy", "always", "--no-residents"]
        arguments = [
            *("inference_svc.cli", "serve", "--model", str(model_dir), "--dtype", "float32"),
            *("--threads", "1", "--listen", self.address, "--state-dir", str(directory / "state")),
            *cache,
            *flags,
        ]
        self._child = ChildProcess("inference", tuple(arguments), self.address, self.log_path)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start it, or start it again."""
        await self._child.start()

    async def stop(self) -> None:
        """End it with SIGTERM and wait."""
        await self._child.stop()

    async def kill(self) -> None:
        """End it with SIGKILL and wait."""
        await self._child.kill()

    def client(self) -> InferenceClient:
        """A new connection."""
        return InferenceClient(self.address)


async def wait_kvd_state(client: InferenceClient, state: str) -> None:
    """Return when the service says that kvd is "attached" or "detached"."""
    async with asyncio.timeout(STATE_S):
        while (await client.get_model()).kvd_state != state:
            pass  # each round waits for an answer; there is nothing to subscribe to
