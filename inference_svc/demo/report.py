"""The demo's live table and its closing words."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from inference_svc.demo.facts import Summary, TurnFacts
from shared.types.units import format_duration


class LiveReport:
    """A table that grows by a row per turn; a context manager, silent when told so."""

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
    """Draw all turns, in at most 80 columns."""
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
    """Say what was shown."""
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
