"""Replays sessions on one engine, turn by turn, and computes the metrics of their turns.

Shares of histories:

    all       turns that found all of their history, of all turns: a first turn finds none
    fu        the same, of turns that have history
    tok       tokens of history that were found, of all of them: the prefill that is saved
    dram      of the tokens found, those that were in DRAM when the turn's load started

Judge by tok, then fu, then dram; and consider the queue as well.

Part `serve` replays whole conversations closed-loop, with reuse and without. A fixed number of
sessions is open at once. Each submits its turns one after another: the next one comes when the
answer is complete and the user's think time has passed. When a session ends, the next one opens.

    ca    as the service is configured by default: kvd, and resident sessions
    kvd   without resident sessions
    re    every history is computed again

Every variant and round begins with an empty kvd and the same sessions.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from inference_svc.bench.bench_session import take_rounds
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.local_engine import LocalEngine, Source, TurnTimes, running_engine
from inference_svc.bench.options import RunOptions, ServeOptions
from inference_svc.bench.trace import (
    Session,
    footprint_tokens,
    origin_of,
    replayed_sessions,
    truncated,
)
from inference_svc.bench.workspace import Workspace
from inference_svc.runtime.engine.engine_request import ContextCut
from shared.measuring.statistics import percentile

MANY_AHEAD = 4  # turns: computing them leaves enough time to read ahead
PERCENTILES = (50, 90, 99)
TIERS = ("hbm", "dram", "ssd")
WARM_UP_TOKENS, WARM_UP_ANSWER = 64, 8
METRIC = "ttft_p50_s"
SSD_FACTOR = 2  # room on SSD, in KV of all sessions


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """One turn.

    Attributes:
        times: its times.
        history_tokens: prompt tokens that an earlier turn had computed.
        prompt_tokens: history and new tokens.
        num_ahead: number of turns that waited when it arrived.
    """

    times: TurnTimes
    history_tokens: int
    prompt_tokens: int
    num_ahead: int = 0

    @property
    def is_hit(self) -> bool:
        """Whether all of its history was found."""
        return 0 < self.history_tokens <= self.times.reused_tokens


@dataclass(slots=True)
class ReplayLog:
    """The turns that count, and the duration of the whole replay.

    Attributes:
        turns: the turns that count.
        elapsed_s: seconds from the first submission to the end.
        busy_s: the part of these in which the model computed.
    """

    turns: list[ReplayedTurn] = field(default_factory=list)
    elapsed_s: float = 0.0
    busy_s: float = 0.0

    @property
    def history_tokens(self) -> int:
        """Number of tokens that could have been found."""
        return sum(turn.history_tokens for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        """Number of history and new tokens."""
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def reused_tokens(self) -> int:
        """Number of tokens that were found."""
        return sum(turn.times.reused_tokens for turn in self.turns)

    def serving(self) -> dict[str, float]:
        """Return the metrics of part `serve`: percentiles, throughput, history by tier."""
        ttft_s = [turn.times.ttft_s for turn in self.turns]
        tpot_s = [turn.times.tpot_s for turn in self.turns if turn.times.tpot_s]
        found = {f"ttft_p{p}_s": percentile(ttft_s, p / 100) for p in PERCENTILES}
        if tpot_s:
            found |= {f"tpot_p{p}_s": percentile(tpot_s, p / 100) for p in PERCENTILES}
        history, tiers = self.history_tokens, _tier_tokens(self.turns)
        num_output = sum(len(turn.times.token_s) for turn in self.turns)
        return {
            **found,
            "turns_per_s": len(self.turns) / self.elapsed_s,
            "prompt_tokens_per_s": self.prompt_tokens / self.elapsed_s,
            "output_tokens_per_s": num_output / self.elapsed_s,
            "elapsed_s": self.elapsed_s,
            "busy_s": self.busy_s,
            "busy_share": self.busy_s / self.elapsed_s,
            **{f"{tier}_share": tiers[tier] / max(1, history) for tier in TIERS},
            "recomputed_share": (history - self.reused_tokens) / max(1, history),
        }

    def placement(self) -> dict[str, float]:
        """Return the metrics of parts `policies` and `positions`: hits, times, the queue.

        Raises:
            ZeroDivisionError: no turn counts.
        """
        num_turns = len(self.turns)
        ttft_s = [turn.times.ttft_s for turn in self.turns]
        num_ahead = [turn.num_ahead for turn in self.turns]
        return {
            **self._shares(),
            "ttft_mean_s": sum(ttft_s) / num_turns,
            "ttft_p99_s": percentile(ttft_s, 0.99),
            "queue_mean": sum(num_ahead) / num_turns,
            "queue_p99": percentile(num_ahead, 0.99),
            "turns_per_s": num_turns / self.elapsed_s,
            "computed_prompt_tokens": self.prompt_tokens - self.reused_tokens,
            "elapsed_s": self.elapsed_s,
            "busy_s": self.busy_s,
        }

    def _shares(self) -> dict[str, float]:
        """Return the shares of the histories that were found, by tier."""
        num_hits = sum(turn.is_hit for turn in self.turns)
        num_with_history = sum(turn.history_tokens > 0 for turn in self.turns)
        shares = {
            "all_share": num_hits / max(1, len(self.turns)),
            "fu_share": num_hits / max(1, num_with_history),
            "tok_share": self.reused_tokens / max(1, self.history_tokens),
            "dram_share": _in_dram(self.turns),
        }
        behind_many = [turn for turn in self.turns if turn.num_ahead >= MANY_AHEAD]
        if any(turn.times.reused_tokens for turn in behind_many):
            shares["dram_4_ahead_share"] = _in_dram(behind_many)
        return shares


@dataclass(slots=True)
class Replay:
    """Submits all turns of some sessions to one engine.

    Attributes:
        engine: the engine.
        sessions: the sessions.
        on_progress: called when a session has ended.
        source: where histories have to come from.
        keeps: whether sessions keep their KV; else every history is computed again.
        window_tokens: length to which contexts are truncated; 0: they are not.
        end_hints: whether a session's last turn is announced as the last.
        warmup_turns: number of first turns that are not counted.
        starts_s: seconds at which each session begins; empty: as soon as there is a place for it.
        log: the turns so far.
        num_arrived: number of turns submitted so far.
        num_done: number of sessions that have ended.
    """

    engine: LocalEngine
    sessions: Sequence[Session]
    on_progress: Callable[[str], None]
    source: Source = "kvd"
    keeps: bool = True
    window_tokens: int = 0
    end_hints: bool = False
    warmup_turns: int = 0
    starts_s: Sequence[float] = ()
    log: ReplayLog = field(default_factory=ReplayLog)
    num_arrived: int = 0
    num_done: int = 0

    async def warm_up(self) -> None:
        """Answer a turn that is not counted: the first forward is slow."""
        engine = self.engine
        prompt = engine.new_tokens(WARM_UP_TOKENS)
        await engine.turn(engine.key("warm-up"), prompt, WARM_UP_ANSWER, source="any")
        await engine.settle()

    async def run(self, num_open: int) -> ReplayLog:
        """Submit all turns, with `num_open` sessions open at once."""
        busy_s, started_s = self.engine.busy_s, time.perf_counter()
        queue = iter(range(len(self.sessions)))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_open):
                tasks.create_task(self._run_sessions(queue))
        self.log.elapsed_s = time.perf_counter() - started_s
        self.log.busy_s = self.engine.busy_s - busy_s
        return self.log

    async def _run_sessions(self, queue: Iterator[int]) -> None:
        for index in queue:
            if self.starts_s:
                await asyncio.sleep(self.starts_s[index])
            await self._run_session(index)
            self.num_done += 1
            self.on_progress(f"{self.num_done}/{len(self.sessions)} sessions are through")

    async def _run_session(self, index: int) -> None:
        engine, context, num_computed = self.engine, list[int](), 0
        key, session = engine.key(f"session-{index}"), self.sessions[index]
        for number, turn in enumerate(session):
            await asyncio.sleep(turn.think_s if number else 0.0)
            num_dropped = 0
            if self.window_tokens:
                num_dropped = len(context) - truncated(len(context), turn, self.window_tokens)
            if num_dropped:
                await engine.parts.engine.discard(key, ContextCut(context, [(0, num_dropped)]))
                context = context[num_dropped:]
                num_computed = max(0, num_computed - num_dropped)
            prompt = [*context, *engine.new_tokens(turn.new_tokens)]
            end = len(prompt) + turn.output_tokens
            self.num_arrived += 1
            counts, num_ahead = (
                self.num_arrived > self.warmup_turns,
                len(engine.parts.engine.scheduler.queue),
            )
            times = await engine.turn(
                key,
                prompt,
                turn.output_tokens,
                source=self.source,
                keep_tokens=end - 1 if self.keeps else 0,
                history_tokens=num_computed,
                is_final=self.end_hints and number == len(session) - 1,
            )
            if counts:
                self.log.turns.append(ReplayedTurn(times, num_computed, len(prompt), num_ahead))
            context, num_computed = [*prompt, *times.output_ids], end - 1


def _tier_tokens(turns: Sequence[ReplayedTurn]) -> Counter[str]:
    found = Counter[str]()
    for turn in turns:
        found.update(turn.times.tier_tokens)
    return found


def _in_dram(turns: Sequence[ReplayedTurn]) -> float:
    """Return the share of the found tokens that were in DRAM."""
    found = _tier_tokens(turns)
    return found["dram"] / max(1, found.total())


async def measure_serve(
    options: ServeOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Replay the sessions with every variant."""
    sessions, num_cut = replayed_sessions(options)
    facts = {
        "sessions": len(sessions),
        "turns": sum(map(len, sessions)),
        "turns_left_out": num_cut,
        "concurrent": options.concurrent,
        "tokens": footprint_tokens(sessions),
    }
    found = Interleaved(f"{origin_of(options)}, {options.concurrent} open", facts)
    await take_rounds(
        found,
        lambda _: list(options.variants),
        range(options.rounds),
        lambda name: _measure(name, options, run, work, sessions),
        lambda what: run.on_progress(f"serve: {what}"),
    )
    for metric in (METRIC, "ttft_p99_s", "elapsed_s", "busy_s"):
        found.compare(metric, "re", "ca")
        found.compare(metric, "re", "kvd")
    return (found.case(),)


