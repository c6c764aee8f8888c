"""Copiers as processes, over a stand-in for CUDA: what they copy, and how they end."""

import asyncio
import os
import signal
import socket
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from kvd.copier.control import Failed, Opened
from kvd.engines import copiers as copiers_module
from kvd.engines.copiers import Copiers, NoCopierError
from kvd.engines.data_socket import DataConnection, DataSocket, EngineUsers
from kvd.tiers.arena_store import ArenaOptions, ArenaStore
from shared.kvd_client import data_socket_protocol as packets
from shared.kvd_client.copy_jobs import (
    ANSWER_BYTES,
    Answered,
    Job,
    Way,
    decode_answer,
    encode_job,
)
from tests.fake_cuda_path import GPUS, fake_cuda
from tests.synthetic_engine import small_layout

NUM_SLOTS = 6
RING_BYTES = 2 << 20


@pytest.fixture
def gpus(monkeypatch):
    """Give a machine with two GPUs to started processes."""
    for name, value in fake_cuda().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def arena(tmp_path):
    options = ArenaOptions(keep="none", directory=tmp_path)
    made = ArenaStore(options, tmp_path, num_words=4).create(small_layout(), NUM_SLOTS)
    made.slots.memory[:] = os.urandom(len(made.slots.memory))
    yield made
    if not made.closing.is_set():
        made.close()


@asynccontextmanager
async def running(*, is_enabled=True):
    copiers = Copiers(is_enabled=is_enabled)
    try:
        yield copiers
    finally:
        await copiers.close()
        assert copiers.num_running == 0


class Peer:
    """An engine's end of a channel, and its ring."""

    def __init__(self, channel, sock, pidfd, ring_fd):
        self.channel, self.sock, self.pidfd, self.ring_fd = channel, sock, pidfd, ring_fd

    @classmethod
    async def of(cls, copiers, arena, device=GPUS[0], num_slots=NUM_SLOTS):
        """Open a channel, and wait until the slots may be used."""
        ring_fd = os.memfd_create("ring")
        os.ftruncate(ring_fd, RING_BYTES)
        peer = cls(*await copiers.open(device, arena, ring_fd, RING_BYTES), ring_fd)
        peer.sock.settimeout(60)
        while num_slots and await peer.answer() != (Answered.REGISTERED, num_slots):
            pass
        return peer

    async def answer(self):
        packet = await asyncio.to_thread(self.sock.recv, ANSWER_BYTES)
        return decode_answer(packet) if packet else None

    async def do(self, way, ring_offset, slot_offset, piece_bytes, slot_ids):
        self.sock.send(encode_job(Job(way, 5, ring_offset, slot_offset, piece_bytes, slot_ids)))
        return await self.answer()

    def close(self):
        self.sock.close()
        os.close(self.ring_fd)
        os.close(self.pidfd)


async def over(channel):
    """Wait until no copy for a channel is active any more."""
    done = asyncio.Event()
    channel.end(done.set)
    async with asyncio.timeout(60):
        await done.wait()


async def until(is_so):
    """Wait for a change in another process."""
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)


def pid_of(pidfd):
    info = Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in info.splitlines() if line.startswith("Pid:"))


async def test_pieces_of_slots_are_copied_both_ways(gpus, arena):
    """Bit for bit, and no other byte changes; the copies are counted."""
    before = bytes(arena.slots.memory)
    slot_bytes = arena.slots.slot_bytes
    async with running() as copiers:
        peer = await Peer.of(copiers, arena)
        assert await peer.do(Way.LOAD, 512, 64, 128, [4, 1, 5]) == (Answered.DONE, 5)
        ring = os.pread(peer.ring_fd, RING_BYTES, 0)
        wanted = b"".join(before[s * slot_bytes + 64 :][:128] for s in (4, 1, 5))
        assert ring == bytes(512) + wanted + bytes(RING_BYTES - 512 - len(wanted))
        os.pwrite(peer.ring_fd, b"x" * 200, 1000)
        assert await peer.do(Way.STORE, 1000, slot_bytes - 100, 100, [0, 3]) == (Answered.DONE, 5)
        after = bytearray(before)
        for slot_id in (0, 3):
            after[(slot_id + 1) * slot_bytes - 100 : (slot_id + 1) * slot_bytes] = b"x" * 100
        assert bytes(arena.slots.memory) == bytes(after)
        await until(lambda: copiers.totals().jobs == 2)
        totals = copiers.totals()
        assert (totals.loaded_bytes, totals.stored_bytes) == (384, 200)
        assert totals.registered_bytes == NUM_SLOTS * slot_bytes
        peer.close()
    assert copiers.totals().jobs == 2
    assert copiers.totals().registered_bytes == 0
    assert copiers.num_failed == 0


