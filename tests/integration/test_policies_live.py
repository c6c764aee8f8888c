"""Eviction policies in the real pair, over tiers that are too small, rank as in the planner.

All sessions of a seeded trace begin at once, without pauses, and one turn runs at a time: there
always is a queue, and it determines the order of events, not the machine's speed. Answers are short
and prompts longer by as much, so that KV grows as in the trace. The planner replays the same
sessions; its order of policies must be the live one.
"""

import asyncio
import itertools
import shutil
import tempfile
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from inference_svc.bench.trace import PlannedTurn, chat_like_sessions, fitting, scaled
from kvd.plan.hardware import EngineConstants, Hardware, ReplayOptions
from kvd.plan.outcome import BUSY_QUEUE
from kvd.plan.replay import replay
from kvd.plan.trace import Session, Turn
from shared.pb.kvd.v1 import kvd_pb2
from tests.faulty_kvd import FaultyKvd
from tests.inference_processes import InferenceProcess
from tests.mixed_pair import EXTENT_BYTES, Setting, until_settled
from tests.models import WINDOW_TOKENS
from tests.pair import BLOCK_TOKENS, SLOT_BYTES, Pair, until

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

POLICIES = ("lru", "lookahead_queue", "predictive")
WHOLE_QUEUE = ("lookahead_queue", "predictive")
END_HINTS = ("lru", "predictive")
NUM_SESSIONS, SEED, SCALE = 16, 13, 0.4
ANSWER_TOKENS = 3
# all sessions together have 125 blocks at their ends, the longest 15
DRAM_SLOTS, SSD_EXTENTS = 28, 43
CLEAR = 0.25  # a difference of shares that no other order of events can reverse
NUM_JUDGED = 3  # judged sessions of each policy, the longest
ONE_AT_A_TIME = Setting(
    scheduler={
        "max_running": 1,
        "max_loading": 1,
        "step_tokens": 512,
        "kv_tokens": 4 * WINDOW_TOKENS,
    }
)


@dataclass
class Found:
    """The history that one policy's turns found, and kvd's counters; in tokens."""

    num_with_history: int = 0
    num_hits: int = 0  # turns that found all of it
    history: int = 0
    reused: Counter[str] = field(default_factory=Counter)  # by tier
    reused_behind: Counter[str] = field(default_factory=Counter)  # of turns behind BUSY_QUEUE jobs
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def fu_share(self) -> float:
        """Return the share of turns with history that found all of it."""
        return self.num_hits / self.num_with_history

    @property
    def tok_share(self) -> float:
        """Return the share of the history that was found."""
        return self.reused.total() / self.history

    @property
    def dram_share(self) -> float:
        """Return the share of DRAM in what was found where there was time to read ahead."""
        return self.reused_behind["dram"] / max(1, self.reused_behind.total())

    def add(self, usage, num_ahead) -> None:
        """Note a turn."""
        self.num_with_history += usage.history_tokens > 0
        self.num_hits += 0 < usage.history_tokens == usage.reused_tokens
        self.history += usage.history_tokens
        self.reused.update(usage.tier_tokens)
        if num_ahead >= BUSY_QUEUE:
            self.reused_behind.update(usage.tier_tokens)


def some_sessions():
    """Return conversations that fit the window; most have several turns."""
    sessions = scaled(chat_like_sessions(NUM_SESSIONS, SEED), SCALE, think_scale=0)
    sessions, _ = fitting(sessions, WINDOW_TOKENS - BLOCK_TOKENS)
    return [
        [
            PlannedTurn(turn.new_tokens + turn.output_tokens - ANSWER_TOKENS, ANSWER_TOKENS, 0.0)
            for turn in turns
            if turn.new_tokens + turn.output_tokens > ANSWER_TOKENS
        ]
        for turns in sessions
    ]


def run_plan(policy):
    """Return the planner's result for a policy with these sessions and tiers."""
    sessions = []
    for turns in some_sessions():
        ends = itertools.accumulate(turn.new_tokens + turn.output_tokens for turn in turns)
        histories = [0, *ends][:-1]
        sessions.append(
            Session(
                0.0,
                tuple(
                    Turn(turn.new_tokens, turn.output_tokens, history, 0.0)
                    for turn, history in zip(turns, histories, strict=True)
                ),
            )
        )
    hardware = Hardware(
        DRAM_SLOTS * SLOT_BYTES, SSD_EXTENTS * SLOT_BYTES, engine=EngineConstants(slots=1)
    )
    options = ReplayOptions(
        policy,
        kv_bytes_per_token=SLOT_BYTES / BLOCK_TOKENS,
        charge="packed",
        window_tokens=WINDOW_TOKENS,
        tiers="inclusive",
        ttl_s=None,
        watermark=0.0,
        warmup_turns=0,
        load_policy="always",
        end_hints=False,
    )
    return replay(sessions, hardware, options, lambda _num_turns: None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tiny_model):
    """Run one service; each policy gives it its own kvd."""
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    pair = Pair(tiny_model, directory)
    flags = ONE_AT_A_TIME.write(directory / "settings.toml")
    pair.service = InferenceProcess(tiny_model, directory / "svc", pair.kvd.runtime_dir, flags)
    async with pair.service:
        yield pair
    shutil.rmtree(directory)