async def _measure(
    name: str, options: ServeOptions, run: RunOptions, work: Workspace, sessions: list[Session]
) -> dict[str, float]:
    async with _engine_of(name, options, work, sessions) as engine:
        replay = Replay(
            engine,
            sessions,
            lambda what: run.on_progress(f"serve: {what}"),
            source="any",
            keeps=name != "re",
        )
        await replay.warm_up()
        return (await replay.run(options.concurrent)).serving()


@asynccontextmanager
async def _engine_of(
    name: str, options: ServeOptions, work: Workspace, sessions: list[Session]
) -> AsyncIterator[LocalEngine]:
    rows = 3 * options.max_running * options.window_tokens
    scheduler = {
        "max_running": options.max_running,
        "max_turns": max(options.concurrent, 256),
        "answer_tokens": min(256, options.window_tokens),
    }
    if name == "re":
        async with running_engine(work.model, None, kv_tokens=rows, scheduler=scheduler) as engine:
            yield engine
        return
    num_tokens = footprint_tokens(sessions)
    async with (
        work.kvd(
            2 * num_tokens, ssd_tokens=SSD_FACTOR * num_tokens, dram_bytes=options.dram_mib << 20
        ) as kvd,
        running_engine(
            work.model,
            kvd,
            kv_tokens=rows,
            cache={"residents": name == "ca"},
            scheduler=scheduler,
        ) as engine,
    ):
        yield engine
