"""Blocks on SSD are read while the text of their session's next turn is still being encoded."""

from contextlib import asynccontextmanager

import pytest

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import InvalidInputError
from tests.inference_processes import InferenceProcess, wait_kvd_state, wait_saved
from tests.kvd_polling import all_clean, eventually, reader_stats, sessions_of
from tests.processes import KvdProcess

GREEDY = pb.Sampling(max_tokens=8, ignore_eos=True)
DOCUMENT = [5 + number * 7 % 400 for number in range(300)]  # more than two blocks of tokens
TOO_LONG = "Keys and values are kept. " * 4_000  # 104 kB, whose encoding takes a while
TIERS = ("--dram", "64MB", "--ssd", "64MB")


async def counts(kvd, *names):
    stats = await reader_stats(kvd)
    return tuple(sum(layout.counters[name] for layout in stats.layouts) for name in names)


async def waiting(kvd):
    """Return how many waiting turns have been reported to kvd."""
    return [layout.queue.waiting_jobs for layout in (await reader_stats(kvd)).layouts]


async def stored_sessions(kvd):
    return [info.session.session_id for info in await sessions_of(kvd)]


@asynccontextmanager
async def on_ssd(model, directory, *flags):
    """Run a pair whose kvd has a session "a" on SSD only; the service has none of it."""
    kvd = KvdProcess(directory / "kvd", (*TIERS, *flags), keep="none")
    service = InferenceProcess(model, directory, kvd.runtime_dir)
    await kvd.start()
    try:
        async with service, service.client() as client:
            await wait_kvd_state(client, "attached")
            await client.submit(turn_request(DOCUMENT, "a", sampling=GREEDY))
            await wait_saved(client)  # a block that is not stored yet is not dirty, either
            await all_clean(kvd)
            await kvd.stop()
            # Not attached earlier: when it attaches, kvd reads ahead for turns that already wait,
            # without
            # knowing their arrival, and does not count them.
            await wait_kvd_state(client, "detached")
            await kvd.start()
            await wait_kvd_state(client, "attached")
            yield kvd, client
    finally:
        await kvd.stop()


async def submit_refused_turn(kvd, client):
    """Submit a turn that is reported to kvd and then refused: its text is too long.

    A turn that ends before a newly started kvd gets the queue is not reported; then another one is
    submitted. Waiting would not help for a turn that is reported otherwise.
    """
    returns = ("returns_ssd", "returns_dram", "returns_gone")
    while not any(found := await counts(kvd, *returns)):
        assert await stored_sessions(kvd) == ["a"]
        with pytest.raises(InvalidInputError, match="tokens"):
            await client.submit(turn_request(TOO_LONG, "a", sampling=GREEDY))
    assert found == (1, 0, 0)


async def test_ssd_is_read_for_a_turn_that_is_still_being_encoded(tiny_model, short_dir):
    """The turn turns out too long and stops waiting.

    The next turn uses the blocks that were read.
    """
    async with on_ssd(tiny_model, short_dir) as (kvd, client):
        await submit_refused_turn(kvd, client)
        await eventually(lambda: counts(kvd, "returns_ssd", "prefetch_blocks"), (1, 3))
        await eventually(lambda: waiting(kvd), [0])
        turn = await client.submit(turn_request("More ", "a", sampling=GREEDY))
        assert turn.usage.recomputed_tokens == 0
        assert dict(turn.usage.tier_tokens) == {"dram": turn.usage.history_tokens}
        # Whether that turn was reported before it began depends on when queues are reported.
        assert await counts(kvd, "returns_ssd", "returns_gone") == (1, 0)


async def test_a_policy_without_look_ahead_reads_nothing_ahead(tiny_model, short_dir):
    """It ignores the queue."""
    settings = short_dir / "kvd.toml"
    settings.write_text('[eviction]\npolicy = "lru"\n')
    async with on_ssd(tiny_model, short_dir, "--config", str(settings)) as (kvd, client):
        await submit_refused_turn(kvd, client)
        assert await counts(kvd, "prefetch_blocks") == (0,)
        turn = await client.submit(turn_request("More ", "a", sampling=GREEDY))
        assert dict(turn.usage.tier_tokens) == {"ssd": turn.usage.history_tokens}
