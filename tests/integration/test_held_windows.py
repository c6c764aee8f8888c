"""Layers with a window hold the last tokens only in the engine's memory: the answers are the same.

Steps are short, so that sessions of some hundred tokens have moved past their windows many times.
"""

import asyncio
import random
from contextlib import suppress
from functools import partial
from itertools import product

import pytest
import pytest_asyncio

from inference_svc.client import turn_request
from inference_svc.core.scheduling.residents import MOST_RESIDENTS
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import ReportedError
from tests.integration.overflowing import WINDOW_TOKENS, check_all_reused, identical
from tests.models import (
    ALL_WINDOWED,
    ATTENTION_WINDOW,
    build_chunked_model,
    build_shapes_model,
    build_windowed_model,
    narrow_model,
)
from tests.oracle import Oracle
from tests.pair import BLOCK_TOKENS, Pair, resident_pair
from tests.truncation_oracle import TruncationOracle

pytestmark = pytest.mark.asyncio(loop_scope="module")

DRAM = ("--dram", "64MB")
STEP_TOKENS = 32
SHORT_STEPS = (f"step_tokens = {STEP_TOKENS}", "mixed_step_tokens = 16")
# Of layers with a window: four in six, or five.
NUM_ROWS = ATTENTION_WINDOW + BLOCK_TOKENS + STEP_TOKENS


# Some layers have a window, or all; those without have longer rows; or chunks.
BUILDERS = {
    "some": build_windowed_model,
    "all": partial(build_windowed_model, layer_types=ALL_WINDOWED),
    "shapes": build_shapes_model,
    "chunks": build_chunked_model,
}
CASES = list(product(BUILDERS, ("contiguous", "pages")))


def in_cases(*short):
    """Run a test in every case, in all but these with `make test-long` only.

    Of all tests together every model and both layouts are tried by `make test`, too.
    """
    params = [
        pytest.param(case, id=name, marks=() if name in short else pytest.mark.long)
        for case in CASES
        for name in ["-".join(case)]
    ]
    return pytest.mark.parametrize("case", params, indirect=True)


@pytest.fixture(scope="module")
def case(request):
    """Choose the model, and the layout of its working KV."""
    return request.param