@asynccontextmanager
async def kvd_by(pair, policy, num_slots=DRAM_SLOTS, num_extents=SSD_EXTENTS):
    """Run a new kvd with this policy, attached; it checks its invariants to the end."""
    tiers = ("--dram", str(num_slots * SLOT_BYTES), "--ssd", str(num_extents * EXTENT_BYTES))
    directory = pair.kvd.runtime_dir.parent
    kvd = FaultyKvd(directory, *tiers, keep="none", KVD_EVICTION__POLICY=policy)
    shutil.rmtree(kvd.state_dir, ignore_errors=True)
    pair.kvd = kvd
    try:
        await kvd.start()
        await pair.until_kvd_is("attached")
        yield kvd
    finally:
        exit_code = await kvd.stop()
    assert exit_code == 0, kvd.log()[-2000:]


async def replay_live(pair, oracle, policy):
    """Replay all sessions; each turn follows as soon as the one before it is answered."""
    found, sessions = Found(), some_sessions()
    num_open = 0

    async def say_all(index) -> None:
        nonlocal num_open
        for turn in sessions[index]:
            num_ahead, num_open = num_open, num_open + 1
            result = await pair.say(f"{policy}-{index}", turn.new_tokens, turn.output_tokens)
            num_open -= 1
            found.add(result.usage, num_ahead)

    async with kvd_by(pair, policy):
        await asyncio.gather(*map(say_all, range(len(sessions))))
        await until_settled(pair)
        found.counters = dict((await pair.stats()).counters)
    longest = sorted(range(len(sessions)), key=lambda index: -len(sessions[index]))[:NUM_JUDGED]
    for index in longest:
        verdict = await pair.verdict(oracle, f"{policy}-{index}")
        assert verdict.is_identical, (policy, index, verdict)
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(service, oracle):
    """Return the results of each policy; check that its longest sessions equal recomputation."""
    return {policy: await replay_live(service, oracle, policy) for policy in POLICIES}


async def test_policies_rank_as_planned(live):
    """Wherever the planner sees a clear difference, the pair shows it in the same direction.

    Hits are compared: the planner does not model parts of sessions, which kvd uses.
    """
    plan = {policy: run_plan(policy).hits_fu for policy in POLICIES}
    clear = {
        (worse, better)
        for worse, better in itertools.permutations(POLICIES, 2)
        if plan[better] - plan[worse] > CLEAR
    }
    assert clear == {("lru", policy) for policy in WHOLE_QUEUE}, plan
    for worse, better in clear:
        assert live[better].fu_share > live[worse].fu_share, (worse, better, plan, live)


@pytest.mark.parametrize("policy", WHOLE_QUEUE)
async def test_looking_ahead_keeps_history_that_is_needed_soon(live, policy):
    """With a queue it finds much of the history that LRU has dropped."""
    assert live[policy].tok_share > live["lru"].tok_share + CLEAR, live


@pytest.mark.parametrize("policy", WHOLE_QUEUE)
async def test_looking_ahead_finds_history_in_dram(live, policy):
    """Behind a few jobs there is time to read it; LRU reads nothing ahead."""
    assert live[policy].dram_share > 0.5, live
    assert live[policy].dram_share > live["lru"].dram_share + CLEAR, live
    assert live[policy].counters["prefetch_hits"], live
    assert not live["lru"].counters["prefetch_blocks"], live


# -------------------------------------------------------------------------------------- end hints


async def until_nothing_runs(pair) -> None:
    """Return when kvd's queue is empty: running turns are not evicted first."""

    async def is_so() -> bool:
        (engine,) = (await pair._read("GetStats", kvd_pb2.GetStatsRequest())).engines
        return not engine.queue_jobs + engine.running_jobs

    await until_settled(pair)
    await until(is_so)


@pytest.mark.parametrize("policy", END_HINTS)
async def test_the_blocks_of_a_finished_session_are_evicted_first(service, policy):
    """It was used after the other one, which LRU would evict and which stays complete."""
    names = [f"{policy}-{name}" for name in ("stays", "ends", "comes")]
    # A session has five blocks and a tail, of which there are two while it grows.
    async with kvd_by(service, policy, num_slots=14, num_extents=14):
        for name in names[:2]:
            await service.say(name, 700, final=name.endswith("ends"))
        await until_nothing_runs(service)
        before = await service.stored_sessions()
        await service.say(names[2], 700)
        await until_settled(service)
        after = await service.stored_sessions()
    stays, ends, comes = map(service.name, names)
    assert after[stays] == before[stays] > 700
    assert after[comes] > 700
    assert after.get(ends, 0) < before[ends]
