"""Part `turns --tier ssd`: turns whose history is on SSD only.

Before each turn another session is loaded that fills kvd's DRAM tier. (kvd has no command for that,
and needs none.) A turn whose history still comes from elsewhere is not counted.

Idle: the engine is idle when the turn arrives, so that there is no time to read ahead.

    always     the history is read and loaded
    never      it is recomputed
    auto       what measured rates say is faster
    resident   the floor

Queued: the turn arrives while another turn is being computed. Times are from the end of that one.

    ssd, dram, resident     where the history is when the turn is submitted
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from inference_svc.bench.bench_session import (
    BLOCKER_KV_TOKENS,
    ONE_AT_A_TIME,
    BenchSession,
    run_queued,
    take_rounds,
    ttft_values,
)
from inference_svc.bench.copied_slots import check_transport
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.local_engine import (
    LocalEngine,
    Source,
    TurnTimes,
    running_engine,
    whole_blocks,
)
from inference_svc.bench.options import RunOptions, TurnsOptions
from inference_svc.bench.turns import MOST_OVER_FLOOR, WARM_UP, case_name, cases_of, window_tokens
from inference_svc.bench.workspace import Workspace
from shared.kvd_client.client import KvdClient
from shared.measuring.statistics import percentile
from shared.types.block_key import TOKEN_BYTES

CALL_S = 120.0


class Filler:
    """A session that fills the DRAM tier; its stored bytes are no real keys and values."""

    def __init__(self, engine: LocalEngine, num_blocks: int) -> None:
        assert engine.kvd is not None, "the SSD tier is kvd's"  # noqa: S101
        self._kvd = engine.kvd
        self._engine = engine
        self._key = engine.key("filler")
        self._ids = np.arange(num_blocks * engine.block_tokens, dtype="<u4").tobytes()

    @property
    def _client(self) -> KvdClient:
        client = self._engine.parts.client
        assert client is not None, "an engine with a kvd has its client"  # noqa: S101
        return client

    async def store(self) -> None:
        """Store it on SSD, block by block, as far as kvd has room."""
        end = 0
        while end < len(self._ids) // TOKEN_BYTES:
            grant = await self._client.prepare_store(self._key, self._ids, end, CALL_S)
            stored = await self._client.complete_store(grant, success=True)
            if stored <= end:
                break  # full: the part that is stored has to do
            end = stored
            await self._kvd.until_clean()

    async def push_out(self) -> None:
        """Load it into DRAM, so that nothing else is left there."""
        await self._engine.settle()
        await self._kvd.until_clean()
        end, more = 0, True
        while more:
            grant = await self._client.prepare_load(self._key, self._ids, end, CALL_S)
            await self._client.complete_load(grant)
            end, more = grant.end_token, grant.more
        await self._engine.settle()


QUEUED_METRIC = "prefill_s"
METRIC = "ttft_s"
HOLD_FACTOR = 2.0  # the batch is busy for this times the time of reading and loading
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
FROM_SSD = frozenset({"auto", "always", "ssd"})  # variants whose history is pushed out of DRAM


async def measure_ssd_turns(
    options: TurnsOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Measure each case with its own kvd, whose DRAM tier has room for about one session."""
    check_transport(options.transport, work.model.loaded.device)
    found: list[Case] = []
    for history, new in cases_of(options):
        dram_tokens = history + new + options.answer_tokens
        async with (
            work.kvd(dram_tokens, ssd_tokens=4 * dram_tokens) as kvd,
            running_engine(
                work.model,
                kvd,
                kv_tokens=4 * window_tokens(options) + BLOCKER_KV_TOKENS,
                cache={"transport": options.transport},
                scheduler=ONE_AT_A_TIME,
            ) as engine,
        ):
            run.on_progress(f"ssd {case_name(history, new)}: computing the history")
            session = BenchSession(engine, "history")
            whole, rest = whole_blocks(history, new, engine.block_tokens)
            await session.grow(whole)
            filler = Filler(engine, work.num_blocks(dram_tokens))
            await filler.store()
            case = _SsdCase(case_name(history, new), options, run, engine, session, filler, rest)
            found += [await case.idle(), await case.queued()]
    return tuple(found)


