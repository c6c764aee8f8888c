"""Models with layers of which few places are stored: recurrent states, and windows. ¶ Models

that compress several tokens into an entry are included: the rest is a state. All are served alike,
    and judged by the stock model over the whole transcript.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2
from tests.integration.overflowing import identical
from tests.models import (
    ATTENTION_WINDOW,
    build_compressing_model,
    build_hybrid_model,
    build_windowed_model,
    narrow_model,
)
from tests.oracle import Oracle
from tests.pair import BLOCK_TOKENS, Pair, resident_pair
from tests.truncation_oracle import TruncationOracle

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOT_BYTES = 2 * 64 * 1024  # of models with two layers of full attention
NUM_PARTS = 2  # slots per window
NARROW_TOKENS = 512
DRAM = ("--dram", "16MB")
SYSTEM = inference_pb2.ChatMessage(role="system", content="Be brief, keep keys in blocks. " * 4)
LONG_SYSTEM = inference_pb2.ChatMessage(
    role="system", content="Be brief, keep keys in blocks. " * 20
)


@dataclass(frozen=True)
class Family:
    """A model, and a memory size (slots, bytes) in which fewer than two of its sessions fit."""

    build: Callable[[Path], Path]
    few_slots: int
    slot_bytes: int = SLOT_BYTES


FAMILIES = {
    "states": Family(build_hybrid_model, 6),
    "windows": Family(build_windowed_model, 14),
    "entries": Family(build_compressing_model, 6, 68 * 1024),
}
LONG = {name: pytest.param(name, marks=pytest.mark.long) for name in ("windows", "entries")}
sampled_family = pytest.mark.parametrize(
    "family", ["states", LONG["windows"], LONG["entries"]], indirect=True
)
with_states = pytest.mark.parametrize("family", ["states", LONG["entries"]], indirect=True)
with_windows = pytest.mark.parametrize("family", ["windows"], indirect=True)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family, tmp_path_factory):
    return family.build(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(model, tmp_path_factory):
    """Run a service that keeps no sessions in memory: reused tokens come from kvd."""
    pair = Pair(model, tmp_path_factory.mktemp("pair"))
    async with pair.service:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def resident(model, tmp_path_factory):
    """Run a service whose sessions stay in memory, which is too small for four of them."""
    pair = resident_pair(model, tmp_path_factory.mktemp("residents"))
    async with pair.service:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(model, tmp_path_factory):
    """Run the same model with a small context window."""
    directory = tmp_path_factory.mktemp("narrow")
    pair = Pair(narrow_model(model, directory / "model", NARROW_TOKENS), directory)
    async with pair.service:
        yield pair


def question(text, *before):
    return [*before, inference_pb2.ChatMessage(role="user", content=text)]


# ------------------------------------------------------------------------------------------- both


@pytest.mark.long
async def test_sessions_beside_each_other_are_kept_apart(pair, oracle):
    """They have unequal lengths, in the same steps."""
    async with pair.with_kvd(*DRAM):

        async def talk(name, number):
            return [await pair.say(name, 30 + 50 * number + 20 * turn) for turn in range(4)]

        names = [f"talk-{number}" for number in range(4)]
        spoken = await asyncio.gather(*(talk(name, n) for n, name in enumerate(names)))
        verdicts = [await pair.verdict(oracle, name) for name in names]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    for turns in spoken:
        assert all(t.usage.reused_tokens == t.usage.history_tokens for t in turns)


@sampled_family  # tests/integration/test_kvd_windows.py has windows on SSD
async def test_sessions_survive_both_processes_and_come_from_ssd(pair, oracle, family):
    """DRAM holds fewer than two sessions: they come from SSD, after restarts of either process."""
    dram = str(family.few_slots * family.slot_bytes)
    async with pair.with_kvd("--dram", dram, "--ssd", "64MB", keep="file"):
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


@sampled_family
async def test_without_kvd_everything_is_recomputed(pair, oracle):
    """No turn fails, and later turns store again."""
    async with pair.with_kvd(*DRAM):
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


@sampled_family  # tests/fault/test_random_scenes.py has residents with windows
async def test_residents_are_reused_where_possible(resident, oracle):
    """Sessions in memory, with loaded, preempted and evicted ones among them."""
    async with resident.with_kvd(*DRAM):
        names = ("a", "b", "c", "d")
        turns = []
        for _ in range(4):
            turns += await asyncio.gather(*(resident.say(name, 150) for name in names))
        verdicts = [await resident.verdict(oracle, name) for name in names]
        counters = await resident.counters()
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    assert counters["resident_hits"] > 0
    assert all(turn.usage.recomputed_tokens == 0 for turn in turns)


# ----------------------------------------------------------------------------------------- states


@with_states
async def test_turns_begin_with_the_state_of_the_previous_turn(pair, oracle):
    """No token of the history is recomputed, wherever in a block a turn has ended."""
    async with pair.with_kvd(*DRAM):
        turns = [await pair.say("long", 40 + 37 * turn) for turn in range(6)]
        verdict = await pair.verdict(oracle, "long")
    assert verdict.is_identical, verdict
    for turn in turns[1:]:
        usage = turn.usage
        assert usage.reused_tokens == usage.history_tokens > 0
        assert usage.recomputed_tokens == 0


@with_states
async def test_a_fork_continues_from_the_newest_state_before_it(pair, oracle):
    """The parent's last turn has one; an earlier turn's may be gone, and is recomputed."""
    async with pair.with_kvd(*DRAM):
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


@with_states
async def test_a_regenerated_answer_continues_from_the_state_before_it(pair, oracle):
    """The state before the answer's prompt is stored, as is that of common beginnings."""
    async with pair.with_kvd(*DRAM):
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


