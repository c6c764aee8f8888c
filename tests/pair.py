"""The real pair, kvd and the service, with the questions that identity tests ask of it."""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from inference_svc.client import TurnResult, turn_request
from shared.pb.inference.v1 import inference_pb2
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.runtime_dir import READER_SOCKET, channel_options
from tests.inference_processes import InferenceProcess, pause
from tests.oracle import Oracle, Verdict
from tests.processes import KvdProcess

SETTLE_S = 60.0
VOCAB_SIZE = 256  # every tiny model has at least this many ordinary tokens
BLOCK_TOKENS = 128
SLOT_BYTES = 3 * 64 * 1024  # bytes per token of the tiny model: 3 layers


class Pair:
    """One service, and one kvd after another beside it.

    Every `with_kvd` begins with an empty kvd and with new session names.
    """

    def __init__(self, model_dir: Path, directory: Path, *flags: str) -> None:
        self._kvd_dir = directory / "kvd"
        self._scene = 0
        self._stored: dict[str, int] = {}  # tokens that kvd must have of each session
        self._random = random.Random(11)  # noqa: S311  # test data
        self.kvd = KvdProcess(self._kvd_dir)
        (directory / "svc").mkdir()
        self.service = InferenceProcess(model_dir, directory / "svc", self.kvd.runtime_dir, flags)

    @asynccontextmanager
    async def with_kvd(
        self, *flags: str, keep: str = "none", reads_ahead: bool = True
    ) -> AsyncIterator[None]:
        """Run a fresh kvd with these flags, attached; it is stopped at the end.

        Args:
            keep: "file": its DRAM survives its restarts.
            reads_ahead: False: blocks that are on SSD when a turn arrives are still there when
                it loads them, however long it waits.
        """
        self._scene += 1
        self._stored.clear()
        environ = {} if reads_ahead else {"KVD_PREFETCH__IN_FLIGHT_BYTES": "0"}
        self.kvd = KvdProcess(self._kvd_dir, flags, keep, environ)
        shutil.rmtree(self.kvd.state_dir, ignore_errors=True)
        try:
            await self.kvd.start()
            await self.until_kvd_is("attached")
            yield
        finally:
            await self.kvd.stop()

    def name(self, session_id: str) -> str:
        """The session's name in this scene."""
        return f"{session_id}-{self._scene}"

    def some_tokens(self, num_tokens: int) -> list[int]:
        """Random ordinary token ids, the same in every run."""
        return [self._random.randrange(4, VOCAB_SIZE) for _ in range(num_tokens)]

    async def say(
        self, session_id: str, num_tokens: int = 150, max_tokens: int = 16, **fields: Any
    ) -> TurnResult:
        """Submit a turn of random tokens, greedy, to its full length."""
        sampling = inference_pb2.Sampling(max_tokens=max_tokens, ignore_eos=True)
        request = turn_request(
            self.some_tokens(num_tokens), self.name(session_id), sampling=sampling, **fields
        )
        return await self.submit(request)

    async def submit(self, request: inference_pb2.SubmitTurnRequest) -> TurnResult:
        """Run a turn and note how many tokens kvd must hold after it."""
        async with self.service.client() as client:
            result = await client.submit(request)
            usage = result.usage  # the last token of an answer has no KV yet
            stored_tokens = usage.history_tokens + usage.new_tokens + usage.output_tokens - 1
            if usage.dropped_tokens or usage.compressed_tokens:
                session = await client.get_session(request.session_id)
                stored_tokens = session.context_tokens - 1
        self._stored[request.session_id] = stored_tokens
        return result

    async def verdict(self, oracle: Oracle, session_id: str) -> Verdict:
        """Compare a session's whole transcript with recomputation."""
        session = await self.session(session_id)
        return await asyncio.to_thread(
            oracle.judge, [(turn.input_ids, turn.output_ids) for turn in session.turn_records]
        )

    async def session(self, session_id: str) -> inference_pb2.Session:
        """Return a session of this scene, with its turns."""
        async with self.service.client() as client:
            return await client.get_session(self.name(session_id), with_turns=True)

    async def stats(self) -> kvd_pb2.LayoutStats:
        """Return the statistics of kvd's only layout."""
        (layout,) = (await self._read("GetStats", kvd_pb2.GetStatsRequest())).layouts
        return layout

    async def counters(self) -> dict[str, int]:
        """Return the service's counters."""
        async with self.service.client() as client:
            return dict((await client.get_model()).counters)

    async def stored_sessions(self) -> dict[str, int]:
        """Return kvd's sessions: tokens by name."""
        page = await self._read("ListSessions", kvd_pb2.ListSessionsRequest())
        return {info.session.session_id: info.num_tokens for info in page.sessions}

    async def stored(self, session_id: str) -> kvd_pb2.SessionInfo:
        """Describe a session as kvd has it; the answer is empty if kvd has none of that name."""
        page = await self._read("ListSessions", kvd_pb2.ListSessionsRequest())
        found = [i for i in page.sessions if i.session.session_id == self.name(session_id)]
        return found[0] if found else kvd_pb2.SessionInfo()

    async def until_saved(self) -> None:
        """Return when kvd has the KV of all turns of the scene, and all of it on SSD."""

        async def is_saved() -> bool:
            stored = await self.stored_sessions()
            return self._stored.items() <= stored.items() and not (await self.stats()).dirty_bytes

        await until(is_saved)

    async def until_kvd_is_idle(self) -> None:
        """Return when no lease is held."""

        async def is_idle() -> bool:
            return not (await self.stats()).leases

        await until(is_idle)

    async def until_kvd_is(self, state: str) -> None:
        """Return when the service sees kvd "attached" or "detached"."""
        async with self.service.client() as client:

            async def is_so() -> bool:
                return (await client.get_model()).kvd_state == state

            await until(is_so)

    async def _read(self, method: str, request: Any) -> Any:
        address = f"unix:{self.kvd.runtime_dir / READER_SOCKET}"
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            return await getattr(kvd_pb2_grpc.ReaderStub(channel), method)(request)


def resident_pair(model_dir: Path, directory: Path, *settings: str) -> Pair:
    """Run a service whose sessions stay in memory, which is too small for four of them.

    Args:
        settings: additional lines of its scheduler section.
    """
    lines, path = ["[scheduler]", "kv_tokens = 2400", *settings], directory / "settings.toml"
    path.write_text("\n".join(lines) + "\n")
    return Pair(model_dir, directory, "--config", str(path), "--residents")


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Poll until the condition holds."""
    async with asyncio.timeout(SETTLE_S):
        while not await is_so():
            await pause()
