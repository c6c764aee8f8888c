"""The loop of `kvd top`: poll kvd, draw the screen, wait for keys, carry out their commands."""

import sys
import time
from dataclasses import replace

from rich.console import Console, RenderableType
from rich.live import Live

from kvd.client.operator_client import OperatorClient
from kvd.top.screen import Act, Command, Name, Screen, name_of, on_key
from kvd.top.views import MOST_INTERVALS, Snapshot, points, top_view
from shared.pb.kvd.v1 import kvd_pb2
from shared.terminal.keyboard import Keyboard, keyboard
from shared.types.errors import NotFoundError, ReportedError
from shared.types.units import format_bytes

MOST_SESSIONS = 200  # in the list; the command line's filters select others
LIST_SHARE = 10  # listing may take a tenth of the time: a slow listing is polled less often


class Top:
    """One run of `kvd top`.

    Args:
        client: the client of the kvd that is shown.
        filter_: the filter of the listed sessions.
        screen: the screen at the start.
        every_s: seconds between two polls.
    """

    def __init__(
        self, client: OperatorClient, filter_: kvd_pb2.SessionFilter, screen: Screen, every_s: float
    ) -> None:
        self._client = client
        self._filter = filter_
        self._every_s = every_s
        self._screen = screen
        self._snapshot = Snapshot(client.stats())
        self._poll_at_s = 0.0
        self._list_at_s = 0.0

    def run(self, console: Console) -> None:
        """Run until the user quits."""
        view = self._view(console)
        with (
            keyboard(sys.stdin.fileno()) as keys,
            Live(view, console=console, screen=True, auto_refresh=False) as live,
        ):
            while not self._screen.is_over:
                self._poll()
                live.update(self._view(console), refresh=True)
                self._wait(keys)

    def _view(self, console: Console) -> RenderableType:
        return top_view(self._snapshot, self._screen, console.width, console.height)

    def _wait(self, keys: Keyboard) -> None:
        """Handle keys until the next poll is due."""
        timeout_s = self._every_s if self._screen.is_paused else self._poll_at_s - time.monotonic()
        for key in keys.keys(timeout_s):
            before = self._screen
            names = [name_of(info) for info in self._snapshot.sessions]
            self._screen, command = on_key(before, key, names)
            if command is not None:
                self._screen = replace(self._screen, message=self._run_command(command))
            if command is not None or not _is_same_list(before, self._screen):
                self._list_at_s = 0.0
            if before.question is None and self._screen.question is not None:
                return  # keys typed or pasted before the question is shown must not answer it

    def _poll(self) -> None:
        """Poll kvd for what is due; if it does not answer, show that and try again."""
        now_s = time.monotonic()
        is_due = now_s >= self._poll_at_s and not self._screen.is_paused
        try:
            if is_due:
                self._poll_at_s = now_s + self._every_s
                stats = self._client.stats()
                before = self._snapshot.stats
                intervals = (*self._snapshot.intervals, points(stats, before))[-MOST_INTERVALS:]
                self._snapshot = replace(
                    self._snapshot, stats=stats, before=before, intervals=intervals, problem=""
                )
            if not self._list_at_s or (is_due and now_s >= self._list_at_s):
                self._list(now_s)
            self._snapshot = replace(self._snapshot, detail=self._detail())
        except ReportedError as error:
            self._list_at_s = now_s + self._every_s
            self._snapshot = replace(self._snapshot, problem=f"{error.message}; asking again")

    def _list(self, now_s: float) -> None:
        sessions, total, _ = self._client.sessions(
            self._filter,
            MOST_SESSIONS,
            self._screen.order,
            reverse=self._screen.is_reversed,
        )
        self._snapshot = replace(self._snapshot, sessions=sessions, total=total)
        self._list_at_s = now_s + LIST_SHARE * (time.monotonic() - now_s)

    def _detail(self) -> kvd_pb2.DescribeSessionResponse | None:
        """Return the chosen session, if it is shown; if it is gone, go back to the list."""
        if not self._screen.shows_session or self._screen.chosen is None:
            return None
        try:
            return self._client.describe(_key(self._screen.chosen))
        except NotFoundError as error:
            self._screen = replace(self._screen, shows_session=False, message=error.message)
            return None

    def _run_command(self, command: Command) -> str:
        """Carry out a command; return its result as a message."""
        key, name = _key(command.name), command.name[2]
        try:
            match command.act:
                case Act.FLUSH:
                    answer = self._client.flush(kvd_pb2.FlushRequest(session=key))
                    if answer.skipped_leased:
                        return f"{name} is in use: flush it when its turn has ended"
                    return f"{name}: flushed, {format_bytes(answer.bytes)} freed"
                case Act.PIN | Act.SOFT_PIN:
                    self._client.pin(key, soft=command.act is Act.SOFT_PIN)
                    return f"{name}: {command.act.value}ned"
                case Act.UNPIN:
                    self._client.unpin(key)
                    return f"{name}: unpinned"
        except ReportedError as error:
            return str(error)


def _is_same_list(before: Screen, after: Screen) -> bool:
    return (before.order, before.is_reversed) == (after.order, after.is_reversed)


def _key(name: Name) -> kvd_pb2.SessionKey:
    tenant, model, session_id = name
    return kvd_pb2.SessionKey(tenant=tenant, model=model, session_id=session_id)
