"""Layouts that the index knows and that cannot be opened: kept as they are, and tried again.

A disk that is mounted late, a directory without permission, a segment that is not there: nothing
is made anew over what the index describes, for it may be whole. Such a layout has no cache. Engines
get that for an answer and do without kvd; its memory of an earlier kvd waits with it. It is tried
again with growing pauses, and when an engine comes for it; or an operator decides: `kvd reopen`.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kvd.core.records.actions import Emit
from kvd.errors import LayoutUnavailableError, UnclearSelectionError, UnknownLayoutError
from kvd.tiers.arena_store import KeptArena
from kvd.tiers.manifest import LayoutRow
from kvd.tiers.volume_identity import UnusableVolumeError
from shared.process.log import get_logger
from shared.types.errors import ReportedError

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
ATTEMPT_SHARE = 0.1  # of the event loop's time that attempts may take
REMEDY = "bring its files back (df, dmesg), or decide what is to become of it: kvd reopen {layout}"
# Why a layout cannot be restored; the last two: what the index has of it is damaged.
UNRESTORABLE = (UnusableVolumeError, ReportedError, OSError, ValueError, DecodeError)

log = get_logger(__name__)


@dataclass
class UnavailableLayout:
    """One layout, and what was tried.

    Attributes:
        row: what the index says of it.
        kept: its memory of an earlier kvd, if there is some.
        why: reason why it could not be opened at the last attempt.
        since_s, may_try_at_s, try_at_s: when that was found first; from when an engine that comes
            has it tried again; when it is tried anyway. On the monotonic clock.
        num_attempts: so far.
    """

    row: LayoutRow
    kept: KeptArena | None
    why: str = ""
    since_s: float = 0.0
    may_try_at_s: float = 0.0
    try_at_s: float = 0.0
    num_attempts: int = 0

    def failed(self, why: str, began_s: float, now_s: float) -> None:
        """Record a failed attempt and when the next ones may be."""
        if not self.num_attempts:
            self.since_s = now_s
        rest_s = max(FIRST_PAUSE_S, (now_s - began_s) / ATTEMPT_SHARE)
        self.why = why
        self.may_try_at_s = now_s + rest_s
        self.try_at_s = now_s + max(rest_s, min(LONGEST_PAUSE_S, 2.0**self.num_attempts))
        self.num_attempts = min(self.num_attempts + 1, 64)

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDY.format(layout=self.row.fingerprint[:12])

    def error(self, now_s: float) -> LayoutUnavailableError:
        """Return the error for an engine that comes for it."""
        return LayoutUnavailableError(
            f"layout {self.row.fingerprint[:12]} is unavailable: {self.why}",
            self.remedy,
            retry_after_s=max(FIRST_PAUSE_S, self.may_try_at_s - now_s),
        )

    def close(self) -> None:
        """Leave its memory to the next kvd."""
        if self.kept is not None:
            os.close(self.kept.slots_fd)
            os.close(self.kept.journal_fd)
            self.kept = None


class UnavailableLayouts:
    """All of them, by fingerprint. On the event loop."""

    def __init__(self, on_event: Callable[[Emit], None]) -> None:
        self._on_event = on_event
        self._layouts: dict[str, UnavailableLayout] = {}

    def __iter__(self) -> Iterator[UnavailableLayout]:
        return iter(tuple(self._layouts.values()))

    def __len__(self) -> int:
        return len(self._layouts)

    def get(self, fingerprint: str) -> UnavailableLayout | None:
        """Return one of them; None: the layout is not unavailable."""
        return self._layouts.get(fingerprint)

    def due(self) -> list[UnavailableLayout]:
        """Return those to be tried again now."""
        now_s = time.monotonic()
        return [found for found in self if found.try_at_s <= now_s]

    def find(self, prefix: str) -> UnavailableLayout:
        """Return the one whose fingerprint starts so.

        Raises:
            UnknownLayoutError: none does.
            UnclearSelectionError: several do.
        """
        found = [layout for layout in self if prefix and layout.row.fingerprint.startswith(prefix)]
        if not found:
            raise UnknownLayoutError(
                f"no layout {prefix[:64]!r} is unavailable", "see which there are: kvd stats"
            )
        if len(found) > 1:
            raise UnclearSelectionError(
                f"{len(found)} unavailable layouts start with {prefix!r}", "write more of it"
            )
        return found[0]

    def attempt(self, layout: UnavailableLayout, restore: Callable[[], None]) -> bool:
        """Try to restore a layout; note what comes of it."""
        began_s = time.monotonic()
        try:
            restore()
        except UNRESTORABLE as error:
            self._failed(layout, str(error), began_s)
            return False
        self._restored(layout)
        return True

    def drop(self, layout: UnavailableLayout) -> None:
        """Forget one."""
        del self._layouts[layout.row.fingerprint]

    def close(self) -> None:
        """Leave their memory to the next kvd."""
        for layout in self:
            layout.close()

    def _failed(self, layout: UnavailableLayout, why: str, began_s: float) -> None:
        is_news = why != layout.why
        layout.failed(why, began_s, time.monotonic())
        self._layouts[layout.row.fingerprint] = layout
        if is_news:
            log.warning("layout_not_restored", layout=layout.row.fingerprint, error=why)
            fields = {"layout": layout.row.fingerprint, "why": why}
            self._on_event(Emit("layout_unavailable", None, fields))

    def _restored(self, layout: UnavailableLayout) -> None:
        if self._layouts.pop(layout.row.fingerprint, None) is not None:
            after_s = f"{time.monotonic() - layout.since_s:.1f}"
            fields = {"layout": layout.row.fingerprint, "after_s": after_s}
            self._on_event(Emit("layout_available", None, fields))
