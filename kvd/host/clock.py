"""kvd's clock: never decreases, over restarts, reboots and changes of the wall clock (D17).

Within one boot it is CLOCK_BOOTTIME plus a fixed offset, so that sessions age while the machine is
suspended, too. After a reboot it continues from the last saved value, plus the time that has passed
since then by the wall clock (zero if that went backwards).
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
META_NAME = "clock"  # name of the saved state in the manifest
SAVE_EVERY_S = 60.0  # a reboot without a shutdown loses at most so much of sessions' idle time


class Clock:
    """The time of the cache engine.

    Args:
        boot_id: kernel's id of this boot, by which a later clock recognizes the same boot.
        offset_ns: offset that is added to the time since boot.
        boottime_ns: returns the time since boot, suspended time included.
    """

    def __init__(self, boot_id: str, offset_ns: int, boottime_ns: Callable[[], int]) -> None:
        self._boot_id = boot_id
        self._offset_ns = offset_ns
        self._boottime_ns = boottime_ns

    def now_ns(self) -> int:
        """Return the time in nanoseconds; never less than before."""
        return self._boottime_ns() + self._offset_ns

    def dump(self, wall_ns: int) -> str:
        """Return the clock's state, to be saved in the manifest every SAVE_EVERY_S.

        Args:
            wall_ns: current time of the wall clock.
        """
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
    """Continue a clock from its saved state.

    Args:
        saved: result of Clock.dump(); an empty or damaged text starts a new clock.
        boot_id: kernel's id of this boot.
        wall_ns: current time of the wall clock.
        boottime_ns: returns the time since boot.
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
    """Return the kernel's id of this boot."""
    return BOOT_ID.read_text(encoding="ascii").strip()
