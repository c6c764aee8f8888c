"""Part `turns`: a turn's cost by the place of its history (paper: Fig. 18, preprint: Fig. 23).

re         nothing is reused: history and new tokens are computed
ca         the history is in kvd's DRAM; the resident sequence is released before each turn
resident   the history is in the session's KV in the engine's memory: the floor
"""

from dataclasses import dataclass

from inference_svc.bench.bench_session import BLOCKER_TOKENS, BenchSession, take_rounds, ttft_values
from inference_svc.bench.copied_slots import check_transport
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.local_engine import LocalEngine, Source, running_engine, whole_blocks
from inference_svc.bench.options import RunOptions, TurnsOptions
from inference_svc.bench.workspace import Workspace

METRIC = "ttft_s"
WARM_UP = 2
MOST_OVER_FLOOR = 1.10  # the goal: CA takes at most this times the floor
SHORT_GAIN, LONG_GAIN = 8.0, 20.0  # the goals for CA over RE, at 1K/100 and at 28K
LONG_TOKENS = 28_000  # whole blocks of 28K are less than 28 * 1024
WAYS: dict[str, tuple[Source, str]] = {
    "re": ("none", ""),
    "ca": ("kvd", "dram"),
    "resident": ("resident", "hbm"),
}


def cases_of(options: TurnsOptions) -> list[tuple[int, int]]:
    """List (history, new) pairs, the shortest history first: it is extended to the next one."""
    long = ((history, options.new_tokens) for history in options.histories)
    return sorted({*options.splits, *long})


def window_tokens(options: TurnsOptions) -> int:
    """Return the length of the longest turn, in tokens."""
    longest = max(sum(case) for case in cases_of(options)) + options.answer_tokens
    return max(longest, BLOCKER_TOKENS) if options.tier == "ssd" else longest


def case_name(history: int, new: int) -> str:
    """Name a case as the paper does: "900/100"; the facts have the rounded lengths."""
    return f"{history}/{new}"


async def measure_turns(
    options: TurnsOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Measure turns with the history in DRAM."""
    check_transport(options.transport, work.model.loaded.device)
    longest = window_tokens(options)
    found = []
    async with (
        work.kvd(2 * longest) as kvd,
        running_engine(
            work.model,
            kvd,
            kv_tokens=4 * longest,
            cache={"transport": options.transport},
            scheduler={"max_running": 1},
        ) as engine,
    ):
        session = BenchSession(engine, "history")
        for history, new in cases_of(options):
            run.on_progress(f"turns {case_name(history, new)}: computing the history")
            whole, rest = whole_blocks(history, new, engine.block_tokens)
            await session.grow(whole)
            case = _Case(case_name(history, new), options, engine, session, rest)
            found.append(await case.measure(run))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Case:
    """One pair of lengths.

    Attributes:
        name: the case's name.
        options: the part's options.
        engine: the engine.
        session: the session with the history.
        num_new: number of new tokens in each turn.
    """

    name: str
    options: TurnsOptions
    engine: LocalEngine
    session: BenchSession
    num_new: int

    @property
    def num_prompt(self) -> int:
        """Number of tokens in each turn's prompt."""
        return len(self.session.ids) + self.num_new

    async def measure(self, run: RunOptions) -> Case:
        """Measure all rounds, and compare the variants."""
        history, new = len(self.session.ids), self.num_new
        found = Interleaved(self.name, {"history_tokens": history, "new_tokens": new})
        await take_rounds(
            found,
            self._variants,
            range(-WARM_UP, self.options.pairs),
            self._take,
            lambda what: run.on_progress(f"turns {self.name}: {what}"),
        )
        is_goal = history >= 2 * new  # where a turn mostly loads
        found.compare(METRIC, "ca", "resident", at_most=MOST_OVER_FLOOR if is_goal else 0.0)
        found.compare(METRIC, "re", "ca", at_least=_gain(history, new))
        return found.case()

    def _variants(self, round_number: int) -> list[str]:
        options = self.options
        is_long = self.num_prompt > options.answer_tokens + 2048
        has_re = not options.re_max_tokens or self.num_prompt <= options.re_max_tokens
        if round_number < 0:  # seconds suffice to warm up
            has_re = has_re and not is_long
        elif is_long and options.re_pairs:
            has_re = has_re and round_number < options.re_pairs
        # A state cannot be cut back to the history: with states no resident can be continued.
        floor = [] if self.engine.has_states else ["resident"]
        return [*(["re"] if has_re else []), "ca", *floor]

    async def _take(self, name: str) -> dict[str, float] | None:
        source, tier = WAYS[name]
        await self.engine.settle()
        times = await self.session.turn(source, self.num_new, self.options.answer_tokens)
        return ttft_values(times, self.num_prompt) if self.session.is_from(times, tier) else None


def _gain(history: int, new: int) -> float:
    if history >= LONG_TOKENS:
        return LONG_GAIN
    return SHORT_GAIN if new <= 150 and 850 <= history <= 1100 else 0.0