@dataclass(slots=True)
class _SsdCase:
    """One pair of lengths.

    Attributes:
        name: the case's name.
        options: the part's options.
        run: the run's options.
        engine: the engine.
        session: the session with the history.
        filler: the session that fills DRAM.
        num_new: number of new tokens in each turn.
        always_s: times to the first token of turns over a history that was read and loaded.
    """

    name: str
    options: TurnsOptions
    run: RunOptions
    engine: LocalEngine
    session: BenchSession
    filler: Filler
    num_new: int
    always_s: list[float] = field(default_factory=list)

    async def idle(self) -> Case:
        """Measure turns for which there was no time to read ahead."""
        limit, num_prompt = self.options.re_max_tokens, len(self.session.ids) + self.num_new
        names = [name for name in IDLE if name != "never" or not limit or num_prompt <= limit]
        found = await self._rounds("idle", names, self._take_idle)
        rivals = [name for name in ("always", "never") if name in names]
        found.compare(METRIC, "auto", *rivals, at_most=MOST_OVER_FLOOR)
        found.compare(METRIC, "always", "resident")
        return found.case()

    async def queued(self) -> Case:
        """Measure turns that wait in a queue, so that reading ahead is possible."""
        found = await self._rounds("queued", list(QUEUED), self._take_queued)
        found.compare(QUEUED_METRIC, "ssd", "resident", at_most=MOST_OVER_FLOOR)
        found.compare(QUEUED_METRIC, "dram", "resident")
        return found.case()

    async def _rounds(
        self,
        when: str,
        names: list[str],
        take: Callable[[str], Awaitable[dict[str, float] | None]],
    ) -> Interleaved:
        facts = {"history_tokens": len(self.session.ids), "new_tokens": self.num_new}
        found = Interleaved(f"{self.name} {when}", facts)
        rounds = range(-WARM_UP, self.options.pairs)
        await take_rounds(
            found,
            lambda _: names,
            rounds,
            take,
            lambda what: self.run.on_progress(f"ssd {self.name}: {what}"),
        )
        return found

    async def _prepare(self, name: str) -> None:
        """Bring the history to the place that the variant requires."""
        if name in FROM_SSD:
            self.engine.parts.engine.memory.release_resident(self.session.key)
            await self.filler.push_out()
        elif name == "dram":
            await self.session.turn("kvd", 1, 1)
        elif name == "resident":
            await self.session.turn("any", 1, 1)
        await self.engine.settle()

    async def _take_idle(self, name: str) -> dict[str, float] | None:
        source, tier = IDLE[name]
        await self._prepare(name)
        times = await self.session.turn(source, self.num_new, self.options.answer_tokens)
        if source == "kvd":
            self.always_s.append(times.ttft_s)
        values = ttft_values(times, len(self.session.ids) + self.num_new)
        return values if self._counts(times, tier) else None

    async def _take_queued(self, name: str) -> dict[str, float] | None:
        source, tier = QUEUED[name]
        await self._prepare(name)
        hold_s = max(MIN_HOLD_S, HOLD_FACTOR * percentile(self.always_s, 0.5))
        times, prefill_s = await run_queued(
            self.engine,
            hold_s,
            lambda: self.session.turn(source, self.num_new, self.options.answer_tokens),
        )
        return {QUEUED_METRIC: prefill_s} if self._counts(times, tier) else None

    def _counts(self, times: TurnTimes, tier: str | None) -> bool:
        """Return whether the history came from the required tier."""
        if tier is not None:
            return self.session.is_from(times, tier)
        # Any share of it, as the engine chose, but not from elsewhere than SSD.
        is_from_ssd = times.tier_tokens.get("ssd", 0) == times.reused_tokens
        return is_from_ssd or self.session.is_from(times, "ssd")
