"""Contexts that lose tokens amid random operations of many sessions: answers are right.

Sessions run random operations side by side: turns that overflow at once or in the middle,
under every policy, with and without compression; discards, forks, cancelled turns. All answers are
judged at the end (`tests/truncation_oracle.py`).
"""

import asyncio
import random
from contextlib import suppress

import pytest

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import ReportedError
from tests.models import narrow_model
from tests.pair import SLOT_BYTES, Pair
from tests.truncation_oracle import TruncationOracle

WINDOW_TOKENS = 384
NUM_SESSIONS = 5
NUM_STEPS = 8
NUM_SCENES = 6
SETTINGS = "[scheduler]\nkv_tokens = 1500\n[compression]\nmin_tokens = 100\n"


class Talker:
    """A session, its forks, and their random operations."""

    def __init__(self, pair: Pair, number: int, seed: int) -> None:
        self._pair = pair
        self._random = random.Random(1000 * seed + number)  # noqa: S311  # test data
        self.names = [f"talker-{number}"]

    async def talk(self, num_steps: int) -> None:
        """Do so many operations, most of them turns."""
        await self._say()
        for _ in range(num_steps):
            action = self._random.choices(
                [self._say, self._discard, self._fork, self._cancel], [8, 2, 1, 1]
            )[0]
            await action()

    async def _say(self) -> None:
        await self._pair.submit(self._request(self._random.choice([5, 16, 60, 300])))

    def _request(self, max_tokens: int) -> pb.SubmitTurnRequest:
        sampling = pb.Sampling(max_tokens=max_tokens, ignore_eos=True)
        policy, compression = self._random.choice(["half", "sinks"]), "none"
        if self._random.random() < 0.3:
            compression = self._random.choice(["sinks_recent", "snapkv", "h2o"])
        return turn_request(
            self._pair.some_tokens(self._random.choice([3, 40, 150, 250])),
            self._pair.name(self._random.choice(self.names)),
            sampling=sampling,
            overflow=pb.Overflow(policy=policy, ratio=self._random.choice([0.25, 0.5, 0.9])),
            compression=pb.Compression(policy=compression, keep_ratio=0.6),
            wait=True,
        )

    async def _discard(self) -> None:
        name = self._random.choice(self.names)
        num_tokens = (await self._pair.session(name)).context_tokens
        positions = self._random.sample(range(num_tokens), min(num_tokens, 20))
        start = self._random.randrange(max(1, num_tokens))
        async with self._pair.service.client() as client:
            ranges = [(start, min(num_tokens, start + 50))] if num_tokens else []
            with suppress(ReportedError):  # no token is left that could be dropped
                await client.discard(self._pair.name(name), ranges, positions)

    async def _fork(self) -> None:
        name = self._random.choice(self.names)
        turns = (await self._pair.session(name)).turns
        fork = f"{name}-{len(self.names)}"
        async with self._pair.service.client() as client:
            await client.fork_session(
                self._pair.name(name), self._random.randint(1, turns), self._pair.name(fork)
            )
        self.names.append(fork)

    async def _cancel(self) -> None:
        request = self._request(2000)
        async with self._pair.service.client() as client:
            events = client.stream_turn(request)
            num_tokens = 0
            async for event in events:
                num_tokens += len(event.tokens.tokens)
                if num_tokens > self._random.choice([0, 100, 400]):
                    break
            await events.aclose()


@pytest.mark.long
@pytest.mark.parametrize("residents", [False, True], ids=["loaded", "resident"])
async def test_mixed_scenes(tiny_model, tmp_path, residents):
    """All answers are those of the model for the contexts at that time."""
    model_dir = narrow_model(tiny_model, tmp_path / "narrow", WINDOW_TOKENS)
    judge = TruncationOracle(model_dir)
    (tmp_path / "settings.toml").write_text(SETTINGS)
    flags = ["--config", str(tmp_path / "settings.toml")]
    pair = Pair(model_dir, tmp_path, *flags, *(["--residents"] if residents else []))
    num_discards = 0
    async with pair.service:
        for seed in range(NUM_SCENES):
            async with pair.with_kvd("--dram", str(12 * SLOT_BYTES), "--ssd", "64MB"):
                num_discards += await play(pair, judge, seed)
        counters = await pair.counters()
    assert num_discards > 20 * NUM_SCENES
    assert counters["preempted"]
    assert counters["turns_cancelled"]


async def play(pair: Pair, judge: TruncationOracle, seed: int) -> int:
    """Let sessions run side by side, and judge them; return how many discards there were."""
    talkers = [Talker(pair, number, seed) for number in range(NUM_SESSIONS)]
    await asyncio.gather(*(talker.talk(NUM_STEPS) for talker in talkers))
    num_discards = 0
    for name in (name for talker in talkers for name in talker.names):
        session = await pair.session(name)
        verdict = await asyncio.to_thread(judge.judge, session)
        assert verdict.is_identical, (seed, name, verdict)
        num_discards += len(session.discards)
    return num_discards
