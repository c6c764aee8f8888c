"""Turns against the real service and a real kvd: which tokens are reused, and from which tier."""

import shutil
import tempfile
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from tests.inference_processes import InferenceProcess, wait_kvd_state
from tests.oracle import Oracle
from tests.processes import KvdProcess, running_kvd

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = pb.Sampling(max_tokens=24, ignore_eos=True)
TIERS = ("--dram", "64MB", "--ssd", "64MB")
DOCUMENT = [5 + number * 7 % 400 for number in range(300)]  # more than two blocks of tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tiny_model):
    """One kvd and one service for the tests that stop neither."""
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    async with (
        running_kvd(directory / "kvd", *TIERS) as kvd,
        InferenceProcess(tiny_model, directory, kvd.runtime_dir) as process,
    ):
        async with process.client() as client:
            await wait_kvd_state(client, "attached")
        yield process
    shutil.rmtree(directory)


@pytest_asyncio.fixture(loop_scope="module")
async def client(service):
    async with service.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return Oracle(tiny_model)


async def talk(client, session_id, num_turns, first=DOCUMENT):
    """Run a session whose first turn has a document; return its turns' results."""
    results = []
    for turn in range(num_turns):
        given = [*first, *map(ord, session_id)] if turn == 0 else f"And turn {turn}? "
        results.append(await client.submit(turn_request(given, session_id, sampling=GREEDY)))
    return results


async def judge(client, oracle, session_id):
    """Return whether every answer of the session is the stock model's."""
    session = await client.get_session(session_id, with_turns=True)
    verdict = oracle.judge(
        (list(record.input_ids), list(record.output_ids)) for record in session.turn_records
    )
    return verdict.is_identical


async def test_a_cancelled_turn_costs_no_history(client, oracle):
    """The next turn loads the history from before the cancelled one.

    If that filled the history's last block, it would be another block: here it has room for more
    than a hundred tokens.
    """
    await talk(client, "cancelled", 2, DOCUMENT[:200])
    request = turn_request("Long ", "cancelled", sampling=pb.Sampling(max_tokens=1000))
    async with aclosing(client.stream_turn(request)) as events:
        async for event in events:
            if event.WhichOneof("event") == "tokens":
                break
    request = turn_request("Next ", "cancelled", sampling=GREEDY, wait=True)
    result = await client.submit(request)
    assert result.accepted.turn == 2
    assert result.usage.recomputed_tokens == 0
    assert await judge(client, oracle, "cancelled")


async def test_history_before_a_stop_string_is_reused(client, oracle):
    """Tokens after the cut are not stored; the ones before it are not recomputed."""
    (plain,) = await talk(client, "uncut", 1, first=[4, *DOCUMENT])
    stop = plain.text[10:13]
    sampling = pb.Sampling(max_tokens=24, ignore_eos=True, stop=[stop])
    given = [4, *DOCUMENT, *map(ord, "uncut")]
    await client.submit(turn_request(given, "cut", sampling=sampling))
    result = await client.submit(turn_request("More? ", "cut", sampling=GREEDY))
    assert result.usage.recomputed_tokens == 0
    assert result.usage.reused_tokens > len(DOCUMENT)


async def test_a_final_turn_is_reported_to_kvd_and_its_repeat_is_replayed(client):
    """A replay computes nothing, whatever kvd has."""
    request = turn_request("Bye ", "final", sampling=GREEDY, request_id="bye", final=True)
    first, again = await client.submit(request), await client.submit(request)
    assert again.accepted.replayed
    assert again.finished == first.finished


async def test_a_restarted_service_reuses_what_kvd_kept(tiny_model, short_dir, oracle):
    """After SIGKILL of the service the next turn's history still comes from kvd."""
    async with running_kvd(short_dir / "kvd", *TIERS) as kvd:
        service = InferenceProcess(tiny_model, short_dir, kvd.runtime_dir)
        await service.start()
        try:
            async with service.client() as client:
                await wait_kvd_state(client, "attached")
                await talk(client, "kept", 2)
                # The answer does not wait for its save: a later turn that loads proves that it has
                # ended.
                await client.submit(turn_request("Third ", "kept", sampling=GREEDY))
            await service.kill()
            await service.start()
            async with service.client() as client:
                await wait_kvd_state(client, "attached")
                result = await client.submit(turn_request("Fourth ", "kept", sampling=GREEDY))
                assert result.usage.reused_tokens >= 256
                assert await judge(client, oracle, "kept")
        finally:
            await service.stop()


async def test_a_service_follows_kvds_starts_and_stops(tiny_model, short_dir, oracle):
    """Without kvd turns are recomputed with that reason; the service attaches when kvd runs."""
    kvd = KvdProcess(short_dir / "kvd", TIERS)
    async with (
        InferenceProcess(tiny_model, short_dir, kvd.runtime_dir) as service,
        service.client() as client,
    ):
        try:
            results = await talk(client, "alone", 2)
            assert results[1].usage.recompute_reason == "kvd_unavailable"
            assert results[1].usage.recomputed_tokens == results[1].usage.history_tokens
            await kvd.start()
            await wait_kvd_state(client, "attached")
            results = await talk(client, "together", 3)
            assert results[2].usage.recomputed_tokens == 0
            await kvd.kill()
            await wait_kvd_state(client, "detached")
            gone = await client.submit(turn_request("Gone? ", "together", sampling=GREEDY))
            assert gone.usage.recompute_reason == "kvd_unavailable"
            await kvd.start()
            await wait_kvd_state(client, "attached")
            back = await client.submit(turn_request("Back? ", "together", sampling=GREEDY))
            again = await client.submit(turn_request("Again? ", "together", sampling=GREEDY))
            assert back.finished.turns == 5
            assert again.usage.recomputed_tokens == 0
            for name in ("alone", "together"):
                assert await judge(client, oracle, name)
            counters = (await client.get_model()).counters
            assert counters["load_errors"] > 0
        finally:
            await kvd.stop()
