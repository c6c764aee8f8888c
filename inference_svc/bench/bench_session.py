"""Sessions for measuring: variants measured in rounds, over a history that does not change.

A turn may be made to wait behind another one, which is computed meanwhile. This leaves time to load
its history ahead.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from inference_svc.bench.figures import Interleaved
from inference_svc.bench.local_engine import LocalEngine, Source, TurnTimes, is_from

ATTEMPTS = 3  # to measure a turn whose history was not where it should have been


class BenchSession:
    """A session whose history stays the same, however often a turn of it is measured.

    Every measured turn has new random tokens. Afterwards kvd and the resident sequence have the
    history only, which is whole blocks (see whole_blocks).

    Attributes:
        ids: token ids of the history.
        key: the session's key.
    """

    def __init__(self, engine: LocalEngine, name: str, ids: list[int] | None = None) -> None:
        self.ids = ids or []
        self.key = engine.key(name)
        self._engine = engine
        self._name = name

    def on(self, engine: LocalEngine) -> "BenchSession":
        """Return the same session on another engine of the same kvd."""
        return BenchSession(engine, self._name, self.ids)

    async def grow(self, num_tokens: int) -> None:
        """Extend the history to `num_tokens` tokens; the new ones are computed and saved."""
        missing = num_tokens - len(self.ids)
        if missing > 0:
            self.ids += self._engine.new_tokens(missing)
            await self._engine.turn(self.key, self.ids, 1, source="any", keep_tokens=num_tokens)
            await self._engine.settle()

    async def turn(self, source: Source, num_new: int, num_answer: int) -> TurnTimes:
        """Run a turn of `num_new` new tokens, and return how long it took."""
        return await self._engine.turn(
            self.key,
            [*self.ids, *self._engine.new_tokens(num_new)],
            num_answer,
            source=source,
            keep_tokens=len(self.ids),
        )

    def is_from(self, times: TurnTimes, tier: str) -> bool:
        """Return whether a turn's history came from a tier; see is_from."""
        return is_from(times, tier, len(self.ids))


def in_turn(names: list[str], round_number: int) -> list[str]:
    """Order the variants of a round; each round begins with another variant."""
    first = round_number % len(names)
    return names[first:] + names[:first]


def ttft_values(times: TurnTimes, num_prompt: int) -> dict[str, float]:
    """Return a turn's metrics; the prefill throughput counts the history, as the paper's does."""
    values = {"ttft_s": times.ttft_s, "prefill_tokens_per_s": num_prompt / times.ttft_s}
    return values | ({"tpot_s": times.tpot_s} if times.tpot_s else {})


async def take_rounds(
    found: Interleaved,
    names: Callable[[int], list[str]],
    rounds: range,
    take: Callable[[str], Awaitable[Mapping[str, float] | None]],
    on_round: Callable[[str], None],
) -> None:
    """Measure every variant once a round.

    Args:
        found: the measurements, to which the new ones are added.
        names: returns the variants of a round.
        rounds: numbers of the rounds; those below 0 warm up, and do not count.
        take: measures a variant: values by metric. None: it was not what the case requires, and is
            tried again.
        on_round: called with the number of the round that begins.
    """
    for number in rounds:
        on_round(f"round {number + 1}/{rounds.stop}")
        for name in in_turn(names(number), number):
            for _ in range(ATTEMPTS):
                values = await take(name)
                if number >= 0 and values is None:
                    found.discard(name)
                elif number >= 0 and values is not None:
                    found.add(name, number, values)
                if values is not None:
                    break


# The engine computes one turn at a time, with room for its whole answer.
BLOCKER_IDS = tuple(range(1, 17))  # always the same, so that kvd stores them once
MAX_BLOCKER_TOKENS = 2000
ONE_AT_A_TIME = {"max_running": 1, "answer_tokens": MAX_BLOCKER_TOKENS}
BLOCKER_TOKENS = len(BLOCKER_IDS) + MAX_BLOCKER_TOKENS
BLOCKER_KV_TOKENS = 2 * BLOCKER_TOKENS


async def run_queued(
    engine: LocalEngine, hold_s: float, turn: Callable[[], Awaitable[TurnTimes]]
) -> tuple[TurnTimes, float]:
    """Run a turn that is submitted `hold_s` seconds before the batch is free.

    Args:
        engine: an engine with the settings ONE_AT_A_TIME.
        hold_s: seconds for which another turn is computed after this one is submitted.
        turn: submits the turn.

    Returns:
        Its times, and the seconds from when the batch was free to its first token.
    """
    has_started = asyncio.Event()
    until_s = float("inf")

    def is_over() -> bool:
        has_started.set()
        return time.perf_counter() >= until_s

    blocker = asyncio.ensure_future(
        engine.turn(
            engine.key("blocker"), BLOCKER_IDS, MAX_BLOCKER_TOKENS, source="none", is_over=is_over
        )
    )
    started = asyncio.ensure_future(has_started.wait())
    try:
        await asyncio.wait((started, blocker), return_when=asyncio.FIRST_COMPLETED)
        until_s = time.perf_counter() + hold_s
        times = await turn()
        free_s = (await blocker).end_s
    finally:
        started.cancel()
        blocker.cancel()
    return times, times.token_s[0] - free_s