@pytest.fixture(scope="module")
def model(case, tmp_path_factory):
    return BUILDERS[case[0]](tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


@pytest.fixture(scope="module")
def scheduler(case):
    """Return lines of the settings."""
    return (*SHORT_STEPS, f'working_kv = "{case[1]}"')


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def resident(model, tmp_path_factory, scheduler):
    """Run a service whose sessions stay in memory: a little more than 2,000 token slots."""
    pair = resident_pair(model, tmp_path_factory.mktemp("residents"), *scheduler)
    async with pair.service:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(model, tmp_path_factory, scheduler):
    """Run the same with a small context window."""
    directory = tmp_path_factory.mktemp("narrow")
    narrowed = narrow_model(model, directory / "model", WINDOW_TOKENS)
    pair = resident_pair(narrowed, directory, *scheduler)
    async with pair.service:
        yield pair


async def gauges(pair):
    """Return the service's gauges."""
    async with pair.service.client() as client:
        return dict((await client.get_model()).gauges)


async def all_identical(pair, oracle, *names):
    """Return whether the oracle agrees with every answer of these sessions."""
    for name in names:
        verdict = await pair.verdict(oracle, name)
        assert verdict.is_identical, (name, verdict)


@in_cases("some-contiguous", "chunks-pages")
async def test_a_session_takes_fewer_slots_than_its_tokens(resident, oracle):
    """A third of its KV is of all tokens, the rest is of the window only."""
    async with resident.with_kvd(*DRAM):
        turns = [await resident.say("long", 230, max_tokens=40) for _ in range(6)]
        held = await gauges(resident)
        await all_identical(resident, oracle, "long")
    num_tokens = turns[-1].usage.history_tokens + 270
    assert num_tokens > 1600
    for turn in turns[1:]:
        check_all_reused(turn, "hbm")
    assert held["resident_sessions"] == 1
    most = NUM_ROWS + (num_tokens + 256 - NUM_ROWS) / 3  # 256: slots for an answer of usual length
    assert NUM_ROWS < held["resident_token_slots"] <= most < num_tokens / 2


@in_cases("some-contiguous", "shapes-pages")
async def test_more_sessions_stay_in_memory(resident, oracle):
    """They have more tokens than there are slots, with room for a copy of one that continues."""
    async with resident.with_kvd(*DRAM):
        for name in ("a", "b", "c"):
            for _ in range(2):
                await resident.say(name, 380)
        later = [await resident.say(name, 60) for name in ("a", "b", "c")]
        held = await gauges(resident)
        await all_identical(resident, oracle, "a", "b", "c")
    num_slots = held["pool_token_slots"] - MOST_RESIDENTS * BLOCK_TOKENS  # without their tails
    assert sum(turn.usage.history_tokens for turn in later) > num_slots
    for turn in later:
        check_all_reused(turn, "hbm")


@in_cases("some-pages", "chunks-pages")
async def test_a_shared_prompt_is_copied_while_others_run(resident, oracle):
    """Sessions with one prompt come at once, some of them late.

    The first has moved past it by then.
    """
    sampling = pb.Sampling(max_tokens=90, ignore_eos=True)
    system = resident.some_tokens(2 * BLOCK_TOKENS + 40)

    async def begin(name, delay_s):
        await asyncio.sleep(delay_s)
        prompt = [*system, *resident.some_tokens(20)]
        return await resident.submit(turn_request(prompt, resident.name(name), sampling=sampling))

    before = await resident.counters()
    async with resident.with_kvd(*DRAM):
        names = [f"s{number}" for number in range(5)]
        delays = (0, 0, 0.05, 0.2, 0.5)
        await asyncio.gather(*map(begin, names, delays))
        await asyncio.gather(*(resident.say(name, 120) for name in names))
        last = await begin("last", 0)
        await all_identical(resident, oracle, *names, "last")
    after = await resident.counters()
    assert after["prefixes_shared"] > before["prefixes_shared"]
    assert last.usage.reused_tokens >= 2 * BLOCK_TOKENS, "kvd has the window behind the prompt"


@in_cases("some-contiguous", "shapes-pages")
async def test_an_answer_can_be_regenerated(resident, oracle):
    """A short one is continued in memory; a long one has lost its question, which kvd has."""
    async with resident.with_kvd(*DRAM):
        asked = [pb.ChatMessage(role="user", content="What is a block, and what for? " * 20)]
        usages = []
        for number, max_tokens in enumerate((8, 200)):
            name = f"again-{number}"
            sampling = pb.Sampling(max_tokens=max_tokens, ignore_eos=True)
            request = turn_request(asked, resident.name(name), sampling=sampling)
            await resident.submit(request)
            await resident.until_saved()
            other = turn_request(asked, resident.name(f"{name}-b"), sampling=sampling)
            usages.append((await resident.submit(other)).usage)
            await all_identical(resident, oracle, name, f"{name}-b")
    short, long = usages
    assert set(short.tier_tokens) == {"hbm"}
    assert set(long.tier_tokens) <= {"hbm", "dram"}
    assert long.reused_tokens > BLOCK_TOKENS


@pytest.fixture(scope="module")
def judge(case, model):
    """Return the judge of truncated sessions, for models all of whose layers are Llama's."""
    if case[0] in ("shapes", "chunks"):
        pytest.skip("the judge feeds layers of one shape, and no chunks")
    return TruncationOracle(model)


@in_cases("some-contiguous", "some-pages")
async def test_a_full_window_is_cut_in_memory(narrow, judge):
    """It is cut between turns and in the middle of one: keys move, nothing is recomputed."""
    async with narrow.with_kvd(*DRAM):
        turns = [await narrow.say("cut", 120, max_tokens=30) for _ in range(8)]
        long = await narrow.say("cut", 20, max_tokens=450)
        after = await narrow.say("cut", 20)
        await identical(narrow, judge, "cut")
    assert sum(bool(turn.usage.dropped_tokens) for turn in turns) >= 2
    assert long.usage.output_tokens == 450
    for turn in (*turns[1:], long, after):
        check_all_reused(turn, "hbm")


class Talker:
    """A session, its forks, and their random operations."""

    def __init__(self, pair: Pair, number: int) -> None:
        self._pair = pair
        self._random = random.Random(number)  # noqa: S311  # test data
        self.names = [f"talker-{number}"]

    async def talk(self, num_steps: int) -> None:
        """Do so many operations, most of them turns."""
        await self._say()
        for _ in range(num_steps):
            actions = [self._say, self._discard, self._fork, self._cancel]
            await self._random.choices(actions, [8, 2, 1, 1])[0]()

    def _request(self, max_tokens: int) -> pb.SubmitTurnRequest:
        compression = "none"
        if self._random.random() < 0.2:
            compression = self._random.choice(["sinks_recent", "snapkv", "h2o"])
        return turn_request(
            self._pair.some_tokens(self._random.choice([3, 40, 150, 250])),
            self._pair.name(self._random.choice(self.names)),
            sampling=pb.Sampling(max_tokens=max_tokens, ignore_eos=True),
            overflow=pb.Overflow(policy=self._random.choice(["half", "sinks"])),
            compression=pb.Compression(policy=compression, keep_ratio=0.6),
            priority=self._random.choice([0, 0, 5]),
            wait=True,
        )

    async def _say(self) -> None:
        await self._pair.submit(self._request(self._random.choice([5, 16, 60, 300])))

    async def _discard(self) -> None:
        name = self._random.choice(self.names)
        num_tokens = (await self._pair.session(name)).context_tokens
        start = self._random.randrange(max(1, num_tokens))
        async with self._pair.service.client() as client:
            with suppress(ReportedError):  # no token is left that could be dropped
                await client.discard(
                    self._pair.name(name), [(start, min(num_tokens, start + 50))], []
                )

    async def _fork(self) -> None:
        name = self._random.choice(self.names)
        turns = (await self._pair.session(name)).turns
        fork = f"{name}-{len(self.names)}"
        async with self._pair.service.client() as client:
            at_turn = self._random.randint(1, turns)
            await client.fork_session(self._pair.name(name), at_turn, self._pair.name(fork))
        self.names.append(fork)

    async def _cancel(self) -> None:
        async with self._pair.service.client() as client:
            events, num_tokens = client.stream_turn(self._request(2000)), 0
            async for event in events:
                num_tokens += len(event.tokens.tokens)
                if num_tokens > self._random.choice([0, 100, 400]):
                    break
            await events.aclose()


@in_cases("some-pages")
@pytest.mark.parametrize(
    "seed", [1, *[pytest.param(n, marks=pytest.mark.long) for n in range(2, 8)]]
)
async def test_random_operations_on_sessions_in_memory(narrow, judge, seed):
    """Turns overflow, are preempted, cancelled or compressed; sessions are cut and forked."""
    before = await narrow.counters()
    async with narrow.with_kvd(*DRAM):
        talkers = [Talker(narrow, 10 * seed + number) for number in range(5)]
        await asyncio.gather(*(talker.talk(6) for talker in talkers))
        await identical(narrow, judge, *(name for talker in talkers for name in talker.names))
    after = await narrow.counters()
    assert after["resident_hits"] > before["resident_hits"]
