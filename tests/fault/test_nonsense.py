"""A kvd with nonsensical answers costs a recomputation, and is used again once it is sane."""

import pytest

from shared.pb.kvd.v1 import kvd_pb2
from tests.hostile_kvd import hostile_kvd
from tests.sampled import sampled

pytestmark = pytest.mark.asyncio(loop_scope="session")


def hit(request, **changes):
    """Return a hit for all tokens, in one span per block, with some fields changed."""
    num_tokens = len(request.token_ids) // 4
    spans = [
        kvd_pb2.LoadSpan(
            slot_id=index,
            num_tokens=min(128, num_tokens - offset),
            token_offset=offset,
            tier=kvd_pb2.TIER_DRAM,
        )
        for index, offset in enumerate(range(0, num_tokens, 128))
    ]
    for field, value in changes.items():
        if hasattr(spans[-1], field):
            setattr(spans[-1], field, value)
    return kvd_pb2.PrepareLoadResponse(
        lookup=changes.get("lookup", kvd_pb2.LOOKUP_HIT),
        lease_id=changes.get("lease_id", 5),
        spans=changes.get("spans", spans),
        end_token=changes.get("end_token", num_tokens),
    )


def crash(request):
    """A servicer that raises."""
    raise RuntimeError("nonsense")


LIES = {
    "a slot outside the arena": lambda request: hit(request, slot_id=10**6),
    "rows outside the block": lambda request: hit(request, start=127),
    "a span in the wrong place": lambda request: hit(request, token_offset=3),
    "a span without tokens": lambda request: hit(request, num_tokens=0),
    "a hit without spans": lambda request: hit(request, spans=[]),
    "a hit without a lease": lambda request: hit(request, lease_id=0),
    "more tokens than asked for": lambda request: hit(request, end_token=10**9),
    "an answer that is none": lambda _: kvd_pb2.PrepareLoadResponse(lookup=99),
    "pending for ever": lambda request: hit(request, lookup=kvd_pb2.LOOKUP_PENDING),
    "a lease it forgets": hit,
    "an exception": crash,
}
# A malformed answer, an impossible one, and one that is revoked.
ALWAYS = ("a slot outside the arena", "an answer that is none", "a lease it forgets")


@pytest.mark.parametrize("lie", sampled(list(LIES), 4, seed=1, always=ALWAYS))
async def test_nonsense_is_a_miss(pair, oracle, lie):
    """The turn is answered by recomputing, the failure is counted."""
    name = "lied-to-" + "-".join(lie.split())
    async with hostile_kvd(pair.kvd.runtime_dir, LIES[lie]) as service:
        await pair.until_kvd_is("attached")
        before = await pair.counters()
        turns = [await pair.say(name, 100) for _ in range(2)]
        after = await pair.counters()
        assert service.num_loads >= 1
        verdict = await pair.verdict(oracle, name)
    await pair.until_kvd_is("detached")
    assert verdict.is_identical, verdict
    assert all(turn.usage.reused_tokens == 0 for turn in turns)
    assert turns[1].usage.recomputed_tokens == turns[1].usage.history_tokens > 0
    assert turns[1].usage.recompute_reason
    assert after["load_errors"] > before["load_errors"]
