"""Part `overlap`: how much of loading and saving hides behind computing.

Loading while a previous batch runs (paper: Fig. 19). A turn waits behind another one, with its
history in kvd's DRAM. Measured is the time from the end of that turn to this turn's first token,
under different settings, each with its own engine.

    none      the history is loaded when the turn may start, then the turn is computed
    B0        loaded when the turn may start; it is computed layer by layer behind the load
    B1, B2, … so many layers are loaded before the turn may start
    auto      at least as many as the start gate requires, and all if there is time
    resident  there is nothing to load

The cost of saving (paper: Fig. 20). Turns of new sessions are answered, more of them than run at
once, under three settings, each with its own engine: saving off, asynchronous, synchronous.
`answers_s` is from the first submission to the last answer; `settled_s` until all KV is saved.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from inference_svc.bench.bench_session import (
    BLOCKER_KV_TOKENS,
    BLOCKER_TOKENS,
    ONE_AT_A_TIME,
    BenchSession,
    run_queued,
    take_rounds,
)
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.local_engine import (
    LocalEngine,
    Source,
    TurnTimes,
    running_engine,
    whole_blocks,
)
from inference_svc.bench.options import OverlapOptions, RunOptions
from inference_svc.bench.workspace import Workspace

METRIC = "prefill_s"
WARM_UP = 2
MIN_HOLD_S = 0.25
HOLD_FACTOR = 2.0  # the batch is busy for this times a turn that loads and computes
NONE, RESIDENT = "none", "resident"


def window_tokens(options: OverlapOptions) -> int:
    """Return the length of the longest turn of both halves, in tokens."""
    lengths = [options.history_tokens + options.new_tokens, *options.prompts]
    return max(max(lengths) + options.answer_tokens, BLOCKER_TOKENS)


async def measure_overlap(
    options: OverlapOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Measure both halves, or the one that is selected."""
    cases: tuple[Case, ...] = ()
    if options.only != "saving":
        cases += await measure_preload(options, run, work)
    if options.only != "preload":
        cases += await measure_saving(options, run, work)
    return cases


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
                    kv_tokens=6 * num_tokens + BLOCKER_KV_TOKENS,
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
        sessions = {name: session.on(engine) for name, engine in engines.items()}
        return (await _Preload(options, engines, sessions, rest).measure(run),)


def _settings(options: OverlapOptions) -> dict[str, dict[str, Any]]:
    """Return the section `cache` of each engine, by variant."""
    buffers: dict[str, dict[str, Any]] = {
        "auto" if layers < 0 else f"B{layers}": {"read_buffer_layers": layers, "residents": False}
        for layers in options.buffers
    }
    return {NONE: {"preload": "none", "residents": False}, **buffers, RESIDENT: {}}


@dataclass(slots=True)
class _Preload:
    """One history, in kvd and in the memory of the engine that keeps it resident.

    Attributes:
        options: the part's options.
        engines: the engines, by variant.
        sessions: the session with the history on each engine.
        num_new: number of new tokens in each turn.
        hold_s: seconds for which the batch is busy.
    """

    options: OverlapOptions
    engines: dict[str, LocalEngine]
    sessions: dict[str, BenchSession]
    num_new: int
    hold_s: float = MIN_HOLD_S

    async def measure(self, run: RunOptions) -> Case:
        """Take all rounds, and compare."""
        options = self.options
        facts = {"history_tokens": len(self.sessions[NONE].ids), "new_tokens": self.num_new}
        found = Interleaved(f"preload {options.history_tokens}/{options.new_tokens}", facts)
        await self.sessions[RESIDENT].turn("kvd", 1, 1)
        await self._choose_hold()
        await take_rounds(
            found,
            lambda _: list(self.engines),
            range(-WARM_UP, options.pairs),
            self._take,
            lambda what: run.on_progress(f"overlap: {what}"),
        )
        for name in self.engines:
            if name not in {NONE, RESIDENT}:
                found.compare(METRIC, name, NONE)
        if "auto" in self.engines:
            found.compare(METRIC, "auto", RESIDENT)
        return found.case()

    async def _choose_hold(self) -> None:
        """Choose a time that is long enough for all layers to be loaded ahead."""
        alone = []
        for _ in range(WARM_UP):
            await self.engines[NONE].settle()
            alone.append((await self._turn(NONE, "kvd")).ttft_s)
        self.hold_s = max(MIN_HOLD_S, HOLD_FACTOR * min(alone))

    async def _take(self, name: str) -> dict[str, float] | None:
        engine, session = self.engines[name], self.sessions[name]
        source: Source = "resident" if name == RESIDENT else "kvd"
        await engine.settle()
        times, prefill_s = await run_queued(engine, self.hold_s, lambda: self._turn(name, source))
        if not session.is_from(times, "hbm" if name == RESIDENT else "dram"):
            return None
        return {METRIC: prefill_s, "stall_s": times.stall_s}

    async def _turn(self, name: str, source: Source) -> TurnTimes:
        return await self.sessions[name].turn(source, self.num_new, 1)


SAVED_METRIC = "answers_s"
MODES = ("off", "async", "sync")
SAVED_WARM_UP = 1
WAVES = 2  # of turns: the saves of the first overlap the computing of the second
MOST_COST = 1.03


async def measure_saving(
    options: OverlapOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Compare the settings of saving."""
    lengths = [*options.prompts] * WAVES
    num_tokens = sum(lengths) + len(lengths) * options.answer_tokens
    async with AsyncExitStack() as stack:
        kvd = await stack.enter_async_context(work.kvd(2 * num_tokens, ssd_tokens=2 * num_tokens))
        engines = {
            mode: await stack.enter_async_context(
                running_engine(
                    work.model,
                    kvd,
                    kv_tokens=2 * num_tokens,
                    cache={"saving": mode, "residents": False},
                    scheduler={"max_running": options.batch},
                )
            )
            for mode in MODES
        }
        facts = {"batch": options.batch, "turns": len(lengths), "prompt_tokens": sum(lengths)}
        found = Interleaved(f"saving, batch {options.batch}", facts)

        async def take(mode: str) -> dict[str, float]:
            await kvd.flush()
            await engines[mode].settle()
            return await _answer_all(engines[mode], lengths, options.answer_tokens)

        await take_rounds(
            found,
            lambda _: list(MODES),
            range(-SAVED_WARM_UP, options.pairs),
            take,
            lambda what: run.on_progress(f"saving: {what}"),
        )
    found.compare(SAVED_METRIC, "async", "off", at_most=MOST_COST)
    found.compare(SAVED_METRIC, "sync", "off")
    found.compare(SAVED_METRIC, "async", "sync", at_most=1.0)
    found.compare("settled_s", "async", "sync")
    return (found.case(),)


async def _answer_all(engine: LocalEngine, lengths: list[int], num_answer: int) -> dict[str, float]:
    """Answer a new session for each length, all submitted at once."""
    prompts = [engine.new_tokens(length) for length in lengths]
    started_s = time.perf_counter()
    answered = await asyncio.gather(
        *(
            engine.turn(
                engine.key(f"saved-{index}"),
                prompt,
                num_answer,
                source="any",
                keep_tokens=len(prompt) + num_answer - 1,
                history_tokens=0,
            )
            for index, prompt in enumerate(prompts)
        )
    )
    answers_s = max(times.end_s for times in answered) - started_s
    await engine.parts.engine.idle.wait()
    return {"answers_s": answers_s, "settled_s": time.perf_counter() - started_s}
