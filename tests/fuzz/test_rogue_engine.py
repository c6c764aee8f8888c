"""An engine that misuses all of its resources; kvd and engines of other layouts continue.

It shares its layout's slots with the other engines of that layout. Damage to them costs misses
once kvd detects it: on a load with integrity.verify_on_load, at a restart, and before a write.
    tests/fault/test_holders.py tests garbage in every slot with the first of these; this module
    tests the others, and all other uses of three descriptors.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import signal
import socket
from dataclasses import dataclass
from functools import partial

import grpc
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from kvd.tiers.progress import F_SEAL_FUTURE_WRITE
from shared.pb.kvd.v1 import kvd_pb2
from tests.fault.ledger import Ledger
from tests.fuzz.amounts import few, many
from tests.fuzz.fuzzed_kvd import FuzzedKvd
from tests.fuzz.messages import LAYOUTS
from tests.fuzz.raw_engine import RawEngine, raw_engine
from tests.kvd_polling import all_clean, eventually, reader_stats
from tests.processes import run_cli
from tests.synthetic_engine import SyntheticEngine, attached_engine, encode, key_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

PUNCH_HOLE, KEEP_SIZE = 2, 1  # of fallocate(2)
SLOT_BYTES = LAYOUTS[0].block_bytes
NUM_SLOTS = 262_144 // SLOT_BYTES
TOKENS = 40


@dataclass(frozen=True)
class Deed:
    """An action of the rogue: the name of a method of `Rogue`, and numbers for it."""

    name: str
    place: int
    data: bytes


class Rogue:
    """The actions. Those that the kernel must refuse check that."""

    def __init__(self, engine: RawEngine) -> None:
        self._engine = engine
        self.slots = mmap.mmap(engine.slots_fd, NUM_SLOTS * SLOT_BYTES)

    async def do(self, deed: Deed) -> None:
        """Do one action."""
        await getattr(self, f"_{deed.name}")(deed.place, deed.data)

    async def _scribble(self, place: int, data: bytes) -> None:
        start = place % len(self.slots)
        chunk = (data * (len(self.slots) // len(data)))[: len(self.slots) - start]
        self.slots[start : start + len(chunk)] = chunk

    async def _punch(self, place: int, _data: bytes) -> None:
        start = place % NUM_SLOTS * SLOT_BYTES
        _fallocate(self._engine.slots_fd, PUNCH_HOLE | KEEP_SIZE, start, SLOT_BYTES)

    async def _resize(self, place: int, _data: bytes) -> None:
        for fd in (self._engine.slots_fd, self._engine.progress_fd):
            for size in (0, place, os.fstat(fd).st_size * 2):
                with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
                    os.ftruncate(fd, size)

    async def _seal(self, _place: int, _data: bytes) -> None:
        for fd in (self._engine.slots_fd, self._engine.progress_fd):
            for seal in (fcntl.F_SEAL_WRITE, F_SEAL_FUTURE_WRITE, fcntl.F_SEAL_SHRINK):
                with pytest.raises(PermissionError):
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)

    async def _forge(self, place: int, data: bytes) -> None:
        fd = self._engine.progress_fd
        with pytest.raises(PermissionError):
            mmap.mmap(fd, mmap.PAGESIZE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, data, place % 4096)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(again, data, place % 4096)
            with pytest.raises(PermissionError):
                mmap.mmap(again, mmap.PAGESIZE)
            with pytest.raises(PermissionError):
                _fallocate(again, PUNCH_HOLE | KEEP_SIZE, 0, mmap.PAGESIZE)
        finally:
            os.close(again)

    async def _wake(self, place: int, data: bytes) -> None:
        """Fill the wakeup in both directions, and leave it blocking, or shut down."""
        fd = self._engine.wakeup_fd
        os.set_blocking(fd, False)
        with contextlib.suppress(OSError):  # full, or shut down by an earlier action
            for _ in range(place % 3000):
                os.write(fd, data)
        os.set_blocking(fd, True)
        if place % 5 == 0:
            with socket.socket(fileno=os.dup(fd)) as wakeup:
                wakeup.shutdown(socket.SHUT_RDWR)

    async def _lease(self, place: int, _data: bytes) -> None:
        """Load with progress words, or store, and neither read nor complete it."""
        asked = {
            "engine_id": self._engine.engine_id,
            "session": kvd_pb2.SessionKey(session_id=f"s{place % 4}"),
            "token_ids": encode(range(1000 * (1 + place % 4), 1000 * (1 + place % 4) + TOKENS)),
            "deadline_s": 0.01,
        }
        if place % 3:
            request = kvd_pb2.PrepareLoadRequest(accept_pending=True, **asked)
            await self._engine.stub.PrepareLoad(request, timeout=30)
        else:
            # Its own tokens: their meaning is its own.
            asked["session"] = kvd_pb2.SessionKey(session_id="rogue")
            asked["token_ids"] = encode(range(9000 + place % 50, 9050 + place % 50))
            request = kvd_pb2.PrepareStoreRequest(**asked)
            answer = await self._engine.stub.PrepareStore(request, timeout=30)
            if answer.lease_id and place % 2:
                complete = kvd_pb2.CompleteStoreRequest(
                    engine_id=self._engine.engine_id, lease_id=answer.lease_id, success=True
                )
                await self._engine.stub.CompleteStore(complete, timeout=30)


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Call fallocate(2), which os lacks with its mode."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_int64
    if libc.fallocate(fd, mode, size(offset), size(length)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


DEEDS = [name[1:] for name in vars(Rogue) if name[0] == "_" and name[1] != "_"]
deeds = st.lists(
    st.builds(
        Deed,
        st.sampled_from(DEEDS),
        st.integers(0, NUM_SLOTS * SLOT_BYTES - 1),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=6,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["true", "false"])
async def served(tmp_path_factory, request):
    """Run (kvd, engine of the rogue's layout, engine of another one); verify_on_load on and off.

    Memory is sealed: other users need not be able to write to the file system for it.
    """
    kvd = FuzzedKvd(
        tmp_path_factory.mktemp("rogue"), keep="none", KVD_INTEGRITY__VERIFY_ON_LOAD=request.param
    )
    await kvd.start()
    before = await kvd.connections()
    try:
        async with (
            attached_engine(kvd.runtime_dir, LAYOUTS[0], "beside") as beside,
            attached_engine(kvd.runtime_dir, LAYOUTS[1], "elsewhere") as elsewhere,
        ):
            yield kvd, beside, elsewhere
        await kvd.leaves_nothing(before)
        assert await kvd.stop() == 0, "its invariants hold"
        kvd.is_over_unharmed()
    finally:
        await kvd.kill()


async def _play(served, todo: list[Deed]) -> None:
    kvd, beside, elsewhere = served
    ledger = Ledger()
    for number in range(4):
        await ledger.store(beside, f"s{number}", _tokens(number))
        await elsewhere.store(_elsewhere(number), _tokens(number))
    await all_clean(kvd)  # before it is hashed kvd cannot detect the change
    async with raw_engine(kvd.runtime_dir, LAYOUTS[0]) as engine:
        rogue = Rogue(engine)
        for deed in todo:
            await rogue.do(deed)
        await _others_are_unharmed(kvd, elsewhere)
    # A block with an active reader is not verified again: the rogue has to release it first.
    await eventually(partial(_num_leases, kvd), 0)
    if kvd._environment["KVD_INTEGRITY__VERIFY_ON_LOAD"] == "false":
        # A block in DRAM is only verified at a load; so load it now.
        at = ("--runtime-dir", str(kvd.runtime_dir))
        code, stdout, stderr = await run_cli("verify", *at)
        assert code in {0, 1}, stdout + stderr
    found = await ledger.judge(beside, kvd)  # compares every byte
    assert not found["missed"], "the copies on SSD are right"
    kvd.is_unharmed()


async def _num_leases(kvd: FuzzedKvd) -> int:
    return sum(layout.leases for layout in (await reader_stats(kvd)).layouts)


async def _others_are_unharmed(kvd: FuzzedKvd, elsewhere: SyntheticEngine) -> None:
    for number in range(4):
        load = await elsewhere.load(_elsewhere(number), _tokens(number))
        assert load.num_tokens == TOKENS
    layouts = {layout.layout: layout for layout in (await reader_stats(kvd)).layouts}
    counters = layouts[LAYOUTS[1].fingerprint].counters
    assert counters["blocks_corrupt_dram"] == counters["blocks_corrupt_ssd"] == 0


def _tokens(number: int) -> list[int]:
    return list(range(1000 * (1 + number), 1000 * (1 + number) + TOKENS))


def _elsewhere(number: int):
    return key_of(f"s{number}", model=LAYOUTS[1].model)


@few(6)
@given(deeds)
async def test_any_actions(served, todo):
    """In any order; kvd is unharmed, and so are engines with other memory."""
    await _play(served, todo)


@pytest.mark.long
@many(13)
@given(deeds)
async def test_any_actions_long(served, todo):
    """Run the same for minutes."""
    await _play(served, todo)


async def test_a_file_that_is_truncated(tmp_path):
    """An engine can truncate a file's memory, which ends kvd; the next one works.

    The kernel's only protection is sealed memory (dram.keep = "fdstore" or "none").
    """
    kvd = FuzzedKvd(tmp_path, keep="file", KVD_INTEGRITY__VERIFY_ON_LOAD="true")
    await kvd.start()
    ledger = Ledger()
    async with attached_engine(kvd.runtime_dir, LAYOUTS[1], "elsewhere") as elsewhere:
        await elsewhere.store(_elsewhere(0), _tokens(0))
        async with attached_engine(kvd.runtime_dir, LAYOUTS[0], "beside") as beside:
            await ledger.store(beside, "s0", _tokens(0))
        await all_clean(kvd)
        async with raw_engine(kvd.runtime_dir, LAYOUTS[0]) as rogue:
            os.ftruncate(rogue.slots_fd, 0)
            request = kvd_pb2.PrepareLoadRequest(
                engine_id=rogue.engine_id,
                session=kvd_pb2.SessionKey(session_id="s0"),
                token_ids=encode(_tokens(0)),
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rogue.stub.PrepareLoad(request, timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await kvd.exit_code() == -signal.SIGBUS
        await kvd.start()
        await elsewhere.client.wait_attached(30)
        load = await elsewhere.load(_elsewhere(0), _tokens(0))
        assert (load.num_tokens, load.tiers) == (TOKENS, {"dram"})
        async with attached_engine(kvd.runtime_dir, LAYOUTS[0], "beside") as beside:
            assert await ledger.judge(beside, kvd) == {"ssd": 1}
    assert "arena_discarded" in kvd.log()
    assert await kvd.stop() == 0
