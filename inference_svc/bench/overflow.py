"""Part `overflow`: the cost of a context overflow for its turn (paper: §3.4).

fits       the turn in a window that is large enough: all of its history is reused
overflow   the oldest half of the history is dropped first, and the other half is reused
half       the same turn in a session that never had more than half: the floor

Every measurement has a session of its own. kvd shares its history with the other sessions, except
the last block, so that it is not computed each time; dropping tokens in one session does not affect
the others. The time to the first token starts before the discard.
"""

import time
from dataclasses import dataclass, field
from itertools import count

from inference_svc.bench.bench_session import ATTEMPTS, BenchSession, take_rounds
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.local_engine import LocalEngine, Source, TurnTimes, is_from, running_engine
from inference_svc.bench.options import OverflowOptions, RunOptions
from inference_svc.bench.workspace import Workspace
from inference_svc.runtime.engine.engine_request import ContextCut
from shared.types.session_key import SessionKey

METRIC = "ttft_s"
WARM_UP = 2
MOST_OVER_FITTING = 1.10  # the goal: a turn that overflows costs hardly more than one that fits
VARIANTS = ["fits", "overflow", "half"]
SOURCES: dict[str, Source] = {"dram": "kvd", "hbm": "resident"}  # by the tier of the history


def window_tokens(options: OverflowOptions) -> int:
    """Return the length of the longest turn, in tokens."""
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
        running_engine(work.model, kvd, kv_tokens=6 * longest) as engine,
    ):
        history = BenchSession(engine, "history")
        run.on_progress("overflow: computing the history")
        await history.grow(_whole_blocks(options.history_tokens, engine.block_tokens))
        return tuple(
            [await _Case(tier, options, engine, history.ids).measure(run) for tier in SOURCES]
        )


@dataclass(frozen=True, slots=True)
class _Take:
    """One measured turn.

    Attributes:
        times: the turn's times.
        began_s: time before anything was dropped.
        discard_s: seconds that the discard took.
        history_tokens: number of history tokens that were left.
    """

    times: TurnTimes
    began_s: float
    discard_s: float
    history_tokens: int


@dataclass(frozen=True, slots=True)
class _Case:
    """The history in one tier.

    Attributes:
        tier: where the history is.
        options: the part's options.
        engine: the engine.
        ids: token ids of the history; each session replaces the last block.
        names: numbers of sessions.
    """

    tier: str
    options: OverflowOptions
    engine: LocalEngine
    ids: list[int]
    names: "count[int]" = field(default_factory=count)

    async def measure(self, run: RunOptions) -> Case:
        """Measure all rounds, and compare the variants."""
        num_history, new = len(self.ids), self.options.new_tokens
        facts = {"history_tokens": num_history, "new_tokens": new}
        found = Interleaved(f"{num_history}/{new}, {self.tier}", facts)
        await take_rounds(
            found,
            lambda _: VARIANTS,
            range(-WARM_UP, self.options.pairs),
            self._measured,
            lambda what: run.on_progress(f"overflow, {self.tier}: {what}"),
        )
        found.compare(METRIC, "overflow", "fits", at_most=MOST_OVER_FITTING)
        found.compare(METRIC, "overflow", "half")
        return found.case()

    async def _measured(self, variant: str) -> dict[str, float] | None:
        taken = await self._take(variant)
        if not is_from(taken.times, self.tier, taken.history_tokens):
            return None
        discard = {"discard_s": taken.discard_s} if variant == "overflow" else {}
        return {METRIC: taken.times.token_s[0] - taken.began_s, **discard}

    async def _take(self, variant: str) -> _Take:
        engine, ids, half = self.engine, self.ids, len(self.ids) // 2
        num_tokens = half if variant == "half" else len(ids)
        key, context = await self._session(num_tokens)
        if self.tier != "hbm":
            engine.parts.engine.memory.release_resident(key)
        new_ids = engine.new_tokens(self.options.new_tokens)
        began_s = time.perf_counter()
        if variant == "overflow":
            await engine.parts.engine.discard(key, ContextCut(context, [(0, half)]))
            context = context[half:]
        discard_s = time.perf_counter() - began_s
        times = await engine.turn(
            key, [*context, *new_ids], self.options.answer_tokens, source=SOURCES[self.tier]
        )
        engine.parts.engine.memory.release_resident(key)
        return _Take(times, began_s, discard_s, len(context))

    async def _session(self, num_tokens: int) -> tuple[SessionKey, list[int]]:
        """Make a session with a history of `num_tokens`, in kvd and in the engine's memory."""
        engine, num_own = self.engine, self.engine.block_tokens
        key = engine.key(f"{self.tier}-{next(self.names)}")
        history = [*self.ids[: num_tokens - num_own], *engine.new_tokens(num_own)]
        prompt = [*history, *engine.new_tokens(1)]
        await engine.turn(key, prompt, 1, source="kvd", keep_tokens=num_tokens)
        await engine.settle()
        return key, history


def _whole_blocks(num_tokens: int, block_tokens: int) -> int:
    """Round a history so that both halves are whole blocks, with one block of the session's own."""
    step = 2 * block_tokens
    return max(2 * step, num_tokens - num_tokens % step)
