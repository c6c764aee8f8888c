"""kvd's own clock: non-decreasing over restarts, reboots and changes of the wall clock (D17).

Within one boot it is CLOCK_BOOTTIME plus a fixed offset, so that a suspended machine ages its
sessions too. After a reboot it continues from the last value that was saved, plus the time the wall
clock says has passed since (never less than nothing).
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
META_NAME = "clock"  # of the saved state in the manifest
SAVE_EVERY_S = 60.0  # what a reboot without a shutdown can lose of everybody's idle time, at most


class Clock:
    """Time as the cache engine sees it.

    Args:
        boot_id: of this boot, by which a later clock sees whether it is the same one.
        offset_ns: what is added to the time since boot.
        boottime_ns: that time, suspended hours included.
    """

    def __init__(self, boot_id: str, offset_ns: int, boottime_ns: Callable[[], int]) -> None:
        self._boot_id = boot_id
        self._offset_ns = offset_ns
        self._boottime_ns = boottime_ns

    def now_ns(self) -> int:
        """Nanoseconds, never less than before."""
        return self._boottime_ns() + self._offset_ns

    def saved(self, wall_ns: int) -> str:
        """State to keep in the manifest from time to time."""
        state = {
            "boot_id": self._boot_id,
            "offset_ns": self._offset_ns,
            "now_ns": self.now_ns(),
            "wall_ns": wall_ns,
        }
        return json.dumps(state)


def resume_clock(
    saved: str,
    boot_id: str,
    wall_ns: int,
    boottime_ns: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME),
) -> Clock:
    """Continue a clock.

    Args:
        saved: what Clock.saved returned; an empty or damaged text starts a new clock.
        boot_id: the kernel's id of this boot.
        wall_ns: the wall clock's time.
        boottime_ns: time since boot.
    """
    try:
        state = json.loads(saved)
        if state["boot_id"] == boot_id:
            return Clock(boot_id, int(state["offset_ns"]), boottime_ns)
        passed_ns = max(0, wall_ns - int(state["wall_ns"]))
        resumed_ns = int(state["now_ns"]) + passed_ns
    except (ValueError, TypeError, KeyError):
        return Clock(boot_id, 0, boottime_ns)
    return Clock(boot_id, resumed_ns - boottime_ns(), boottime_ns)


def read_boot_id() -> str:
    """Return the kernel's identifier of this boot."""
    return BOOT_ID.read_text(encoding="ascii").strip()
