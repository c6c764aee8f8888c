"""Unavailable layouts: layouts of the index that cannot be opened now, and are tried again.

A disk may be mounted late, a directory may lack permissions, a segment may be missing. The data
that the index describes may still be intact somewhere, so nothing is created in its place. Such a
layout has no cache: its engines get an error and work without kvd. The arena that an earlier kvd
has kept for it waits, too. Opening is tried again with growing pauses, and when an engine attaches;
or an operator decides with `kvd reopen`.
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
ATTEMPT_SHARE = 0.1  # share of the event loop's time that attempts may take
REMEDY = (
    "restore its files (see df, dmesg), or decide what happens to the layout: kvd reopen {layout}"
)
# Exceptions of a layout that cannot be restored; the last two: its row in the index is damaged.
UNRESTORABLE = (UnusableVolumeError, ReportedError, OSError, ValueError, DecodeError)

log = get_logger(__name__)


@dataclass
class UnavailableLayout:
    """A layout that cannot be opened, and the attempts so far. Times are monotonic.

    Attributes:
        row: its row in the index.
        kept: its kept arena of an earlier kvd, if there is one.
        why: reason of the last failed attempt.
        since_s: time of the first failed attempt.
        may_try_at_s: time from which an attaching engine causes another attempt.
        try_at_s: time of the next attempt without an engine.
        num_attempts: failed attempts so far, 64 at most.
    """

    row: LayoutRow
    kept: KeptArena | None
    why: str = ""
    since_s: float = 0.0
    may_try_at_s: float = 0.0
    try_at_s: float = 0.0
    num_attempts: int = 0

    def record_failure(self, why: str, began_s: float, now_s: float) -> None:
        """Record a failed attempt, and schedule the next one.

        Args:
            why: reason of the failure.
            began_s: time at which the attempt began.
            now_s: current time.
        """
        if not self.num_attempts:
            self.since_s = now_s
        pause_s = max(FIRST_PAUSE_S, (now_s - began_s) / ATTEMPT_SHARE)
        self.why = why
        self.may_try_at_s = now_s + pause_s
        self.try_at_s = now_s + max(pause_s, min(LONGEST_PAUSE_S, 2.0**self.num_attempts))
        self.num_attempts = min(self.num_attempts + 1, 64)

    @property
    def remedy(self) -> str:
        """Advice for the operator."""
        return REMEDY.format(layout=self.row.fingerprint[:12])

    def error(self, now_s: float) -> LayoutUnavailableError:
        """Return the error for an engine that attaches with the layout."""
        return LayoutUnavailableError(
            f"layout {self.row.fingerprint[:12]} is unavailable: {self.why}",
            self.remedy,
            retry_after_s=max(FIRST_PAUSE_S, self.may_try_at_s - now_s),
        )

    def close(self) -> None:
        """Leave the kept arena to the next kvd."""
        if self.kept is not None:
            os.close(self.kept.slots_fd)
            os.close(self.kept.journal_fd)
            self.kept = None


class UnavailableLayouts:
    """The unavailable layouts, by fingerprint. Its methods are called on the event loop."""

    def __init__(self, on_event: Callable[[Emit], None]) -> None:
        self._on_event = on_event
        self._layouts: dict[str, UnavailableLayout] = {}

    def __iter__(self) -> Iterator[UnavailableLayout]:
        return iter(tuple(self._layouts.values()))

    def __len__(self) -> int:
        return len(self._layouts)

    def get(self, fingerprint: str) -> UnavailableLayout | None:
        """Return an unavailable layout; None if the layout is not unavailable."""
        return self._layouts.get(fingerprint)

    def due(self) -> list[UnavailableLayout]:
        """Return the layouts whose next attempt is due."""
        now_s = time.monotonic()
        return [layout for layout in self if layout.try_at_s <= now_s]

    def find(self, prefix: str) -> UnavailableLayout:
        """Return the unavailable layout whose fingerprint starts with `prefix`.

        Raises:
            UnknownLayoutError: there is none.
            UnclearSelectionError: there are several.
        """
        found = [layout for layout in self if prefix and layout.row.fingerprint.startswith(prefix)]
        if not found:
            raise UnknownLayoutError(
                f"no unavailable layout begins with {prefix[:64]!r}", "list them with: kvd stats"
            )
        if len(found) > 1:
            raise UnclearSelectionError(
                f"{len(found)} unavailable layouts begin with {prefix!r}",
                "give more characters of it",
            )
        return found[0]

    def attempt(self, layout: UnavailableLayout, restore: Callable[[], None]) -> bool:
        """Try to restore a layout, record the result, and return whether it succeeded."""
        began_s = time.monotonic()
        try:
            restore()
        except UNRESTORABLE as error:
            self._record_failure(layout, str(error), began_s)
            return False
        self._record_success(layout)
        return True

    def drop(self, layout: UnavailableLayout) -> None:
        """Forget a layout."""
        del self._layouts[layout.row.fingerprint]

    def close(self) -> None:
        """Leave the kept arenas to the next kvd."""
        for layout in self:
            layout.close()

    def _record_failure(self, layout: UnavailableLayout, why: str, began_s: float) -> None:
        is_news = why != layout.why
        layout.record_failure(why, began_s, time.monotonic())
        self._layouts[layout.row.fingerprint] = layout
        if is_news:
            log.warning("layout_not_restored", layout=layout.row.fingerprint, error=why)
            fields = {"layout": layout.row.fingerprint, "why": why}
            self._on_event(Emit("layout_unavailable", None, fields))

    def _record_success(self, layout: UnavailableLayout) -> None:
        if self._layouts.pop(layout.row.fingerprint, None) is not None:
            after_s = f"{time.monotonic() - layout.since_s:.1f}"
            fields = {"layout": layout.row.fingerprint, "after_s": after_s}
            self._on_event(Emit("layout_available", None, fields))
