"""`kvd why` against a real daemon: its reasons for missed sessions."""

import json
from pathlib import Path
from typing import Any

import pytest

from inference_svc.client import turn_request
from kvd.core.state.session_history import REMOVALS
from kvd.views.misses import explain_miss
from shared.pb.inference.v1 import inference_pb2
from shared.pb.kvd.v1 import kvd_pb2
from tests.inference_processes import InferenceProcess, wait_kvd_state
from tests.kvd_polling import all_clean
from tests.processes import KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import attached_engine, key_of

GREEDY = inference_pb2.Sampling(max_tokens=8, ignore_eos=True)
NAMES = ("flushed", "other", "longer", "kept")
TOKENS = {name: list(range(100 * n, 100 * n + 50)) for n, name in enumerate(NAMES, 1)}


async def why(kvd: KvdProcess, session: str) -> Any:
    code, stdout, stderr = await run_cli(
        "why", session, "--json", "--runtime-dir", str(kvd.runtime_dir)
    )
    assert code == 0, stderr
    return json.loads(stdout)


async def test_sessions_that_were_missed(tmp_path: Path) -> None:
    """Flushed, with other tokens, longer than stored; and sessions that missed nothing."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB", "--ssd", "4MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        at = ("--runtime-dir", str(kvd.runtime_dir))
        for name in NAMES:
            await engine.store(key_of(name), TOKENS[name])
        assert (await run_cli("flush", "flushed", "--yes", *at))[0] == 0
        unasked = await why(kvd, "flushed")
        assert (unasked["reason"], unasked["gone"], unasked["stored_tokens"]) == ("", "flushed", 0)
        assert (await engine.load(key_of("flushed"), TOKENS["flushed"])).miss_reason == "flushed"
        assert not (await engine.load(key_of("other"), [7, *TOKENS["other"]])).num_tokens
        await engine.load(key_of("longer"), [*TOKENS["longer"], *range(30)])
        await engine.load(key_of("kept"), TOKENS["kept"])
        found = {name: await why(kvd, name) for name in NAMES}
        code, text, _ = await run_cli("why", "other", *at)
        unknown = await run_cli("why", "nobody", *at)
    reasons = {name: (one["reason"], one["missed_tokens"]) for name, one in found.items()}
    assert reasons == {
        "flushed": ("flushed", 50),
        "other": ("tokens_differ", 51),
        "longer": ("not_stored", 30),
        "kept": ("", 0),
    }
    assert found["other"]["stored_tokens"] == 50
    assert found["flushed"]["session"]["session_id"] == "flushed"
    assert code == 0
    assert "inference-svc why" in text
    assert unknown[0] == 3


@pytest.mark.parametrize(
    "reason", ["evicted", "expired", "flushed", "discarded", "corrupt", "of_tomorrow"]
)
def test_each_reason_has_a_remedy(reason: str) -> None:
    """A reason of another release is shown as well."""
    missed = kvd_pb2.SessionMove(kind="missed", why=reason, num_tokens=9, age_s=5)
    found = explain_miss(kvd_pb2.DescribeSessionResponse(history=[missed]))
    assert (found.reason, found.missed_tokens) == (reason, 9)
    assert found.remedy
    assert any("9 tokens" in text for _, text in found.lines())


def test_the_reason_for_which_a_session_was_dropped() -> None:
    """It is shown even if no load has asked for it since."""
    for kind in REMOVALS:
        gone = kvd_pb2.SessionMove(kind=kind.value, why="evicted", age_s=60)
        found = explain_miss(kvd_pb2.DescribeSessionResponse(history=[gone]))
        assert found.gone in {"evicted", "expired", "flushed"}
        assert found.remedy


async def test_discarded_tokens_are_a_reason(tiny_model: Path, short_dir: Path) -> None:
    """A fork from before the discard: its turn gives the reason, and so do both commands."""
    async with (
        running_kvd(short_dir / "kvd", "--dram", "64MB", "--ssd", "64MB") as kvd,
        InferenceProcess(tiny_model, short_dir, kvd.runtime_dir) as service,
        service.client() as client,
    ):
        await wait_kvd_state(client, "attached")
        document = [5 + number * 7 % 400 for number in range(400)]  # three blocks, and more
        await client.submit(turn_request(document, "a", sampling=GREEDY))
        await all_clean(kvd)
        await client.fork_session("a", new_session_id="before")
        await client.discard("a", ranges=[(128, 256)])
        turn = await client.submit(turn_request("More ", "a", sampling=GREEDY))
        assert (turn.usage.recompute_reason, turn.usage.recomputed_tokens) == ("", 0)
        fork = await client.submit(turn_request("More ", "before", sampling=GREEDY))
        assert fork.usage.recompute_reason == "discarded"
        assert fork.usage.reused_tokens == 128
        told = await why(kvd, "before")
        explained_turn = await client.explain_miss("before")
    assert told["reason"] == "discarded"
    # its new tokens were requested, too
    assert told["missed_tokens"] >= fork.usage.recomputed_tokens
    assert "discarded" in told["told"]
    assert "forks" in told["remedy"]
    assert explained_turn.miss.cause == "discarded"
    assert "discarded" in explained_turn.told
