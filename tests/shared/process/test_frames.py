"""Frames over real sockets, on each event loop: the processes use uvloop, whose sockets differ."""

import asyncio
import socket
import struct

import pytest

from shared.process.frames import FrameStream
from tests.shared.serving.listening_server import on_each_loop
from tests.until import until

MOST = 2 << 20  # bytes of a frame
MB = 1 << 20
ENOUGH = 100  # turns of the loop, in which whatever was to happen has happened
TOO_LONG = struct.pack("<I", MOST + 1)


class Side:
    """A stream, and what has arrived on it; `on_frame` is called with each frame."""

    def __init__(self, *, is_patient=False):
        self.arrived = []
        self.on_frame = lambda frame: None
        self.stream = FrameStream(self._take, MOST, is_patient=is_patient)

    def _take(self, frame):
        self.arrived.append(frame)
        self.on_frame(frame)


def on_the_wire(*frames):
    """Return the bytes of frames."""
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


def pair_of_sockets():
    """Return two ends that do not block."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setblocking(False)
    return ends


async def one_side(*, is_patient=False):
    """Return a stream and the bare other end of its socket."""
    side = Side(is_patient=is_patient)
    ours, other = pair_of_sockets()
    await side.stream.open(ours)
    return side, other


async def two_sides():
    """Return two connected streams."""
    sides = Side(), Side()
    for side, end in zip(sides, pair_of_sockets(), strict=True):
        await side.stream.open(end)
    return sides


async def until_closed(other):
    """Wait until the end of a bare socket, and close it."""
    async with asyncio.timeout(30):
        while await asyncio.get_running_loop().sock_recv(other, MB):
            pass
    other.close()


@on_each_loop
async def test_frames_arrive_whole_and_in_order():
    """Empty, small and large ones, in both directions; large ones in many parts."""
    frames = [b"", b"a", b"", bytes(range(256)) * (MB // 256), b"last", b"x" * MOST]
    a, b = await two_sides()
    for frame in frames:
        a.stream.send(frame)
        b.stream.send(frame[::-1])
    await until(lambda: len(b.arrived) == len(a.arrived) == len(frames))
    assert b.arrived == frames
    assert a.arrived == [frame[::-1] for frame in frames]
    a.stream.close()
    await b.stream.ended


@on_each_loop
async def test_many_frames_come_in_one_read():
    """Each is delivered, without another byte having to arrive."""
    side, other = await one_side()
    frames = [str(number).encode() for number in range(1000)]
    other.send(on_the_wire(*frames))
    await until(lambda: len(side.arrived) == len(frames))
    assert side.arrived == frames
    side.stream.close()
    await until_closed(other)


@on_each_loop
async def test_frames_may_be_cut_anywhere():
    """In the middle of a length, too: what has come is kept until the rest comes."""
    frames = [b"", b"first", b"second"]
    wire = on_the_wire(*frames)
    for cut in range(1, len(wire)):
        side, other = await one_side()
        other.send(wire[:cut])
        whole = [on_the_wire(*frames[:n]) for n in range(1, len(frames) + 1)]
        complete = sum(len(begin) <= cut for begin in whole)
        left = cut - len(on_the_wire(*frames[:complete]))
        await until(
            lambda side=side, seen=(complete, left): (
                (len(side.arrived), len(side.stream._received)) == seen
            )
        )
        other.send(wire[cut:])
        await until(lambda side=side: len(side.arrived) == len(frames))
        assert side.arrived == frames, cut
        side.stream.close()
        await until_closed(other)


@on_each_loop
async def test_a_frame_that_is_too_long_ends_the_stream():
    """By its length alone; frames before it are delivered, and the fault is told."""
    side, other = await one_side()
    other.send(on_the_wire(b"before") + TOO_LONG)
    await side.stream.ended
    assert side.arrived == [b"before"]
    assert side.stream.fault == f"a frame of {MOST + 1} bytes, more than {MOST}"
    await until_closed(other)


@on_each_loop
async def test_the_end_is_told_to_both_sides():
    """Whoever closes; frames sent afterwards are lost, and that is no error and no fault."""
    for closing in (0, 1):
        sides = await two_sides()
        sides[closing].stream.close()
        sides[closing].stream.send(b"after the end")
        for side in sides:
            await side.stream.ended
            side.stream.send(b"long after the end")
            side.stream.close()
        assert [side.arrived for side in sides] == [[], []]
        assert [side.stream.fault for side in sides] == ["", ""]


@on_each_loop
async def test_nothing_is_delivered_after_a_close():
    """Though it came in the same read as the frame for which the stream was closed."""
    side, other = await one_side()
    side.on_frame = lambda frame: frame == b"end" and side.stream.close()
    other.send(on_the_wire(b"first", b"end", b"more", b"end"))
    await side.stream.ended
    assert side.arrived == [b"first", b"end"]
    await until_closed(other)


@on_each_loop
async def test_a_patient_side_reads_no_more_than_it_can_answer():
    """While the other side does not read; then both go on, and nothing is lost."""
    side, other = await one_side(is_patient=True)
    side.on_frame = side.stream.send
    question = on_the_wire(b"q" * 1020)
    num_questions = 16 * MB // len(question)
    unsent = memoryview(question * num_questions)
    transport = side.stream._transport
    while unsent and transport.is_reading():
        try:
            unsent = unsent[other.send(unsent[:MB]) :]
        except BlockingIOError:
            await asyncio.sleep(0)
    num_taken = len(side.arrived)
    for _ in range(ENOUGH):
        await asyncio.sleep(0)
    assert len(side.arrived) == num_taken
    assert len(unsent) > 8 * MB
    assert transport.get_write_buffer_size() < MB

    loop = asyncio.get_running_loop()
    sending = asyncio.create_task(loop.sock_sendall(other, unsent))
    num_bytes = 0
    async with asyncio.timeout(60):
        while num_bytes < num_questions * len(question):
            num_bytes += len(await loop.sock_recv(other, MB))
    await sending
    assert len(side.arrived) == num_questions
    assert transport.is_reading()
    side.stream.close()
    await until_closed(other)


@on_each_loop
async def test_a_patient_side_notices_that_the_other_has_gone():
    """Though it does not read at that moment."""
    side, other = await one_side(is_patient=True)
    while side.stream._transport.is_reading():
        side.stream.send(b"x" * MB)
    other.close()
    await side.stream.ended


@on_each_loop
async def test_a_cancelled_opening_leaves_no_socket():
    """However far it had come."""
    for num_turns in range(1, 5):
        side = Side()
        ours, other = pair_of_sockets()
        opening = asyncio.create_task(side.stream.open(ours))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        side.stream.close()
        await until_closed(other)
        await until(lambda ours=ours: ours.fileno() == -1)


@on_each_loop
async def test_only_stream_sockets_are_taken():
    """Another kind is an error, and is closed."""
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        with pytest.raises(ValueError, match="Stream"):
            await Side().stream.open(ours)
        assert ours.fileno() == -1
