"""Random conversations over tiny tiers and random kills of kvd: tokens equal recomputation."""

import asyncio
import random

import pytest
import pytest_asyncio

from tests.models import build_windowed_model
from tests.oracle import Oracle
from tests.pair import SLOT_BYTES, resident_pair

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_SESSIONS = 6
MAX_TOKENS = 1200  # a session that is longer starts over: the window is 2048
TINY_TIERS = ("--dram", str(5 * SLOT_BYTES), "--ssd", str(12 * SLOT_BYTES))
# A block of the windowed model takes two thirds of a slot, and twice as much with its window.
SMALL_TIERS = ("--dram", str(12 * SLOT_BYTES), "--ssd", str(30 * SLOT_BYTES))


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory):
    return build_windowed_model(tmp_path_factory.mktemp("model") / "windowed")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def windowed(windowed_model, tmp_path_factory):
    """Run a service of a model with windows, whose sessions stay in memory for a while."""
    directory = tmp_path_factory.mktemp("windowed-pair")
    pair = resident_pair(windowed_model, directory, "step_tokens = 64")  # windows move often
    async with pair.service:
        yield pair


class Scene:
    """Drives one pair with a seeded random source."""

    def __init__(self, pair, seed):
        self.pair = pair
        self.random = random.Random(seed)  # noqa: S311  # test data
        self.lengths = {}  # tokens of each live session
        self.num_reused = self.num_recomputed = self.num_kills = self.num_forks = 0
        self.all_names = set()

    async def step(self):
        """Run one turn, or several at once; sometimes fork, sometimes kill kvd meanwhile."""
        die = self.random.random()
        if die < 0.08 and self.lengths:
            await self.fork()
        elif die < 0.16:
            turns = [self.turn(name) for name in self.pick(2)]
            await asyncio.gather(self.kill_kvd(), *turns)
        else:
            names = self.pick(self.random.randint(1, 4))
            await asyncio.gather(*(self.turn(name) for name in names))

    def pick(self, count):
        """Choose names of different sessions; long ones are replaced by new ones."""
        names = []
        for number in self.random.sample(range(NUM_SESSIONS), count):
            generation = 0
            while self.lengths.get(f"r{number}.{generation}", 0) > MAX_TOKENS:
                generation += 1
            names.append(f"r{number}.{generation}")
        return names

    async def turn(self, name):
        """Submit a turn of random length."""
        num_tokens, max_tokens = self.random.randint(1, 260), self.random.randint(1, 24)
        usage = (await self.pair.say(name, num_tokens, max_tokens)).usage
        self.all_names.add(name)
        self.lengths[name] = self.lengths.get(name, 0) + num_tokens + max_tokens
        self.num_reused += usage.reused_tokens
        self.num_recomputed += usage.recomputed_tokens
        assert usage.reused_tokens + usage.recomputed_tokens == usage.history_tokens

    async def fork(self):
        """Fork a session at a random turn, under a new name."""
        name = self.random.choice(sorted(self.lengths))
        self.num_forks += 1
        fork = f"f{self.num_forks}"
        async with self.pair.service.client() as client:
            turns = (await client.get_session(self.pair.name(name))).turns
            at_turn = self.random.randint(1, turns)
            made = await client.fork_session(self.pair.name(name), at_turn, self.pair.name(fork))
        if made.num_tokens < MAX_TOKENS:
            await self.turn(fork)
            del self.lengths[fork]  # one turn is enough

    async def kill_kvd(self):
        """Kill kvd with SIGKILL, and start a new one in its place."""
        self.num_kills += 1
        await self.pair.kvd.kill()
        await self.pair.kvd.start()
        await self.pair.until_kvd_is("attached")


async def play(pair, oracle, seed, num_steps, tiers=TINY_TIERS, needed=""):
    """Play a scene and judge every session of it.

    It continues until the counter `needed` has grown: when kvd is killed and what is in memory by
    then depends on the machine's load.
    """
    before = (await pair.counters())[needed] if needed else 0
    async with pair.with_kvd(*tiers):
        scene = Scene(pair, seed)
        for number in range(10 * num_steps):
            if number >= num_steps and (not needed or (await pair.counters())[needed] > before):
                break
            await scene.step()
        verdicts = {name: await pair.verdict(oracle, name) for name in sorted(scene.all_names)}
        await pair.until_kvd_is_idle()
    wrong = {name: verdict for name, verdict in verdicts.items() if not verdict.is_identical}
    assert not wrong
    assert sum(verdict.num_tokens for verdict in verdicts.values()) > num_steps
    return scene


async def test_a_random_scene(pair, oracle):
    """A seeded sample of the long test: some tokens are reused, some were lost."""
    scene = await play(pair, oracle, seed=1, num_steps=12)
    assert scene.num_kills > 0
    assert scene.num_reused > 0
    assert scene.num_recomputed > 0


async def test_a_random_scene_with_windows(windowed, windowed_model):
    """The same, of a model whose layers mostly attend to the last tokens only."""
    before = await windowed.counters()
    needed = "loaded_window_tokens"
    scene = await play(windowed, Oracle(windowed_model), 1, 10, SMALL_TIERS, needed)
    after = await windowed.counters()
    assert scene.num_kills > 0
    assert after[needed] > before[needed]
    assert after["resident_hits"] > before["resident_hits"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
async def test_random_scenes_with_windows(windowed, windowed_model, seed):
    """Ten scenes of 150 steps."""
    await play(windowed, Oracle(windowed_model), seed, 150, SMALL_TIERS)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 22))
async def test_random_scenes(pair, oracle, seed):
    """Twenty scenes of 150 steps."""
    await play(pair, oracle, seed, num_steps=150)
