"""Part `overlap`, first half: loading while a batch runs before (paper: Fig. 19).

A turn waits behind another one, with its history in kvd's DRAM. Measured is from when that one ends
to the turn's first token, under different settings, each an engine of its own.

    none      the history is loaded when the turn's time has come, then it is computed
    B0        loaded when its time has come, computed layer by layer behind that
    B1, B2, … so many layers are loaded before its time has come
    all       every layer may be
    resident  there is nothing to load
"""

from contextlib import AsyncExitStack
from typing import Any

from inference_svc.bench.bench_session import ATTEMPTS, BenchSession, in_turn, note
from inference_svc.bench.figures import Case
from inference_svc.bench.interleaved import Interleaved
from inference_svc.bench.local_engine import LocalEngine, running_engine
from inference_svc.bench.options import OverlapOptions, RunOptions
from inference_svc.bench.queued import BLOCKER_ROWS, BLOCKER_TOKENS, ONE_AT_A_TIME, behind
from inference_svc.bench.turn_times import Source, TurnTimes, whole_blocks
from inference_svc.bench.workspace import Workspace

METRIC = "prefill_s"
WARM_UP = 2
MIN_HOLD_S = 0.25
HOLD_FACTOR = 2.0  # of a turn that loads and computes, for which the batch is busy
NONE, RESIDENT = "none", "resident"


def window_tokens(options: OverlapOptions) -> int:
    """The longest turn of both halves."""
    lengths = [options.history_tokens + options.new_tokens, *options.prompts]
    return max(max(lengths) + options.answer_tokens, BLOCKER_TOKENS)


async def measure_preload(
    options: OverlapOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Compare read buffers."""
    num_tokens = options.history_tokens + options.new_tokens
    async with AsyncExitStack() as stack:
        kvd = await stack.enter_async_context(work.kvd(4 * num_tokens))
        engines = {
            name: await stack.enter_async_context(
                running_engine(
                    work.model,
                    kvd,
                    kv_rows=6 * num_tokens + BLOCKER_ROWS,
                    cache=cache,
                    scheduler=ONE_AT_A_TIME,
                )
            )
            for name, cache in _settings(options).items()
        }
        session = BenchSession(engines[NONE], "history")
        run.on_progress("overlap: computing the history")
        whole, rest = whole_blocks(
            options.history_tokens, options.new_tokens, engines[NONE].block_tokens
        )
        await session.grow(whole)
        return (await _Preload(options, run, engines, session, rest).measure(),)


def _settings(options: OverlapOptions) -> dict[str, dict[str, Any]]:
    """Section `cache` of each engine, by variant."""
    buffers: dict[str, dict[str, Any]] = {
        "all" if layers < 0 else f"B{layers}": {"read_buffer_layers": layers, "residents": False}
        for layers in options.buffers
    }
    return {NONE: {"preload": "none", "residents": False}, **buffers, RESIDENT: {}}


class _Preload:
    def __init__(
        self,
        options: OverlapOptions,
        run: RunOptions,
        engines: dict[str, LocalEngine],
        session: BenchSession,
        num_new: int,
    ) -> None:
        self._options = options
        self._num_new = num_new
        self._run = run
        self._engines = engines
        self._sessions = {name: session.on(engine) for name, engine in engines.items()}
        name = f"preload {options.history_tokens}/{options.new_tokens}"
        facts = {"history_tokens": len(session.ids), "new_tokens": num_new}
        self._found = Interleaved(name, facts)
        self._hold_s = MIN_HOLD_S

    async def measure(self) -> Case:
        await self._sessions[RESIDENT].turn("kvd", 1, 1)
        await self._choose_hold()
        for round_number in range(-WARM_UP, self._options.pairs):
            self._run.on_progress(f"overlap: round {round_number + 1}/{self._options.pairs}")
            for name in in_turn(list(self._engines), round_number):
                await self._take(name, round_number)
        for name in self._engines:
            if name not in {NONE, RESIDENT}:
                self._found.compare(METRIC, name, NONE)
        if "all" in self._engines:
            self._found.compare(METRIC, "all", RESIDENT)
        return self._found.case()

    async def _choose_hold(self) -> None:
        """Long enough for whatever is allowed to be loaded ahead."""
        alone = []
        for _ in range(WARM_UP):
            await self._engines[NONE].settle()
            alone.append((await self._turn(NONE, "kvd")).ttft_s)
        self._hold_s = max(MIN_HOLD_S, HOLD_FACTOR * min(alone))

    async def _take(self, name: str, round_number: int) -> None:
        engine, session = self._engines[name], self._sessions[name]
        source: Source = "resident" if name == RESIDENT else "kvd"
        for _ in range(ATTEMPTS):
            await engine.settle()
            times, prefill_s = await behind(engine, self._hold_s, lambda: self._turn(name, source))
            if session.is_from(times, "hbm" if name == RESIDENT else "dram"):
                values = {METRIC: prefill_s, "stall_s": times.stall_s}
                note(self._found, name, round_number, values)
                return
            if round_number >= 0:
                self._found.discard(name)

    async def _turn(self, name: str, source: Source) -> TurnTimes:
        return await self._sessions[name].turn(source, self._num_new, 1)
