"""Looking again and again: on a terminal in place, into a pipe one after the other."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live

from shared.terminal.printing import console


def look_again(look: Callable[[], Any], every_s: float) -> Iterator[Any]:
    """Yield what is seen at each look, until Ctrl-C."""
    while True:
        yield look()
        time.sleep(every_s)


def show_in_place(views: Iterator[Callable[[int], Sequence[RenderableType]]]) -> None:
    """Show each view where the one before was; what the terminal has no room for is left out.

    Args:
        views: each is asked for what to show at the terminal's width.
    """
    screen = console()
    if not sys.stdout.isatty():
        for view in views:
            screen.print(f"\n{datetime.now().astimezone().isoformat(sep=' ', timespec='seconds')}")
            screen.print(*view(screen.width), sep="\n")
        return
    with Live(console=screen, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        for view in views:
            live.update(Group(*view(screen.width)), refresh=True)