@pytest.mark.parametrize(
    "packet",
    [
        b"junk",
        encode_job(Job(Way.LOAD, 1, 0, 0, 64, [NUM_SLOTS])),
        encode_job(Job(Way.STORE, 1, RING_BYTES - 63, 0, 64, [0])),
    ],
)
async def test_a_job_beyond_its_bounds_ends_only_its_channel(gpus, arena, packet):
    """Later jobs are not done, and another engine's channel continues."""
    async with running() as copiers:
        bad, good = await Peer.of(copiers, arena), await Peer.of(copiers, arena)
        bad.sock.send(packet)
        assert await bad.answer() == (Answered.CLOSED, 0)
        assert await bad.answer() is None
        await over(bad.channel)
        assert await good.do(Way.LOAD, 0, 0, 64, [0]) == (Answered.DONE, 5)
        bad.close()
        good.close()
        await over(good.channel)


async def test_an_engine_that_leaves_has_no_active_copies(monkeypatch, arena):
    """Its channel ends after its last job, whichever side notices first."""
    for name, value in fake_cuda(copy_s=0.2).items():
        monkeypatch.setenv(name, value)
    async with running() as copiers:
        peer = await Peer.of(copiers, arena)
        os.pwrite(peer.ring_fd, b"y" * 64, 0)
        peer.sock.send(encode_job(Job(Way.STORE, 1, 0, 0, 64, [2])))
        peer.close()
        await over(peer.channel)
        begin = 2 * arena.slots.slot_bytes
        assert bytes(arena.slots.memory[begin : begin + 64]) == b"y" * 64


@pytest.mark.parametrize("answer", [Opened, partial(Failed, message="no")])
async def test_an_opening_given_up_just_as_it_is_answered_harms_nobody(gpus, arena, answer):
    """Its waiter has not run yet; the copier and its other channels go on."""
    async with running() as copiers:
        peer = await Peer.of(copiers, arena)
        copier = copiers._copiers[GPUS[0]]
        opening = asyncio.ensure_future(copiers.open(GPUS[0], arena, peer.ring_fd, RING_BYTES))
        while not copier._opening:  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0)
        (number,) = copier._opening
        opening.cancel()
        copier._on_message(answer(number))
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert await peer.do(Way.LOAD, 0, 0, 64, [0]) == (Answered.DONE, 5)
        peer.close()


async def test_a_killed_copier_is_replaced(gpus, arena):
    """Owners of a channel learn of it; the next request gets another process."""
    async with running() as copiers:
        peer = await Peer.of(copiers, arena)
        signal.pidfd_send_signal(peer.pidfd, signal.SIGKILL)
        assert await peer.answer() is None
        await over(peer.channel)
        assert copiers.num_failed == 1
        other = await Peer.of(copiers, arena)
        assert pid_of(other.pidfd) > 0
        assert await other.do(Way.LOAD, 0, 0, 64, [0]) == (Answered.DONE, 5)
        peer.close()
        other.close()


async def test_a_stuck_copier_is_killed(gpus, arena, monkeypatch):
    """A stopped process answers no ping."""
    monkeypatch.setattr(copiers_module, "PING_S", 0.05)
    async with running() as copiers:
        peer = await Peer.of(copiers, arena)
        monkeypatch.setattr(copiers_module, "SILENCE_S", 1.0)
        signal.pidfd_send_signal(peer.pidfd, signal.SIGSTOP)
        await until(lambda: peer.channel.is_over)
        assert copiers.num_failed == 1
        peer.close()


