"""Sessions with one prompt in the real pair: it is copied in memory, or loaded from kvd."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from tests.inference_processes import InferenceProcess, wait_kvd_state, wait_saved
from tests.oracle import Oracle
from tests.processes import running_kvd

GREEDY = pb.Sampling(max_tokens=12, ignore_eos=True)
SYSTEM = [5 + number * 11 % 400 for number in range(700)]  # several blocks, and a part of one
NUM_SESSIONS = 8


async def test_a_prompt_that_sessions_share_is_computed_once(tiny_model):
    """It is copied in memory.

    After a restart each session finds in kvd what another has computed.
    """
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    flags = ("--residents", "--load-policy", "always")
    async with (
        running_kvd(directory / "kvd", "--dram", "64MB", "--ssd", "64MB") as kvd,
        InferenceProcess(tiny_model, directory, kvd.runtime_dir, flags) as service,
    ):
        async with service.client() as client:
            await wait_kvd_state(client, "attached")
            await _submit(client, "first", SYSTEM)
            turns = [_submit(client, f"s{i}", [*SYSTEM, 9 + i, 8]) for i in range(NUM_SESSIONS)]
            for result in await asyncio.gather(*turns):
                assert dict(result.usage.tier_tokens) == {"hbm": len(SYSTEM)}
            counters = (await client.get_model()).counters
            assert counters["prefixes_shared"] == NUM_SESSIONS
            await wait_saved(client)
        await _come_back(service, Oracle(tiny_model))
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    "working_kv", ["pages", pytest.param("contiguous", marks=pytest.mark.long)]
)
async def test_simultaneous_sessions_compute_one_prompt_once(tiny_model, working_kv):
    """The first of them computes it for all; kvd has the whole of each."""
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    flags = ("--residents", "--load-policy", "always")
    environ = {"INFERENCE_SCHEDULER__WORKING_KV": working_kv}
    async with (
        running_kvd(directory / "kvd", "--dram", "64MB", "--ssd", "64MB") as kvd,
        InferenceProcess(tiny_model, directory, kvd.runtime_dir, flags, environ) as service,
    ):
        async with service.client() as client:
            await wait_kvd_state(client, "attached")
            turns = [_submit(client, f"s{i}", [*SYSTEM, 9 + i, 8]) for i in range(NUM_SESSIONS)]
            results = await asyncio.gather(*turns)
            first, *others = sorted(result.usage.tier_tokens["hbm"] for result in results)
            assert first == 0
            assert len(SYSTEM) - 128 < others[0] <= others[-1] <= len(SYSTEM)
            counters = (await client.get_model()).counters
            assert counters["prefixes_shared"] == NUM_SESSIONS - 1
            await wait_saved(client)
        await _come_back(service, Oracle(tiny_model))
    shutil.rmtree(directory)


async def _come_back(service, oracle):
    """Check that all is loaded from kvd after a restart of the service, and right."""
    await service.stop()
    await service.start()
    async with service.client() as client:
        await wait_kvd_state(client, "attached")
        for i in range(NUM_SESSIONS):
            usage = (await _submit(client, f"s{i}", "And then?")).usage
            assert usage.recomputed_tokens == 0
            assert dict(usage.tier_tokens) == {"dram": usage.history_tokens}
            session = await client.get_session(f"s{i}", with_turns=True)
            turns = [(list(r.input_ids), list(r.output_ids)) for r in session.turn_records]
            assert oracle.judge(turns).is_identical


async def _submit(client, session_id, given):
    return await client.submit(turn_request(given, session_id, sampling=GREEDY))
