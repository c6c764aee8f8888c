"""`inference-svc top`: a live screen with a service's status and its rates over time.

It is a loop: get the status, draw it with the bars of the last ones, wait for a key.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated

import typer
from rich.live import Live
from rich.text import Text

from inference_svc.cli.connection import Address, TlsCa, TlsCert, TlsKey, TokenFile, client_of
from inference_svc.cli.status import status_lines
from inference_svc.client import InferenceClient
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.terminal import printing
from shared.terminal.keyboard import keyboard
from shared.terminal.printing import sparkline
from shared.types.errors import InvalidInputError, ReportedError
from shared.types.units import format_duration, parse_duration_s

_LABEL_WIDTH = 13
_VALUE_WIDTH = 12
_INDENT = " " * _LABEL_WIDTH
FOOTER_LINES = 2  # an empty line, and the keys
KEYS = "Space holds still, or goes on   q quits"


def top_lines(looks: Sequence[pb.Model], width: int, height: int) -> Iterator[str]:
    """Yield the lines of the status, then a line of bars for each rate, the newest at the right.

    If the terminal is too low, the last lines of the status are replaced by their number.

    Args:
        looks: the statuses of one service, oldest first, at least one; those before the service's
            last start are not shown.
        width: columns of the terminal.
        height: most lines.
    """
    status = "\n".join(status_lines(looks[-1], width)).splitlines()
    series = list(_series(_since_last_start(looks)))
    room = max(0, height - len(series) - 1)
    if len(status) > room > 0:
        num_left_out = len(status) - room + 1
        status[room - 1 :] = [f"{_INDENT}… {num_left_out} more lines: inference-svc status"]
    yield from status[:room]
    yield ""
    for label, values, show in series:
        known = [value for value in values if value is not None]
        now = show(values[-1]) if values and values[-1] is not None else "-"
        bars = sparkline(values, width - _LABEL_WIDTH - _VALUE_WIDTH)
        most = f"  most {show(max(known))}" if known else ""
        bars = bars[max(0, len(bars) + len(most) - (width - _LABEL_WIDTH - _VALUE_WIDTH)) :]
        yield f"{label:<{_LABEL_WIDTH}}{now:>{_VALUE_WIDTH - 2}}  {bars}{most}"


def _since_last_start(looks: Sequence[pb.Model]) -> Sequence[pb.Model]:
    """Return the statuses since the service's last start."""
    for index in range(len(looks) - 1, 0, -1):
        if looks[index].gauges["uptime_s"] < looks[index - 1].gauges["uptime_s"]:
            return looks[index:]
    return looks


Series = tuple[str, list[float | None], Callable[[float], str]]


def _series(looks: Sequence[pb.Model]) -> Iterator[Series]:
    """Yield the series to draw: name, values (rates between two statuses), and their format."""
    pairs = list(pairwise(looks))

    def rate(name: str) -> list[float | None]:
        return [_share(_increase(a, b, name), _seconds(a, b)) for a, b in pairs]

    def number(value: float) -> str:
        return f"{value:,.3g}"

    yield "tokens/s", rate("output_tokens"), number
    yield "turns/s", rate("turns_finished"), number
    hits = [
        _share(_increase(a, b, "reused_tokens"), _increase(a, b, "history_tokens"))
        for a, b in pairs
    ]
    yield "hit rate", hits, lambda value: f"{value:.0%}"
    yield "first token", [_mean_ttft(a, b) for a, b in pairs], format_duration
    yield "turns run", [float(look.running_turns) for look in looks], number
    yield "turns wait", [float(look.waiting_turns) for look in looks], number


def _increase(before: pb.Model, after: pb.Model, name: str) -> int:
    return after.counters.get(name, 0) - before.counters.get(name, 0)


def _seconds(before: pb.Model, after: pb.Model) -> float:
    return after.gauges["uptime_s"] - before.gauges["uptime_s"]


def _mean_ttft(before: pb.Model, after: pb.Model) -> float | None:
    num_turns = after.gauges["timed_turns"] - before.gauges["timed_turns"]
    return _share(after.gauges["ttft_total_s"] - before.gauges["ttft_total_s"], num_turns)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


MOST_LOOKS = 500  # statuses that are kept: a terminal has hardly more columns
LEAST_INTERVAL_S = 0.1


class NoTerminalError(InvalidInputError):
    """Input or output is no terminal that can show a screen."""

    reason = "no_terminal"


def top(
    address: Address,
    interval: Annotated[
        str, typer.Option("--interval", metavar="TIME", help="Time between two updates.")
    ] = "2s",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Watch a running service: tokens a second, hit rate, first tokens, turns; live.

    Sessions and tenants are not in it: a service shows every client the same. Which sessions are
    busiest says kvd top, to operators; tenants are in the metrics.
    """
    try:
        every_s = parse_duration_s(interval)
    except ValueError as error:
        raise InvalidInputError(f"--interval: {error}", 'write it as "2s", for example') from error
    if every_s < LEAST_INTERVAL_S:
        raise InvalidInputError(
            f"--interval {interval} is too short", f"give {LEAST_INTERVAL_S} s or more"
        )

    async def run_watch() -> None:
        await watch(client_of(address, token_file, tls_ca, tls_cert, tls_key), every_s)

    asyncio.run(run_watch())


async def watch(client: InferenceClient, every_s: float) -> None:
    """Show a service's status until `q` is pressed, then close the client.

    Raises:
        NoTerminalError: stdin or stdout is no terminal.
        ReportedError: the service cannot be reached at the start; later errors are shown.
    """
    console = printing.console()
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or console.is_dumb_terminal:
        raise NoTerminalError(
            "inference-svc top needs a terminal that can move its cursor",
            "run inference-svc status, or inference-svc status --json",
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
                drawn = top_lines(list(looks), console.width, console.height - FOOTER_LINES)
                lines = [*drawn, "", problem or KEYS]
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
