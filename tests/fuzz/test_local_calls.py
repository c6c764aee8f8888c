"""Sockets for local calls with any bytes and frames: others are served, and nothing is left."""

import asyncio
import math
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

import pytest
import pytest_asyncio
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from shared.kvd_client import data_socket_protocol as packets
from shared.pb.kvd.v1 import kvd_pb2
from shared.process.runtime_dir import MAX_FRAME_BYTES
from tests.fuzz.amounts import few, many
from tests.fuzz.fuzzed_kvd import FuzzedKvd, kvd_beside_an_engine, still_serves
from tests.fuzz.messages import FIRST_MARK, requests_of, resolve
from tests.fuzz.raw_engine import RawEngine, open_calls, raw_engine
from tests.synthetic_engine import encode, small_layout

pytestmark = pytest.mark.asyncio(loop_scope="module")

READ_S = 0.02
LENGTH = struct.Struct("<I")  # before each frame
NEVER = {2, 13}  # codes: UNKNOWN, INTERNAL
ENGINE = kvd_pb2.DESCRIPTOR.services_by_name["Engine"]
MB = 1 << 20
MOST_ROUNDS = 200
NONE, WHOLE = st.none(), st.just(0)
NUMBERS = st.integers(0, 1000) | st.integers(0, (1 << 64) - 1)


@dataclass(frozen=True)
class Bytes:
    """Sends bytes."""

    data: bytes


@dataclass(frozen=True)
class Frame:
    """Sends a frame, or its first bytes: all but `cut` of them.

    Its request is that of the call, or the message that it is to be; marks in it stand for ids.
    """

    call: kvd_pb2.CallFrame
    message: Message | None = None
    cut: int = 0


@dataclass(frozen=True)
class Act:
    """One of: read, half-close for writing, half-close for reading."""

    how: str


def _frames(methods, messages=NONE, numbers=NUMBERS, cuts=WHOLE):
    """Draw frames that call one of these methods."""
    call = st.builds(
        kvd_pb2.CallFrame,
        number=numbers,
        method=methods,
        request=st.binary(max_size=40),
        timeout_s=st.sampled_from([0.0, 0.0, 1e-9, 30.0, -1.0, math.inf, math.nan]),
        metadata=st.dictionaries(
            st.sampled_from(["traceparent", "tracestate", "authorization"]) | st.text(max_size=8),
            st.text(max_size=60),
            max_size=2,
        ),
    )
    return st.builds(Frame, call, messages, cuts)