@with_states
async def test_an_overflow_recomputes_the_kept_tokens(narrow, oracle):
    """States behind the first dropped token are useless: it continues from the one before."""
    async with narrow.with_kvd(*DRAM):
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


# ---------------------------------------------------------------------------------------- windows


@with_windows
async def test_turns_load_the_windows_of_their_last_tokens_only(pair, oracle):
    """No token is recomputed; of a long history most windows are neither stored nor loaded."""
    before = await pair.counters()
    async with pair.with_kvd(*DRAM):
        turns = [await pair.say("long", 150 + 37 * turn) for turn in range(7)]
        await pair.until_saved()
        verdict = await pair.verdict(oracle, "long")
        stored = await pair.stored("long")
        after = await pair.counters()
    assert verdict.is_identical, verdict
    for turn in turns[1:]:
        assert turn.usage.reused_tokens == turn.usage.history_tokens > 0
    loaded = after["loaded_window_tokens"] - before["loaded_window_tokens"]
    # bytes of a load: the window, and the layers beside it
    most = ATTENTION_WINDOW + 2 * BLOCK_TOKENS
    assert 0 < loaded <= most * (len(turns) - 1) < sum(turn.usage.reused_tokens for turn in turns)
    num_blocks = -(-stored.num_tokens // BLOCK_TOKENS)
    # Windows are stored for its beginning, and for its end.
    num_windows = 2 * -(-most // BLOCK_TOKENS)
    assert stored.bytes <= (num_blocks + NUM_PARTS * num_windows) * SLOT_BYTES
    assert stored.bytes < (1 + NUM_PARTS) * num_blocks * SLOT_BYTES


@with_windows
async def test_a_long_prompt_stores_windows_only_where_loads_may_end(pair, oracle):
    """Windows of the chunks in between are not stored."""
    before = await pair.counters()
    async with pair.with_kvd(*DRAM):
        first = await pair.say("once", 1500)
        second = await pair.say("once", 20)
        verdict = await pair.verdict(oracle, "once")
        after = await pair.counters()
    assert verdict.is_identical, verdict
    assert second.usage.reused_tokens == second.usage.history_tokens > 1500
    stored = after["stored_window_tokens"] - before["stored_window_tokens"]
    assert 0 < stored < first.usage.new_tokens / 2


@pytest.mark.long  # tests/fault/test_random_scenes.py has forks with windows
@with_windows
async def test_a_fork_continues_from_the_newest_window_before_it(pair, oracle):
    """The parent's last turn has one; an earlier turn's may be gone, and is recomputed."""
    async with pair.with_kvd(*DRAM):
        for _ in range(5):
            await pair.say("parent", 190)
        await pair.until_saved()
        async with pair.service.client() as client:
            for turns in (5, 3):
                await client.fork_session(pair.name("parent"), turns, pair.name(f"fork-{turns}"))
        late, early = await pair.say("fork-5"), await pair.say("fork-3")
        onward = [await pair.say(name) for name in ("parent", "fork-5", "fork-3")]
        names = ("parent", "fork-5", "fork-3")
        verdicts = [await pair.verdict(oracle, name) for name in names]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    assert late.usage.recomputed_tokens < BLOCK_TOKENS  # forks share whole blocks
    assert early.usage.reused_tokens < early.usage.history_tokens
    assert all(turn.usage.recomputed_tokens == 0 for turn in onward)


@with_windows
async def test_conversations_with_one_beginning_share_a_window(pair, oracle):
    """A load can end behind the common beginning, however long the first conversation is."""
    sampling = inference_pb2.Sampling(max_tokens=12, ignore_eos=True)
    async with pair.with_kvd(*DRAM):
        asked = turn_request(
            question("What is it?", LONG_SYSTEM), pair.name("one"), sampling=sampling
        )
        await pair.submit(asked)
        for _ in range(4):
            await pair.say("one", 150)
        await pair.until_saved()
        loaded = (await pair.stats()).counters["load_tokens_dram"]
        other = turn_request(question("Why?", LONG_SYSTEM), pair.name("two"), sampling=sampling)
        await pair.submit(other)
        stats = await pair.stats()
        verdicts = [await pair.verdict(oracle, name) for name in ("one", "two")]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    assert stats.counters["load_tokens_dram"] - loaded > BLOCK_TOKENS


@with_windows
async def test_a_long_answer_leaves_a_window_before_it(pair, oracle):
    """A regenerated answer, or a template that drops the thoughts, continues from there."""
    long = inference_pb2.Sampling(max_tokens=250, ignore_eos=True)
    short = inference_pb2.Sampling(max_tokens=4, ignore_eos=True)
    async with pair.with_kvd(*DRAM):
        asked = question("What is a block, and what is it for? " * 30, LONG_SYSTEM)
        first = await pair.submit(turn_request(asked, pair.name("one"), sampling=long))
        await pair.until_saved()
        loaded = (await pair.stats()).counters["load_tokens_dram"]
        await pair.submit(turn_request(asked, pair.name("two"), sampling=short))
        stats = await pair.stats()
        verdicts = [await pair.verdict(oracle, name) for name in ("one", "two")]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    again = stats.counters["load_tokens_dram"] - loaded
    assert again > first.usage.new_tokens - 2 * BLOCK_TOKENS > 2 * BLOCK_TOKENS


@with_windows
async def test_an_overflow_recomputes_nothing(narrow, model):
    """The kept history is longer than a window: its keys move, nothing is recomputed."""
    judge = TruncationOracle(model)
    async with narrow.with_kvd(*DRAM):
        turns = [await narrow.say("cut", 120) for _ in range(8)]
        await identical(narrow, judge, "cut")
    assert sum(bool(turn.usage.dropped_tokens) for turn in turns) >= 2
    assert all(turn.usage.recomputed_tokens == 0 for turn in turns)
