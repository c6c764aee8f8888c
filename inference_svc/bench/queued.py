"""A turn that waits behind another one, which is being computed meanwhile: time to load ahead."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from inference_svc.bench.local_engine import LocalEngine
from inference_svc.bench.turn_times import TurnTimes

# The engine computes one turn at a time, and gives that one room for its whole answer.
BLOCKER_IDS = tuple(range(1, 17))  # always the same: once stored, it costs kvd nothing
MAX_BLOCKER_TOKENS = 2000
ONE_AT_A_TIME = {"max_running": 1, "answer_tokens": MAX_BLOCKER_TOKENS}
BLOCKER_TOKENS = len(BLOCKER_IDS) + MAX_BLOCKER_TOKENS
BLOCKER_ROWS = 2 * BLOCKER_TOKENS

T = TypeVar("T")


async def behind(
    engine: LocalEngine, hold_s: float, turn: Callable[[], Awaitable[TurnTimes]]
) -> tuple[TurnTimes, float]:
    """Run a turn that is submitted `hold_s` before the batch is free.

    Args:
        engine: with the settings ONE_AT_A_TIME.
        hold_s: for how long another turn is computed after this one is submitted.
        turn: submits it.

    Returns:
        Its times, and seconds from when the batch was free to its first token.
    """
    has_begun = asyncio.Event()
    until_s = float("inf")

    def is_over() -> bool:
        has_begun.set()
        return time.perf_counter() >= until_s

    blocker = asyncio.ensure_future(
        engine.turn(
            engine.key("blocker"), BLOCKER_IDS, MAX_BLOCKER_TOKENS, source="none", is_over=is_over
        )
    )
    begun = asyncio.ensure_future(has_begun.wait())
    try:
        await asyncio.wait((begun, blocker), return_when=asyncio.FIRST_COMPLETED)
        until_s = time.perf_counter() + hold_s
        times = await turn()
        free_s = (await blocker).end_s
    finally:
        begun.cancel()
        blocker.cancel()
    return times, times.token_s[0] - free_s
