"""The data socket with arbitrary packets: others are served, and no descriptor is left."""

import asyncio
import json
import resource
import socket
from contextlib import suppress
from dataclasses import dataclass

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from shared.kvd_client import data_socket_protocol as packets
from shared.process.packets import MAX_PACKET_BYTES, close_fds
from tests.fuzz.amounts import few, many
from tests.fuzz.fuzzed_kvd import FuzzedKvd, kvd_beside_an_engine, still_serves
from tests.fuzz.raw_engine import raw_engine, receive
from tests.synthetic_engine import small_layout

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_PEERS = 16
SPARE_FDS = 8

any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
fields = st.fixed_dictionaries(
    {"kind": st.sampled_from([*packets.DATA_SOCKET_PACKETS.kinds, "", "no such"]) | any_json},
    optional={"arena_id": st.text(max_size=40) | any_json, "token": any_json, "more": any_json},
)


@dataclass(frozen=True)
class Send:
    """Sends a packet, with so many descriptors."""

    packet: bytes
    num_fds: int = 0


@dataclass(frozen=True)
class Act:
    """One of: read, half-close for writing, half-close for reading."""

    how: str


MINE = "mine"  # replaced by the arena of the engine that sends it
valid = st.sampled_from(
    [
        packets.ArenaRequest(MINE),
        packets.CallsRequest(MINE),
        packets.Leaving(),
        packets.Welcome("a" * 32),
    ]
)
any_packet = st.one_of(
    st.binary(max_size=100),
    st.sampled_from([b"\xff" * MAX_PACKET_BYTES, b"[" * 4000, b"x" * 60_000]),
    fields.map(lambda made: json.dumps(made).encode()),
    valid.map(packets.encode),
)
any_step = st.builds(Send, any_packet, st.sampled_from([0, 0, 1, 3, 4, 50])) | st.builds(
    Act, st.sampled_from(["read", "shut_write", "shut_read"])
)
# For each connection: its actions, and whether it is an attached engine's.
any_peers = st.lists(
    st.tuples(st.booleans(), st.lists(any_step, max_size=6)), min_size=1, max_size=6
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fuzzed(tmp_path_factory):
    """Run (kvd, an engine that stays); at the end nothing is left of all other connections."""
    directory = tmp_path_factory.mktemp("data")
    async with kvd_beside_an_engine(directory, KVD_LIMITS__MAX_ENGINES=str(MAX_PEERS)) as pair:
        yield pair


async def _play(fuzzed, peers) -> None:
    kvd, engine = fuzzed
    await asyncio.gather(*(_be(kvd, is_engine, steps) for is_engine, steps in peers))
    await still_serves(kvd, engine)


async def _be(kvd: FuzzedKvd, is_engine: bool, steps: list[Send | Act]) -> None:
    """Run one connection from its beginning to its end."""
    if not is_engine:
        with packets.connect(str(kvd.runtime_dir / "data.sock")) as sock:
            await _do(sock, steps, MINE)
        return
    async with raw_engine(kvd.runtime_dir, small_layout()) as engine:
        await _do(engine.data, steps, engine.arena_id)


async def _do(sock: socket.socket, steps: list[Send | Act], arena_id: str) -> None:
    for step in steps:
        with suppress(OSError, TimeoutError):  # closed by kvd, shut by the test, too large
            if isinstance(step, Send):
                fds = [sock.fileno()] * step.num_fds  # its own: a loop that the kernel must resolve
                packet = step.packet.replace(json.dumps(MINE).encode(), f'"{arena_id}"'.encode())
                socket.send_fds(sock, [packet], fds)
            elif step.how == "read":
                async with asyncio.timeout(0.02):
                    _, fds = await receive(sock)
                    close_fds(fds)
            else:
                sock.shutdown(socket.SHUT_WR if step.how == "shut_write" else socket.SHUT_RD)


@few(30)
@given(any_peers)
async def test_any_packets(fuzzed, peers):
    """Attached or not."""
    await _play(fuzzed, peers)


@pytest.mark.long
@many(30)
@given(any_peers)
async def test_any_packets_long(fuzzed, peers):
    """Run the same for minutes."""
    await _play(fuzzed, peers)


@pytest.mark.parametrize("num_connects", [1000, pytest.param(50_000, marks=pytest.mark.long)])
async def test_thousands_of_connections(fuzzed, num_connects):
    """Opened and closed as fast as possible; more than allowed at once are refused."""
    kvd, engine = fuzzed
    path = str(kvd.runtime_dir / "data.sock")
    open_ones: list[socket.socket] = []
    for number in range(num_connects):
        try:
            open_ones.append(packets.connect(path))
        except BlockingIOError:  # its backlog is full: a connection has to wait
            await asyncio.sleep(0.001)
        if number % 100 == 99:
            await still_serves(kvd, engine)
        while len(open_ones) > 3 * MAX_PEERS:
            open_ones.pop(number % len(open_ones)).close()
    for sock in open_ones:
        sock.close()
    await still_serves(kvd, engine)


async def test_without_descriptors_left(fuzzed):
    """kvd lets new connections wait or refuses them; then it continues."""
    kvd, engine = fuzzed
    path = str(kvd.runtime_dir / "data.sock")
    before = await kvd.connections()
    limits = resource.prlimit(kvd.pid, resource.RLIMIT_NOFILE)
    highest = max(kvd.open_fds())
    for num_spare in range(SPARE_FDS):
        resource.prlimit(kvd.pid, resource.RLIMIT_NOFILE, (highest + 1 + num_spare, limits[1]))
        socks = [packets.connect(path) for _ in range(SPARE_FDS)]
        await still_serves(kvd, engine)
        for sock in socks:
            sock.close()
        resource.prlimit(kvd.pid, resource.RLIMIT_NOFILE, limits)
        await kvd.has_no_more_than(before)
        async with raw_engine(kvd.runtime_dir, small_layout()):
            await still_serves(kvd, engine)
