"""kvd is notified of the end of a session, whatever happens to its last turn."""

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from tests.inference_processes import InferenceProcess, wait_kvd_state
from tests.kvd_polling import all_clean, eventually, reader_stats, sessions_of
from tests.processes import KvdProcess, running_kvd

GREEDY = pb.Sampling(max_tokens=8, ignore_eos=True)
DOCUMENT = [5 + number * 7 % 400 for number in range(300)]  # more than two blocks of tokens


async def ended_sessions(kvd: KvdProcess) -> set[str]:
    return {info.session.session_id for info in await sessions_of(kvd) if info.ended}


async def num_jobs(kvd: KvdProcess) -> int:
    return sum(e.queue_jobs + e.running_jobs for e in (await reader_stats(kvd)).engines)


async def test_kvd_is_told_how_long_a_session_is_kept(tiny_model, short_dir):
    """It is told after each turn.

    A turn without a retention keeps the old one, the end clears it.
    """
    async with (
        running_kvd(short_dir / "kvd", "--dram", "64MB", "--ssd", "64MB") as kvd,
        InferenceProcess(tiny_model, short_dir, kvd.runtime_dir) as service,
        service.client() as client,
    ):

        async def retention():
            return [(info.retain_s, info.ended) for info in await sessions_of(kvd)]

        await wait_kvd_state(client, "attached")
        wish = pb.Retention(session_s=600)
        await client.submit(turn_request(DOCUMENT, "a", sampling=GREEDY, retention=wish))
        await eventually(retention, [(600, False)])
        await client.submit(turn_request("More ", "a", sampling=GREEDY))
        await all_clean(kvd)
        assert await retention() == [(600, False)]
        longer = pb.Retention(session_s=1200)
        bye = turn_request("Bye ", "a", sampling=GREEDY, retention=longer, final=True)
        await client.submit(bye)
        await eventually(retention, [(0, True)])


async def test_kvd_is_notified_of_ends_at_once_or_when_it_is_back(tiny_model, short_dir):
    """When the last turn has ended, its job is removed from kvd's queue as well."""
    async with (
        running_kvd(short_dir / "kvd", "--dram", "64MB", "--ssd", "64MB") as kvd,
        InferenceProcess(tiny_model, short_dir, kvd.runtime_dir) as service,
        service.client() as client,
    ):
        await wait_kvd_state(client, "attached")
        for name in ("here", "away", "goes on"):
            first = [*DOCUMENT, *map(ord, name)]
            await client.submit(turn_request(first, name.replace(" ", "-"), sampling=GREEDY))
        await client.submit(turn_request("Bye ", "here", sampling=GREEDY, final=True))
        await eventually(lambda: ended_sessions(kvd), {"here"})
        await eventually(lambda: num_jobs(kvd), 0)
        await all_clean(kvd)
        await kvd.kill()
        await wait_kvd_state(client, "detached")
        await client.submit(turn_request("Bye ", "away", sampling=GREEDY, final=True))
        await kvd.start()
        await wait_kvd_state(client, "attached")
        await eventually(lambda: ended_sessions(kvd), {"here", "away"})
        await client.end_session("goes-on")
        await eventually(lambda: ended_sessions(kvd), {"here", "away", "goes-on"})
