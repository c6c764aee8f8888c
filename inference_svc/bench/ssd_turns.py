"""Part `turns --tier ssd`: turns whose history is on SSD only.

Before each, another session of kvd's is loaded that fills the DRAM tier; and a turn whose history
then still comes from elsewhere is not counted.

Idle: the turn comes to an idle engine, there is no time to read ahead.

    always     the history is read and loaded
    never      it is recomputed
    auto       what measured rates say is faster
    resident   the floor

Queued: it comes while another turn is being computed. Measured is from when that one ends.

    ssd, dram, resident     where the history is when the turn is submitted
"""

from collections.abc import Awaitable, Callable

from inference_svc.bench.bench_session import (
    ATTEMPTS,
    BenchSession,
    in_turn,
    note,
    ttft_values,
)
from inference_svc.bench.figures import Case
from inference_svc.bench.interleaved import Interleaved
from inference_svc.bench.local_engine import LocalEngine, running_engine
from inference_svc.bench.options import RunOptions, TurnsOptions
from inference_svc.bench.queued import BLOCKER_ROWS, ONE_AT_A_TIME, behind
from inference_svc.bench.ssd_filler import Filler
from inference_svc.bench.turn_times import Source, TurnTimes, whole_blocks
from inference_svc.bench.turns import MOST_OVER_FLOOR, WARM_UP, case_name, cases_of, window_tokens
from inference_svc.bench.workspace import Workspace
from shared.measuring.statistics import percentile

QUEUED_METRIC = "prefill_s"
METRIC = "ttft_s"
HOLD_FACTOR = 2.0  # of the time that reading and loading takes, for which the batch is busy
MIN_HOLD_S = 0.25

Ways = dict[str, tuple[Source, str | None]]  # source and the tier it must come from, None: any
IDLE: Ways = {
    "auto": ("auto", None),
    "always": ("kvd", "ssd"),
    "never": ("none", ""),
    "resident": ("resident", "hbm"),
}
QUEUED: Ways = {
    "ssd": ("kvd", "ssd"),
    "dram": ("kvd", "dram"),
    "resident": ("resident", "hbm"),
}
FROM_SSD = frozenset({"auto", "always", "ssd"})  # the history is pushed out of DRAM before


async def measure_ssd_turns(
    options: TurnsOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Measure each case with a kvd of its own, whose DRAM tier has room for about one session."""
    found: list[Case] = []
    for history, new in cases_of(options):
        dram_tokens = history + new + options.answer_tokens
        async with (
            work.kvd(dram_tokens, ssd_tokens=4 * dram_tokens) as kvd,
            running_engine(
                work.model,
                kvd,
                kv_rows=4 * window_tokens(options) + BLOCKER_ROWS,
                scheduler=ONE_AT_A_TIME,
            ) as engine,
        ):
            run.on_progress(f"ssd {case_name(history, new)}: computing the history")
            session = BenchSession(engine, "history")
            whole, rest = whole_blocks(history, new, engine.block_tokens)
            await session.grow(whole)
            filler = Filler(engine, work.num_blocks(dram_tokens))
            await filler.store()
            measured = _SsdCase(
                case_name(history, new), options, run, engine, session, filler, rest
            )
            found += [await measured.idle(), await measured.queued()]
    return tuple(found)


class _SsdCase:
    """One pair of lengths."""

    def __init__(
        self,
        name: str,
        options: TurnsOptions,
        run: RunOptions,
        engine: LocalEngine,
        session: BenchSession,
        filler: Filler,
        num_new: int,
    ) -> None:
        self._options = options
        self._run = run
        self._engine = engine
        self._session = session
        self._filler = filler
        self._num_new = num_new
        self._num_prompt = len(session.ids) + num_new
        self._name = name
        self._facts = {"history_tokens": len(session.ids), "new_tokens": num_new}
        self._always_s: list[float] = []  # turns over a history that was read and loaded

    async def idle(self) -> Case:
        """There is no time to read ahead."""
        found = Interleaved(f"{self._name} idle", self._facts)
        limit = self._options.re_max_tokens
        names = [name for name in IDLE if name != "never" or not limit or self._num_prompt <= limit]
        await self._rounds(found, names, IDLE, self._take_idle)
        rivals = [name for name in ("always", "never") if name in names]
        found.compare(METRIC, "auto", *rivals, at_most=MOST_OVER_FLOOR)
        found.compare(METRIC, "always", "resident")
        return found.case()

    async def queued(self) -> Case:
        """Reading ahead is possible."""
        found = Interleaved(f"{self._name} queued", self._facts)
        await self._rounds(found, list(QUEUED), QUEUED, self._take_queued)
        found.compare(QUEUED_METRIC, "ssd", "resident", at_most=MOST_OVER_FLOOR)
        found.compare(QUEUED_METRIC, "dram", "resident")
        return found.case()

    async def _rounds(
        self,
        found: Interleaved,
        names: list[str],
        ways: Ways,
        take: Callable[[Source], Awaitable[tuple[TurnTimes, dict[str, float]]]],
    ) -> None:
        pairs = self._options.pairs
        for round_number in range(-WARM_UP, pairs):
            self._run.on_progress(f"ssd {self._name}: round {round_number + 1}/{pairs}")
            for name in in_turn(names, round_number):
                source, tier = ways[name]
                for _ in range(ATTEMPTS):
                    await self._prepare(name)
                    times, values = await take(source)
                    if self._counts(times, tier):
                        note(found, name, round_number, values)
                        break
                    if round_number >= 0:
                        found.discard(name)

    async def _prepare(self, name: str) -> None:
        """Bring the history where the variant wants it."""
        if name in FROM_SSD:
            self._engine.parts.engine.release_resident(self._session.key)
            await self._filler.push_out()
        elif name == "dram":
            await self._session.turn("kvd", 1, 1)
        elif name == "resident":
            await self._session.turn("any", 1, 1)
        await self._engine.settle()

    async def _take_idle(self, source: Source) -> tuple[TurnTimes, dict[str, float]]:
        times = await self._session.turn(source, self._num_new, self._options.answer_tokens)
        if source == "kvd":
            self._always_s.append(times.ttft_s)
        return times, ttft_values(times, self._num_prompt)

    async def _take_queued(self, source: Source) -> tuple[TurnTimes, dict[str, float]]:
        hold_s = max(MIN_HOLD_S, HOLD_FACTOR * percentile(self._always_s, 0.5))
        times, prefill_s = await behind(
            self._engine,
            hold_s,
            lambda: self._session.turn(source, self._num_new, self._options.answer_tokens),
        )
        return times, {QUEUED_METRIC: prefill_s}

    def _counts(self, times: TurnTimes, tier: str | None) -> bool:
        if tier is not None:
            return self._session.is_from(times, tier)
        # Loaded from SSD, partly or not at all: whatever it chose, but not from elsewhere.
        is_from_ssd = times.tier_tokens.get("ssd", 0) == times.reused_tokens
        return is_from_ssd or self._session.is_from(times, "ssd")
