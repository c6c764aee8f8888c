"""Part `overflow`: what a context overflow costs the turn that it happens in (paper: §3.4).

fits       the turn in a window that is large enough: all of its history is reused
overflow   the oldest half of the history is dropped first, and what is left is reused
half       the same turn of a session that never had more than half: the floor

Every measurement has a session of its own. kvd shares its history with all others but for the last
block, so that it is not computed each time; dropping tokens of one leaves the others alone. The
time to the first token counts from before the discard.
"""

import time
from dataclasses import dataclass
from itertools import count

from inference_svc.bench.bench_session import ATTEMPTS, BenchSession, in_turn, note
from inference_svc.bench.figures import Case
from inference_svc.bench.interleaved import Interleaved
from inference_svc.bench.local_engine import LocalEngine, running_engine
from inference_svc.bench.options import OverflowOptions, RunOptions
from inference_svc.bench.turn_times import Source, TurnTimes, is_from
from inference_svc.bench.workspace import Workspace
from inference_svc.runtime.engine.engine_request import ContextCut
from shared.types.session_key import SessionKey

METRIC = "ttft_s"
WARM_UP = 2
MOST_OVER_FITTING = 1.10  # the goal: an overflow costs no more than the turn it saves work in
VARIANTS = ["fits", "overflow", "half"]
SOURCES: dict[str, Source] = {"dram": "kvd", "hbm": "resident"}  # by the tier of the history


def window_tokens(options: OverflowOptions) -> int:
    """The longest turn."""
    return options.history_tokens + options.new_tokens + options.answer_tokens


async def measure_overflow(
    options: OverflowOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Measure with the history in kvd's DRAM, and in the engine's memory."""
    longest = window_tokens(options)
    rounds = WARM_UP + options.pairs
    tokens = 2 * longest + rounds * len(VARIANTS) * ATTEMPTS * longest // 4
    async with (
        work.kvd(tokens) as kvd,
        running_engine(work.model, kvd, kv_rows=6 * longest) as engine,
    ):
        history = BenchSession(engine, "history")
        run.on_progress("overflow: computing the history")
        await history.grow(_whole_blocks(options.history_tokens, engine.block_tokens))
        return tuple(
            [await _Case(tier, options, run, engine, history.ids).measure() for tier in SOURCES]
        )


@dataclass(frozen=True, slots=True)
class _Take:
    """One measured turn.

    Attributes:
        began_s: before anything was dropped.
        discard_s: what dropping took of it.
        history_tokens: that were left.
    """

    times: TurnTimes
    began_s: float
    discard_s: float
    history_tokens: int


class _Case:
    """The history in one tier."""

    def __init__(
        self,
        tier: str,
        options: OverflowOptions,
        run: RunOptions,
        engine: LocalEngine,
        history_ids: list[int],
    ) -> None:
        self._tier = tier
        self._options = options
        self._run = run
        self._engine = engine
        self._ids = history_ids  # its last block is another one in each session
        self._half = len(history_ids) // 2
        self._names = count()
        facts = {"history_tokens": len(history_ids), "new_tokens": options.new_tokens}
        self._found = Interleaved(f"{len(history_ids)}/{options.new_tokens}, {tier}", facts)

    async def measure(self) -> Case:
        for round_number in range(-WARM_UP, self._options.pairs):
            self._run.on_progress(
                f"overflow, {self._tier}: round {round_number + 1}/{self._options.pairs}"
            )
            for variant in in_turn(VARIANTS, round_number):
                await self._measure_once(variant, round_number)
        self._found.compare(METRIC, "overflow", "fits", at_most=MOST_OVER_FITTING)
        self._found.compare(METRIC, "overflow", "half")
        return self._found.case()

    async def _measure_once(self, variant: str, round_number: int) -> None:
        for _ in range(ATTEMPTS):
            taken = await self._take(variant)
            if is_from(taken.times, self._tier, taken.history_tokens):
                values = {METRIC: taken.times.token_s[0] - taken.began_s}
                if variant == "overflow":
                    values["discard_s"] = taken.discard_s
                note(self._found, variant, round_number, values)
                return
            if round_number >= 0:
                self._found.discard(variant)

    async def _take(self, variant: str) -> _Take:
        engine, ids = self._engine, self._ids
        num_tokens = self._half if variant == "half" else len(ids)
        key, context = await self._session(num_tokens)
        if self._tier != "hbm":
            engine.parts.engine.memory.release_resident(key)
        new_ids = engine.new_tokens(self._options.new_tokens)
        began_s = time.perf_counter()
        if variant == "overflow":
            await engine.parts.engine.discard(key, ContextCut(context, [(0, self._half)]))
            context = context[self._half :]
        discard_s = time.perf_counter() - began_s
        times = await engine.turn(
            key, [*context, *new_ids], self._options.answer_tokens, source=SOURCES[self._tier]
        )
        engine.parts.engine.memory.release_resident(key)
        return _Take(times, began_s, discard_s, len(context))

    async def _session(self, num_tokens: int) -> tuple[SessionKey, list[int]]:
        """A session with a history of that length, in kvd and in the engine's memory."""
        engine, num_own = self._engine, self._engine.block_tokens
        key = engine.key(f"{self._tier}-{next(self._names)}")
        history = [*self._ids[: num_tokens - num_own], *engine.new_tokens(num_own)]
        prompt = [*history, *engine.new_tokens(1)]
        await engine.turn(key, prompt, 1, source="kvd", keep_tokens=num_tokens)
        await engine.settle()
        return key, history


def _whole_blocks(num_tokens: int, block_tokens: int) -> int:
    """Both halves of the history are whole blocks, of which one is the session's own."""
    step = 2 * block_tokens
    return max(2 * step, num_tokens - num_tokens % step)