own_methods = st.sampled_from(
    [method for method in ENGINE.methods if not method.server_streaming]
).flatmap(
    lambda method: _frames(
        st.just(f"/{ENGINE.full_name}/{method.name}"),
        st.one_of(*[requests_of(method)] * 5, NONE),
    )
)
_GRANTED = {  # what every field of a request for a lease may be, for one to be granted
    "engine_id": FIRST_MARK,
    "session": kvd_pb2.SessionKey(session_id="rogue"),
    "token_ids": encode(range(40)),
    "deadline_s": 0.01,
}
leases = st.one_of(
    _frames(
        st.just("/kvd.v1.Engine/PrepareStore"), st.just(kvd_pb2.PrepareStoreRequest(**_GRANTED))
    ),
    _frames(st.just("/kvd.v1.Engine/PrepareLoad"), st.just(kvd_pb2.PrepareLoadRequest(**_GRANTED))),
)
foreign_methods = _frames(
    st.sampled_from(["/kvd.v1.Engine/Attach", "/kvd.v1.Operator/Flush", "/kvd.v1.Engine/", "\0"])
    | st.text(max_size=99)
)
good_step = st.one_of(
    *[own_methods] * 4,
    leases,
    foreign_methods,
    _frames(st.just("")),  # cancels a call that runs, or does not
    st.just(Act("read")),
)
bad_step = st.one_of(
    st.builds(Bytes, st.binary(max_size=100)),
    st.sampled_from([0, 1, 70_000, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, (1 << 32) - 1]).map(
        lambda length: Bytes(LENGTH.pack(length))
    ),
    st.binary(max_size=50).map(lambda data: Bytes(LENGTH.pack(len(data)) + data)),
    _frames(st.just("/kvd.v1.Engine/GetSession"), numbers=st.just(1)),
    _frames(st.just("/kvd.v1.Engine/GetSession"), cuts=st.integers(1, 9)),
    st.builds(Act, st.sampled_from(["shut_write", "shut_read"])),
)
some_steps = st.builds(
    list.__add__,
    st.lists(good_step, max_size=10),
    st.lists(good_step | bad_step, max_size=4),
)
# For each engine: whether its socket ends before its data connection, and what it does until then.
any_engines = st.lists(st.tuples(st.booleans(), some_steps), min_size=1, max_size=3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fuzzed(tmp_path_factory):
    """Run (kvd, an engine that stays); at the end nothing is left of all others."""
    directory = tmp_path_factory.mktemp("calls")
    async with kvd_beside_an_engine(directory, KVD_LIMITS__MAX_RPCS="8") as pair:
        yield pair


async def _play(fuzzed, engines) -> None:
    kvd, engine = fuzzed
    await asyncio.gather(*(_be(kvd, ends_first, steps) for ends_first, steps in engines))
    await still_serves(kvd, engine)


async def _be(kvd: FuzzedKvd, ends_first: bool, steps: list[Bytes | Frame | Act]) -> None:
    """Run one engine from its beginning to its end."""
    async with raw_engine(kvd.runtime_dir, small_layout()) as engine:
        calls = await open_calls(engine)
        try:
            await _do(engine, calls, steps)
            if ends_first:
                calls.close()
        finally:
            if not ends_first:
                packets.send(engine.data, packets.Leaving())
            calls.close()


async def _do(engine: RawEngine, calls: socket.socket, steps: list[Bytes | Frame | Act]) -> None:
    """Do the steps, and check the answers that come meanwhile and soon afterwards."""
    numbers = {step.call.number for step in steps if isinstance(step, Frame)}
    answers = bytearray()
    for step in [*steps, Act("read")]:
        with suppress(OSError, TimeoutError):  # closed by kvd, shut by the test, full
            if isinstance(step, Frame):
                calls.send(_on_the_wire(engine, step))
            elif isinstance(step, Bytes):
                calls.send(step.data)
            elif step.how == "read":
                async with asyncio.timeout(READ_S):
                    while data := await asyncio.get_running_loop().sock_recv(calls, MB):
                        answers += data
            else:
                calls.shutdown(socket.SHUT_WR if step.how == "shut_write" else socket.SHUT_RD)
    may_mean_anything = any(isinstance(step, Bytes) or getattr(step, "cut", 0) for step in steps)
    while len(answers) >= LENGTH.size:
        (length,) = LENGTH.unpack_from(answers)
        answer = kvd_pb2.AnswerFrame.FromString(bytes(answers[LENGTH.size : LENGTH.size + length]))
        del answers[: LENGTH.size + length]
        assert answer.code not in NEVER, answer
        assert answer.number in numbers or may_mean_anything, answer


def _on_the_wire(engine: RawEngine, step: Frame) -> bytes:
    call = kvd_pb2.CallFrame()
    call.CopyFrom(step.call)
    if step.message is not None:
        message = type(step.message)()
        message.CopyFrom(step.message)
        resolve(message, {"engine_id": [engine.engine_id]})
        call.request = message.SerializeToString()
    frame = call.SerializeToString()
    return (LENGTH.pack(len(frame)) + frame)[: 4 + len(frame) - step.cut]


@few(15)
@given(any_engines)
async def test_any_frames(fuzzed, engines):
    """Valid or not, whole or cut; the socket ends at any point, or the connection it belongs to."""
    await _play(fuzzed, engines)


@pytest.mark.long
@many(15)
@given(any_engines)
async def test_any_frames_long(fuzzed, engines):
    """Run the same for minutes."""
    await _play(fuzzed, engines)


async def test_an_engine_that_reads_no_answers(fuzzed):
    """Is not read any further, while others are served."""
    kvd, engine = fuzzed
    call = kvd_pb2.CallFrame(number=1, method="/kvd.v1.Engine/None")
    frame = call.SerializeToString()
    wire = (LENGTH.pack(len(frame)) + frame) * 1000
    async with raw_engine(kvd.runtime_dir, small_layout()) as rogue:
        with await open_calls(rogue) as calls:
            sent = 0
            for _ in range(MOST_ROUNDS):
                sent_before = sent
                with suppress(BlockingIOError):
                    while True:
                        rest = wire[sent % len(wire) :]
                        sent += calls.send(rest)
                await still_serves(kvd, engine)
                if sent == sent_before:
                    break
            assert sent == sent_before, "kvd reads on, and keeps the answers"
            assert sent < 4 * MB
    await still_serves(kvd, engine)
