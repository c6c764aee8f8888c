"""The demo's results: facts of each turn, the verdict, the live table, and the closing words."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from shared.types.units import format_duration

MIN_REUSED_SHARE = 0.9  # of the history, before the kill of kvd and after it
MOST_NAMED = 3  # turns that a message lists


@dataclass(frozen=True)
class TurnFacts:
    """One turn, answered twice.

    Attributes:
        session_id: id of the conversation.
        turn: index from 0.
        history_tokens: prompt tokens whose KV an earlier turn has computed.
        reused_tokens: history tokens that were loaded from kvd.
        new_tokens: prompt tokens computed for the first time.
        output_tokens: length of the answer.
        tiers: where the reused tokens were found, most first.
        ttft_s: time to first token with reuse.
        recompute_ttft_s: the same turn in the service that recomputes.
        identical: whether both answers are the same tokens.
        after_kill: whether kvd was killed and restarted before it.
    """

    session_id: str
    turn: int
    history_tokens: int
    reused_tokens: int
    new_tokens: int
    output_tokens: int
    tiers: tuple[str, ...]
    ttft_s: float
    recompute_ttft_s: float
    identical: bool
    after_kill: bool

    @property
    def ttft_ratio(self) -> float:
        """How many times faster the first token comes with reuse."""
        return self.recompute_ttft_s / self.ttft_s


@dataclass(frozen=True)
class Summary:
    """The demo's verdict.

    Attributes:
        num_sessions: number of sessions.
        num_turns: number of turns.
        identical: whether every answer equals recomputation.
        reused_share: reused over history tokens after each session's first turn, before the kill.
        reused_share_after_kill: the same after kvd was killed and restarted.
        ttft_ratio: time to first token of recomputation over that with reuse, the median over turns
            with history.
        shortfalls: promises that were not kept, as phrases with the measured numbers.
    """

    num_sessions: int
    num_turns: int
    identical: bool
    reused_share: float
    reused_share_after_kill: float
    ttft_ratio: float
    shortfalls: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the demo kept all its promises."""
        return not self.shortfalls


def summarise(turns: Sequence[TurnFacts]) -> Summary:
    """Compute the verdict from all turns."""
    before_kill = [turn for turn in turns if turn.history_tokens and not turn.after_kill]
    after_kill = [turn for turn in turns if turn.history_tokens and turn.after_kill]
    different = [turn for turn in turns if not turn.identical]
    with_history = [*before_kill, *after_kill]
    ratio = median(turn.ttft_ratio for turn in with_history) if with_history else 0.0
    return Summary(
        num_sessions=len({turn.session_id for turn in turns}),
        num_turns=len(turns),
        identical=bool(turns) and not different,
        reused_share=_reused_share(before_kill),
        reused_share_after_kill=_reused_share(after_kill),
        ttft_ratio=ratio,
        shortfalls=(
            *_differences(different),
            *_reuse_shortfall("before the kill", before_kill),
            *_reuse_shortfall("after the kill", after_kill),
            *_ttft_shortfall(ratio, len(with_history)),
        ),
    )


def as_document(turns: Sequence[TurnFacts], model: str) -> dict[str, object]:
    """Return verdict and turns as one document for JSON."""
    summary = summarise(turns)
    return {
        **asdict(summary),
        "passed": summary.passed,
        "model": model,
        "turns": [asdict(turn) | {"ttft_ratio": turn.ttft_ratio} for turn in turns],
    }


def _differences(different: Sequence[TurnFacts]) -> tuple[str, ...]:
    if not different:
        return ()
    names = ", ".join(
        f"turn {turn.turn + 1} of {turn.session_id}" for turn in different[:MOST_NAMED]
    )
    more = ", …" if len(different) > MOST_NAMED else ""
    return (f"{len(different)} answers differ from recomputation ({names}{more})",)


def _reuse_shortfall(when: str, turns: Sequence[TurnFacts]) -> tuple[str, ...]:
    if not turns:
        return (f"{when} no turn had a history",)
    share = _reused_share(turns)
    if share >= MIN_REUSED_SHARE:
        return ()
    reused_tokens = sum(turn.reused_tokens for turn in turns)
    history_tokens = sum(turn.history_tokens for turn in turns)
    found = f"{reused_tokens} of {history_tokens} tokens of history were loaded ({share:.1%})"
    return (f"{when} {found}, not {MIN_REUSED_SHARE:.0%}",)


def _ttft_shortfall(ratio: float, num_turns: int) -> tuple[str, ...]:
    if ratio > 1 or not num_turns:
        return ()
    found = f"the first token came {ratio:.2f}x as soon as with recomputation, not sooner"
    return (f"{found} (median of {num_turns} turns with history)",)


def _reused_share(turns: Sequence[TurnFacts]) -> float:
    history_tokens = sum(turn.history_tokens for turn in turns)
    return sum(turn.reused_tokens for turn in turns) / history_tokens if history_tokens else 0.0


class LiveReport:
    """A table that grows by a row per turn; a context manager, silent if it is not to print."""

    def __init__(self, console: Console, *, is_silent: bool) -> None:
        self._console = console
        self._is_silent = is_silent
        self._turns: list[TurnFacts] = []
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="visible")

    def __enter__(self) -> Self:
        if not self._is_silent:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_silent:
            self._live.stop()

    def add(self, turn: TurnFacts) -> None:
        """Add a row."""
        self._turns.append(turn)
        if not self._is_silent:
            self._live.update(turn_table(self._turns), refresh=True)


def turn_table(turns: Sequence[TurnFacts]) -> Table:
    """Make the table of all turns, at most 80 columns wide."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for name in ("session", "tier"):
        table.add_column(name, no_wrap=True)
    for name in ("turn", "history", "reused", "new", "TTFT", "TTFT of RE", "ratio", "identical?"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, turn in enumerate(turns):
        if index and turn.after_kill != turns[index - 1].after_kill:
            table.add_section()
        table.add_row(
            turn.session_id,
            ("+".join(turn.tiers) or "-") + ("*" if turn.after_kill else ""),
            f"{turn.turn + 1}",
            f"{turn.history_tokens}",
            f"{turn.reused_tokens}",
            f"{turn.new_tokens}",
            format_duration(turn.ttft_s),
            format_duration(turn.recompute_ttft_s),
            f"{turn.ttft_ratio:.1f}x" if turn.history_tokens else "-",
            "[green]yes[/]" if turn.identical else "[bold red]NO[/]",
        )
    return table


def closing_words(summary: Summary) -> str:
    """Return the closing words, with markup."""
    answers = "every answer identical to recomputation"
    if not summary.identical:
        answers = "[bold red]some answers differ from recomputation[/]"
    return (
        "\n* kvd had been killed with SIGKILL and started again\n\n"
        f"{summary.num_turns} turns of {summary.num_sessions} sessions, {answers}.\n"
        f"Of their history {summary.reused_share:.1%} was loaded instead of computed,"
        f" {summary.reused_share_after_kill:.1%} after the kill.\n"
        f"The first token came {summary.ttft_ratio:.1f}x sooner (median of turns with history)."
    )
