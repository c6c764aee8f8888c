"""The loop of `inference-svc top`: look, show, wait for a key."""

import asyncio
import sys
from collections import deque
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from inference_svc.cli.client import InferenceClient
from inference_svc.cli.top_view import KEYS, top_lines
from shared.terminal import printing
from shared.terminal.keyboard import keyboard
from shared.types.errors import InvalidInputError, ReportedError

if TYPE_CHECKING:
    from shared.pb.inference.v1 import inference_pb2 as pb

MOST_LOOKS = 500  # that are kept: as many as the widest terminal has columns
LEAST_INTERVAL_S = 0.1


class NoTerminalError(InvalidInputError):
    """There is nobody to show a screen to."""

    reason = "no_terminal"


async def top(client: InferenceClient, every_s: float) -> None:
    """Show how a service goes until `q` is pressed, and close the client.

    Raises:
        NoTerminalError: stdin or stdout is none.
        ReportedError: the service cannot be reached at the start; later that is shown.
    """
    console = printing.console()
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or console.is_dumb_terminal:
        raise NoTerminalError(
            "inference-svc top needs a terminal that can move its cursor",
            "say inference-svc status, or status --json",
        )
    looks: deque[pb.Model] = deque(maxlen=MOST_LOOKS)
    is_held, problem = False, ""
    async with client:
        looks.append(await client.get_model())
        with (
            keyboard(sys.stdin.fileno()) as keys,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while True:
                lines = [*top_lines(list(looks), console.width), "", problem or KEYS]
                shown = Text("\n".join(lines), no_wrap=True, overflow="crop")
                live.update(shown, refresh=True)
                pressed = await asyncio.to_thread(keys.keys, every_s)
                if {"q", "Q"} & set(pressed):
                    return
                is_held ^= "space" in pressed
                if is_held or pressed:
                    continue
                try:
                    looks.append(await client.get_model())
                    problem = ""
                except ReportedError as error:
                    problem = f"{error.message}; asking again"
