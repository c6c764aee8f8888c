"""Part `turns`: what a turn costs, by where its history is (paper: Fig. 18, preprint: Fig. 23).

re         nothing is reused: history and new tokens are computed
ca         the history is in kvd's DRAM; the resident sequence is released before each turn
resident   the history is in the session's KV: the floor
"""

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
from inference_svc.bench.queued import BLOCKER_TOKENS
from inference_svc.bench.turn_times import Source, whole_blocks
from inference_svc.bench.workspace import Workspace

METRIC = "ttft_s"
WARM_UP = 2
MOST_OVER_FLOOR = 1.10  # CA may take so much longer than the floor
SHORT_GAIN, LONG_GAIN = 8.0, 20.0  # of CA over RE, at 1K/100, and at 28K
LONG_TOKENS = 28_000  # whole blocks of 28K are less than 28 * 1024
WAYS: dict[str, tuple[Source, str]] = {
    "re": ("none", ""),
    "ca": ("kvd", "dram"),
    "resident": ("resident", "hbm"),
}


def cases_of(options: TurnsOptions) -> list[tuple[int, int]]:
    """(history, new), the shortest history first: it grows into the next one."""
    long = ((history, options.new_tokens) for history in options.histories)
    return sorted({*options.splits, *long})


def window_tokens(options: TurnsOptions) -> int:
    """The longest turn."""
    longest = max(sum(case) for case in cases_of(options)) + options.answer_tokens
    return max(longest, BLOCKER_TOKENS) if options.tier == "ssd" else longest


def case_name(history: int, new: int) -> str:
    """As the paper writes it: "900/100"; the facts have what it was rounded to."""
    return f"{history}/{new}"


async def measure_turns(
    options: TurnsOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Measure with the history in DRAM."""
    longest = window_tokens(options)
    found = []
    async with (
        work.kvd(2 * longest) as kvd,
        running_engine(work.model, kvd, kv_rows=4 * longest) as engine,
    ):
        session = BenchSession(engine, "history")
        for history, new in cases_of(options):
            run.on_progress(f"turns {case_name(history, new)}: computing the history")
            whole, rest = whole_blocks(history, new, engine.block_tokens)
            await session.grow(whole)
            measured = _Case(case_name(history, new), options, run, engine, session, rest)
            found.append(await measured.measure())
    return tuple(found)


class _Case:
    """One pair of lengths."""

    def __init__(
        self,
        name: str,
        options: TurnsOptions,
        run: RunOptions,
        engine: LocalEngine,
        session: BenchSession,
        num_new: int,
    ) -> None:
        self._options = options
        self._run = run
        self._engine = engine
        self._session = session
        self._num_new = num_new
        self._num_prompt = len(session.ids) + num_new
        facts = {"history_tokens": len(session.ids), "new_tokens": num_new}
        self._name = name
        self._found = Interleaved(name, facts)

    async def measure(self) -> Case:
        options, history, new = self._options, len(self._session.ids), self._num_new
        for round_number in range(-WARM_UP, options.pairs):
            self._run.on_progress(f"turns {self._name}: round {round_number + 1}/{options.pairs}")
            for name in in_turn(self._variants(round_number), round_number):
                await self._take(name, round_number)
        is_goal = history >= 2 * new  # where loading is what a turn is about
        self._found.compare(METRIC, "ca", "resident", at_most=MOST_OVER_FLOOR if is_goal else 0.0)
        self._found.compare_gain(METRIC, "re", "ca", at_least=_gain(history, new))
        return self._found.case()

    def _variants(self, round_number: int) -> list[str]:
        options = self._options
        is_long = self._num_prompt > options.answer_tokens + 2048
        has_re = not options.re_max_tokens or self._num_prompt <= options.re_max_tokens
        if round_number < 0:  # seconds suffice to warm up
            has_re = has_re and not is_long
        elif is_long and options.re_pairs:
            has_re = has_re and round_number < options.re_pairs
        return ["re", "ca", "resident"] if has_re else ["ca", "resident"]

    async def _take(self, name: str, round_number: int) -> None:
        source, tier = WAYS[name]
        for _ in range(ATTEMPTS):
            await self._engine.settle()
            times = await self._session.turn(source, self._num_new, self._options.answer_tokens)
            if self._session.is_from(times, tier):
                values = ttft_values(times, self._num_prompt)
                note(self._found, name, round_number, values)
                return
            if round_number >= 0:
                self._found.discard(name)


def _gain(history: int, new: int) -> float:
    if history >= LONG_TOKENS:
        return LONG_GAIN
    return SHORT_GAIN if new <= 150 and 850 <= history <= 1100 else 0.0
