"""Engines that report their queues to kvd: how long kvd keeps them, and which it refuses."""

import math
from pathlib import Path

import grpc
import pytest

from shared.kvd_client import queue_sender
from shared.pb.kvd.v1 import kvd_pb2
from tests.kvd_polling import eventually, reader_stats
from tests.processes import KvdProcess, running_kvd
from tests.synthetic_engine import SyntheticEngine, attached_engine, key_of

REFUSED = grpc.StatusCode.INVALID_ARGUMENT


async def jobs_of(kvd: KvdProcess, name: str) -> tuple[int, int]:
    """Return the jobs of an engine that wait and run, as operators see them."""
    for engine in (await reader_stats(kvd)).engines:
        if engine.name == name:
            return engine.queue_jobs, engine.running_jobs
    raise AssertionError(f"{name} is not attached")


def wait(engine: SyntheticEngine, *numbers: int) -> None:
    for number in numbers:
        engine.queue.on_wait((0, 0.0, number), key_of(f"s{number}"), 50)


class RawQueue:
    """A second stream of an engine, which replaces its own one."""

    def __init__(self, engine: SyntheticEngine) -> None:
        attachment = engine.client._attachment
        assert attachment is not None
        self.engine_id = attachment.engine_id
        self.stream = attachment.stub.PushQueue()

    async def report(self, sequence: int, numbers=(), **fields) -> kvd_pb2.QueueAck:
        waiting = kvd_pb2.QueueJobs(numbers=numbers, session_ids=[f"s{n}" for n in numbers])
        message = {"engine_id": self.engine_id, "waiting": waiting, **fields}
        await self.stream.write(kvd_pb2.QueueSnapshot(sequence=sequence, **message))
        ack = await self.stream.read()
        assert isinstance(ack, kvd_pb2.QueueAck)
        return ack


async def test_jobs_wait_run_and_leave(tmp_path: Path) -> None:
    """kvd soon has the scheduler's queue, with all changes at once."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir, name="a") as engine,
    ):
        wait(engine, *range(2000))
        await eventually(lambda: jobs_of(kvd, "a"), (2000, 0))
        for number in range(10):
            engine.queue.on_run(number, key_of(f"s{number}"))
        engine.queue.on_leave(1000)
        await eventually(lambda: jobs_of(kvd, "a"), (1989, 10))
        for number in range(2000):
            engine.queue.on_leave(number)
        await eventually(lambda: jobs_of(kvd, "a"), (0, 0))
        assert kvd.log().count('"level": "error"') == 0


async def test_kvd_has_the_head_of_a_long_queue(tmp_path: Path, monkeypatch) -> None:
    """It has as many jobs as it accepts; jobs that move up are reported."""
    monkeypatch.setenv("KVD_LIMITS__MAX_QUEUE_JOBS", "5")
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir, name="a") as engine,
    ):
        wait(engine, *range(50))
        engine.queue.on_run(60, key_of("r"))
        await eventually(lambda: jobs_of(kvd, "a"), (4, 1))
        engine.queue.on_leave(60)
        await eventually(lambda: jobs_of(kvd, "a"), (5, 0))
        for number in range(47):
            engine.queue.on_leave(number)
        await eventually(lambda: jobs_of(kvd, "a"), (3, 0))


async def test_a_kvd_that_comes_back_gets_the_whole_queue(tmp_path: Path) -> None:
    """Changes during its absence are included."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir, name="a") as engine,
    ):
        wait(engine, 1, 2, 3)
        await eventually(lambda: jobs_of(kvd, "a"), (3, 0))
        await kvd.kill()
        wait(engine, 4)
        engine.queue.on_leave(1)
        engine.queue.on_leave(2)
        await kvd.start()
        await engine.client.wait_attached(30)
        await eventually(lambda: jobs_of(kvd, "a"), (2, 0))


async def test_a_queue_ends_with_its_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of another engine stays."""
    monkeypatch.setattr(queue_sender, "RETRY_S", 0.5)
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir, name="a") as engine,
        attached_engine(kvd.runtime_dir, name="b") as other,
    ):
        wait(other, 1, 2)
        queue = RawQueue(engine)
        assert (await queue.report(1, [1, 2, 3], base_sequence=9)).send_full
        with pytest.raises(grpc.aio.AioRpcError) as refused:  # the digest does not match the jobs
            await queue.report(2, [1, 2, 3])
        assert refused.value.code() is REFUSED
        await eventually(lambda: jobs_of(kvd, "a"), (0, 0))
        await eventually(lambda: jobs_of(kvd, "b"), (2, 0))
        wait(engine, 5)
        await eventually(lambda: jobs_of(kvd, "a"), (1, 0))
        queue = RawQueue(engine)
        acknowledged = await queue.report(1)  # an empty one; the engine's own stream has ended
        assert not acknowledged.send_full
        assert await jobs_of(kvd, "a") == (0, 0)
        queue.stream.cancel()
        wait(engine, 6)  # it notices that its stream has ended, and opens another
        await eventually(lambda: jobs_of(kvd, "a"), (2, 0))


NONSENSE = {
    "a job twice": {"numbers": [1, 1]},
    "too many jobs": {"numbers": range(11)},
    "a job that is and is not": {"numbers": [1], "left": [1], "base_sequence": 1},
    "no tag": {"waiting": kvd_pb2.QueueJobs(numbers=[1], session_ids=["a"], start_tags=[math.nan])},
    "no name": {"waiting": kvd_pb2.QueueJobs(numbers=[1], session_ids=["../a"])},
    "no length of time": {"start_interval_s": -1.0},
    "a sequence that goes back": {"sequence": 1},
    "another digest": {"digest": 5},
}


@pytest.mark.parametrize("fields", NONSENSE.values(), ids=NONSENSE.keys())
async def test_an_invalid_update_ends_its_stream(tmp_path: Path, monkeypatch, fields) -> None:
    """The error has a reason and a remedy; other engines' queues stay."""
    monkeypatch.setenv("KVD_LIMITS__MAX_QUEUE_JOBS", "10")
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir, name="a") as engine,
        attached_engine(kvd.runtime_dir, name="b") as other,
    ):
        wait(other, 1)
        await eventually(lambda: jobs_of(kvd, "b"), (1, 0))
        queue = RawQueue(engine)
        await queue.report(1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await queue.report(**{"sequence": 2, **fields})
        assert refused.value.code() is REFUSED
        assert ":" in refused.value.details()
        assert "\n" not in refused.value.details()
        assert await jobs_of(kvd, "b") == (1, 0)
        assert kvd.log().count('"level": "error"') == 0


async def test_a_queue_has_one_stream_and_one_engine(tmp_path: Path) -> None:
    """A second stream replaces the first; an engine that is not attached has none."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir, name="a") as engine,
        attached_engine(kvd.runtime_dir, name="b") as other,
    ):
        first, second = RawQueue(engine), RawQueue(engine)
        await first.report(1)
        await second.report(1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await first.report(2)
        assert refused.value.code() is grpc.StatusCode.ABORTED
        second.engine_id = RawQueue(other).engine_id
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await second.report(2)
        assert refused.value.code() is REFUSED
        stranger = RawQueue(engine)
        stranger.engine_id = 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stranger.report(1)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