@pytest.mark.long
async def test_a_job_that_takes_too_long_ends_the_copier(arena, monkeypatch):
    """It answers no ping meanwhile, and is killed: the GPU is stuck, or the job."""
    for name, value in fake_cuda(copy_s=600).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(copiers_module, "PING_S", 0.05)
    async with running() as copiers:
        peer = await Peer.of(copiers, arena)
        peer.sock.send(encode_job(Job(Way.LOAD, 1, 0, 0, 64, [2])))
        await until(lambda: peer.channel.is_over)
        peer.close()


async def test_each_gpu_has_a_copier(gpus, arena):
    """Two engines on one GPU share a process; another GPU has another one."""
    async with running() as copiers:
        peers = [await Peer.of(copiers, arena, device) for device in (GPUS[0], GPUS[1], GPUS[0])]
        first, second, third = (pid_of(peer.pidfd) for peer in peers)
        assert first == third
        assert first != second
        assert copiers.num_running == 2
        for peer in peers:
            assert await peer.do(Way.LOAD, 0, 0, 64, [1]) == (Answered.DONE, 5)
            peer.close()


async def test_a_closed_arena_is_unmapped(gpus, arena, monkeypatch):
    """It takes no memory in a copier."""
    monkeypatch.setattr(copiers_module, "PING_S", 0.05)
    async with running() as copiers:
        peer = await Peer.of(copiers, arena)
        mapped = psutil.Process(pid_of(peer.pidfd)).memory_maps
        names = {entry.path for entry in mapped()}
        assert any("kvd" in name for name in names), names
        await over(peer.channel)
        arena.close()
        await until(lambda: not any("kvd" in entry.path for entry in mapped()))
        await until(lambda: copiers.totals().registered_bytes == 0)
        peer.close()


@pytest.mark.parametrize(
    ("device", "environ", "said"),
    [
        ("GPU-00000000-0000-0000-0000-00000000000f", {}, "not visible to this process"),
        ("cuda:0", {}, "'cuda:0' is not the UUID of a GPU"),
        (GPUS[0], {"FAKE_CUDA_DEVICES": ""}, "CUDA_ERROR_NO_DEVICE"),
        (GPUS[0], {"PYTHONPATH": ""}, "no CUDA driver|not installed"),
    ],
)
async def test_the_reason_for_a_missing_copier(gpus, arena, monkeypatch, device, environ, said):
    """In one line, with a remedy; no process is left running."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    async with running() as copiers:
        with pytest.raises(NoCopierError, match=said) as refused:
            await Peer.of(copiers, arena, device)
        assert refused.value.remedy
        await until(lambda: copiers.num_running == 0)
        assert copiers.num_failed == 0


async def test_switched_off_copiers_are_not_started(arena):
    async with running(is_enabled=False) as copiers:
        with pytest.raises(NoCopierError, match="starts no copiers"):
            await Peer.of(copiers, arena)


async def test_a_ring_that_is_too_small_is_refused(gpus, arena):
    """The copier gives the reason, and continues."""
    async with running() as copiers:
        ring_fd = os.memfd_create("ring")
        os.ftruncate(ring_fd, 100)
        with pytest.raises(NoCopierError, match="cuMemMap"):
            await copiers.open(GPUS[0], arena, ring_fd, RING_BYTES)
        os.close(ring_fd)
        peer = await Peer.of(copiers, arena)
        peer.close()


async def test_an_engine_that_goes_before_it_has_its_channel_leaves_no_descriptor(gpus, arena):
    """The channel was made for it, and cannot be sent."""

    def num_pidfds():
        num_found = 0
        for described in Path("/proc/self/fdinfo").iterdir():
            with suppress(FileNotFoundError):  # that of the directory itself
                num_found += "Pid:" in described.read_text(encoding="ascii")
        return num_found

    async with running() as copiers:
        peer = await Peer.of(copiers, arena)
        before = num_pidfds()
        data_socket = DataSocket(EngineUsers(), 4, copiers=copiers)
        connection = DataConnection("token", 0, 0, None)
        request = packets.CopierRequest(arena.arena_id, GPUS[0], RING_BYTES)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            theirs.close()
            with pytest.raises(OSError, match="pipe"):
                await data_socket._open_channel(ours, connection, arena, request, [peer.ring_fd])
        assert num_pidfds() == before
        await over(connection.channels[0])
        connection.close()
        peer.close()
