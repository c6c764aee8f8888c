"""A hybrid model: its recurrent states are stored where conversations turn, and reused there.

Answers are judged as everywhere, by the stock model over the whole transcript.
"""

import asyncio

import pytest
import pytest_asyncio

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2
from tests.models import build_hybrid_model, narrow_model
from tests.oracle import Oracle
from tests.pair import Pair, resident_pair

pytestmark = pytest.mark.asyncio(loop_scope="module")

NARROW_TOKENS = 400
SLOT_BYTES = 2 * 64 * 1024  # two layers have keys and values
SYSTEM = inference_pb2.ChatMessage(role="system", content="Be brief, keep keys in blocks. " * 4)


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory):
    return build_hybrid_model(tmp_path_factory.mktemp("model") / "hybrid")


@pytest.fixture(scope="module")
def oracle(hybrid_model):
    return Oracle(hybrid_model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(hybrid_model, tmp_path_factory):
    """A service that keeps nothing in memory: what a turn reuses comes from kvd."""
    pair = Pair(hybrid_model, tmp_path_factory.mktemp("hybrid-pair"))
    async with pair.service:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def resident(hybrid_model, tmp_path_factory):
    """A service whose sessions stay in memory, which is too small for four of them."""
    pair = resident_pair(hybrid_model, tmp_path_factory.mktemp("hybrid-residents"))
    async with pair.service:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(hybrid_model, tmp_path_factory):
    """The same model with a small window."""
    directory = tmp_path_factory.mktemp("hybrid-narrow")
    pair = Pair(narrow_model(hybrid_model, directory / "model", NARROW_TOKENS), directory)
    async with pair.service:
        yield pair


def question(text, *before):
    return [*before, inference_pb2.ChatMessage(role="user", content=text)]


async def test_turns_begin_with_the_state_of_the_turn_before(pair, oracle):
    """Nothing of the history is computed again, wherever in a block a turn has ended."""
    async with pair.with_kvd("--dram", "16MB"):
        turns = [await pair.say("long", 40 + 37 * turn) for turn in range(6)]
        verdict = await pair.verdict(oracle, "long")
    assert verdict.is_identical, verdict
    for turn in turns[1:]:
        usage = turn.usage
        assert usage.reused_tokens == usage.history_tokens > 0
        assert usage.recomputed_tokens == 0


async def test_sessions_beside_each_other_have_states_of_their_own(pair, oracle):
    """Of unequal lengths, in the same steps."""
    async with pair.with_kvd("--dram", "16MB"):

        async def talk(name, number):
            return [await pair.say(name, 30 + 50 * number + 20 * turn) for turn in range(4)]

        names = [f"talk-{number}" for number in range(4)]
        spoken = await asyncio.gather(*(talk(name, n) for n, name in enumerate(names)))
        verdicts = [await pair.verdict(oracle, name) for name in names]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    for turns in spoken:
        assert all(t.usage.reused_tokens == t.usage.history_tokens for t in turns)


async def test_a_fork_goes_on_from_the_newest_state_before_it(pair, oracle):
    """At the parent's last turn there is one; at an earlier one it may be gone, and is computed."""
    async with pair.with_kvd("--dram", "16MB"):
        for _ in range(4):
            await pair.say("parent", 90)
        await pair.until_saved()
        async with pair.service.client() as client:
            for turns in (4, 2):
                await client.fork_session(pair.name("parent"), turns, pair.name(f"fork-{turns}"))
        late, early = await pair.say("fork-4"), await pair.say("fork-2")
        onward = [await pair.say(name) for name in ("parent", "fork-4", "fork-2")]
        names = ("parent", "fork-4", "fork-2")
        verdicts = [await pair.verdict(oracle, name) for name in names]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    assert late.usage.recomputed_tokens == 0
    assert 0 < early.usage.reused_tokens < early.usage.history_tokens
    assert all(turn.usage.recomputed_tokens == 0 for turn in onward)


async def test_states_outlive_both_processes_and_lie_on_ssd(pair, oracle):
    """DRAM for less than a session's blocks: they come from SSD, after restarts of either."""
    async with pair.with_kvd("--dram", str(6 * SLOT_BYTES), "--ssd", "64MB", keep="file"):
        for _ in range(2):
            for name in ("a", "b"):
                await pair.say(name, 200)
                await pair.until_saved()
        await pair.kvd.kill()
        await pair.kvd.start()
        await pair.until_kvd_is("attached")
        after_kvd = [await pair.say(name, 200) for name in ("a", "b")]
        await pair.until_saved()
        await pair.service.kill()
        await pair.service.start()
        await pair.until_kvd_is("attached")
        after_service = [await pair.say(name, 50) for name in ("a", "b")]
        verdicts = [await pair.verdict(oracle, name) for name in ("a", "b")]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    usages = [turn.usage for turn in (*after_kvd, *after_service)]
    assert all(usage.reused_tokens == usage.history_tokens > 0 for usage in usages)
    assert any(usage.tier_tokens["ssd"] for usage in usages)


async def test_without_kvd_all_is_computed(pair, oracle):
    """Nothing fails, and the next turns store again."""
    async with pair.with_kvd("--dram", "16MB"):
        await pair.say("s", 80)
        await pair.until_saved()
        await pair.kvd.kill()
        await pair.until_kvd_is("detached")
        alone = await pair.say("s", 80)
        await pair.kvd.start()
        await pair.until_kvd_is("attached")
        back = await pair.say("s", 80)
        again = await pair.say("s", 80)
        verdict = await pair.verdict(oracle, "s")
    assert verdict.is_identical, verdict
    assert alone.usage.recomputed_tokens == alone.usage.history_tokens
    assert back.usage.recomputed_tokens > 0
    assert again.usage.recomputed_tokens == 0


async def test_a_chat_whose_answer_is_said_again_goes_on_before_it(pair, oracle):
    """The state before the prompt for the answer is there; what conversations begin with, too."""
    async with pair.with_kvd("--dram", "16MB"):
        sampling = inference_pb2.Sampling(max_tokens=12, ignore_eos=True)
        for name in ("one", "two"):
            asked = turn_request(
                question("What is a block?", SYSTEM), pair.name(name), sampling=sampling
            )
            first = await pair.submit(asked)
            await pair.until_saved()
        other = turn_request(question("Why?", SYSTEM), pair.name("three"), sampling=sampling)
        third = await pair.submit(other)
        counters = await pair.counters()
        stats = await pair.stats()
        verdicts = [await pair.verdict(oracle, name) for name in ("one", "two", "three")]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    assert counters["loaded_states"] >= 2
    assert stats.counters["load_tokens_dram"] > 0
    assert first.token_ids != third.token_ids


async def test_residents_are_built_on_as_a_whole(resident, oracle):
    """Sessions in memory, preempted ones, and those that had to go."""
    async with resident.with_kvd("--dram", "16MB"):
        names = ("a", "b", "c", "d")
        turns = []
        for _ in range(3):
            turns += await asyncio.gather(*(resident.say(name, 150) for name in names))
        verdicts = [await resident.verdict(oracle, name) for name in names]
        counters = await resident.counters()
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    assert counters["resident_hits"] > 0
    assert all(turn.usage.recomputed_tokens == 0 for turn in turns)


async def test_an_overflow_computes_what_it_keeps(narrow, oracle):
    """Behind the first dropped token nothing is of use: it goes on from the state before that."""
    async with narrow.with_kvd("--dram", "16MB"):
        sampling = inference_pb2.Sampling(max_tokens=12, ignore_eos=True)
        turns = []
        for number in range(8):
            before = (SYSTEM,) if number == 0 else ()
            request = turn_request(
                question("What is kept of a block? " * 4, *before),
                narrow.name("s"),
                sampling=sampling,
            )
            turns.append(await narrow.submit(request))
        session = await narrow.session("s")
    verdict = await asyncio.to_thread(oracle.judge_coupled, session)
    assert verdict.is_identical, verdict
    dropped = [turn.usage for turn in turns if turn.usage.dropped_tokens]
    assert dropped
    for usage in dropped:
        assert usage.recomputed_tokens > 0
        assert usage.reused_tokens > 0, "the system message has a state behind it"
