"""Pairs behind a balancer: each a real kvd and its real service."""

import asyncio
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import NotFoundError
from tests.following_process import Following, remote_settings
from tests.inference_processes import InferenceProcess, pause, wait_kvd_state
from tests.processes import KvdProcess

SETTLE_S = 60.0
LOOKS = 50


class Pair:
    """One kvd and its service, as on a server of its own.

    Args:

    name: of the server, as tests call it.

    directory: short, for the socket paths.

    flags: of the service.

    store: directory of an object store that all servers have; None: they share nothing.

    Attributes:

    is_running: whether its service runs.
    """

    def __init__(
        self,
        name: str,
        model_dir: Path,
        directory: Path,
        flags: Iterable[str],
        store: Path | None = None,
    ) -> None:
        self.name = name
        self.is_running = False
        sizes = ("--dram", "64MB", "--ssd", "256MB")
        kvds = remote_settings(store) if store else {}
        self.kvd = KvdProcess(directory / "kvd", sizes, environ=kvds)
        self.following = Following(self.kvd) if store else None
        services = {"INFERENCE_REMOTE__URL": f"file://{store}"} if store else {}
        self.service = InferenceProcess(
            model_dir, directory, self.kvd.runtime_dir, [*flags], environ=services
        )

    async def start(self) -> None:
        """Start both; return when the service has attached to its kvd."""
        await self.kvd.start()
        if self.following is not None:
            self.following.start()
        await self.start_service()

    async def start_service(self) -> None:
        """Start the service, or restart it."""
        await self.service.start()
        self.is_running = True
        async with self.service.client() as client:
            await wait_kvd_state(client, "attached")

    async def stop(self) -> None:
        """Stop both."""
        await self.service.stop()
        if self.following is not None:
            await self.following.end(signal.SIGKILL)
        await self.kvd.stop()

    def terminate(self) -> None:
        """Send SIGTERM to the service, as a supervisor does: it drains and ends."""
        self.service.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Wait until the service has ended; return its exit code."""
        code = await self.service.exit_code()
        self.is_running = False
        return code

    async def kill(self) -> None:
        """Kill the service with SIGKILL."""
        await self.service.kill()
        self.is_running = False

    async def lose(self) -> None:
        """Kill both with SIGKILL, as at a power failure; its memory is lost, too."""
        await self.kill()
        if self.following is not None:
            await self.following.end(signal.SIGKILL)
            self.following = None
        await self.kvd.kill()

    async def session(self, session_id: str) -> pb.Session | None:
        """Return a session with its turns, past the balancer; None: it is not here."""
        async with self.service.client() as client:
            try:
                return await client.get_session(session_id, with_turns=True)
            except NotFoundError:
                return None

    async def until_running(self, num_turns: int) -> None:
        """Return when this many turns are being computed."""
        async with asyncio.timeout(SETTLE_S), self.service.client() as client:
            while (await client.get_model()).running_turns != num_turns:
                await pause()  # there is nothing to subscribe to

    async def until_computing(self) -> None:
        """Return when any turn is being computed, or none has come for a while."""
        async with self.service.client() as client:
            for _ in range(LOOKS):
                if (await client.get_model()).running_turns:
                    return
                await pause()

    async def counter(self, name: str) -> int:
        """Return a counter of the service."""
        async with self.service.client() as client:
            return int((await client.get_model()).counters[name])


async def holder(pairs: Mapping[str, Pair], session_id: str) -> str:
    """Return the running pair that has a session."""
    running = [pair for pair in pairs.values() if pair.is_running]
    found = [pair.name for pair in running if await pair.session(session_id)]
    assert len(found) == 1, found
    return found[0]


async def check_identical(pairs: Mapping[str, Pair], oracle, session_ids: Iterable[str]) -> None:
    """Check that every answer of these sessions equals recomputation, on every server."""
    for session_id in set(session_ids):
        session = await pairs[await holder(pairs, session_id)].session(session_id)
        turns = [(turn.input_ids, turn.output_ids) for turn in session.turn_records]
        verdict = await asyncio.to_thread(oracle.judge, turns)
        assert verdict.num_tokens
        assert verdict.is_identical
