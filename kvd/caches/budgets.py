"""Budgets: how much of each tier the settings give to each layout."""

import shutil
from pathlib import Path

from kvd.config import Settings
from kvd.tiers.arena import dram_bytes
from kvd.tiers.space_budget import UNBOUNDED
from shared.process.log import get_logger
from shared.types.kv_layout import KVLayout

AUTO_FRACTION = 0.25  # share of the state directory's free space, for the SSD tier

log = get_logger(__name__)


class Budgets:
    """The sizes of the tiers, and each layout's part of them.

    Attributes:
        ssd_bytes: most bytes of all segments of all layouts.
    """

    def __init__(self, settings: Settings, volumes: Path) -> None:
        """Measure the SSD tier.

        Args:
            settings: kvd's settings.
            volumes: directory of all volumes.
        """
        self._settings = settings
        self._volumes = volumes
        self.ssd_bytes = self.measure()

    def measure(self) -> int:
        """Measure the size of the SSD tier again, which "auto" derives from free space; return it.

        A disk that cannot be measured counts as unbounded: with a small bound, stored blocks would
        be dropped. No space is allocated on such a disk (kvd/tiers/segment_files.py).
        """
        try:
            self.ssd_bytes = ssd_bytes(self._settings.ssd.bytes, self._volumes)
        except OSError as error:
            log.warning("ssd_not_measured", directory=str(self._volumes), error=str(error))
            self.ssd_bytes = UNBOUNDED
        return self.ssd_bytes

    def arena_bytes_of(self, layout: KVLayout) -> int:
        """Return the configured bytes of the layout's arena; "auto" is measured now."""
        own = self._settings.layout_settings(layout).dram
        return dram_bytes(self._settings.dram.bytes if own is None else own)

    def free_dram_bytes(self, taken_bytes: int) -> int | None:
        """Return the bytes left for arenas after `taken_bytes`; None: only the machine bounds."""
        total = self._settings.dram.total_bytes
        return None if total is None else max(0, total - taken_bytes)

    def fits(self, layout: KVLayout, arena_bytes: int, page_bytes: int, taken_bytes: int) -> bool:
        """Whether the size of an earlier kvd's arena agrees with the settings.

        With "auto" any size does: free memory differs from start to start. With a bound on all
        arenas, an arena may be smaller than configured: when it was created, other arenas may have
        left no more.

        Args:
            layout: the arena's layout.
            arena_bytes: size of its slots, up to the end of the last page.
            page_bytes: size of its memory's pages.
            taken_bytes: bytes of the arenas that are in use already.
        """
        free_bytes = self.free_dram_bytes(taken_bytes)
        if free_bytes is not None and arena_bytes >= free_bytes + page_bytes:
            return False
        configured = self._settings.layout_settings(layout).dram or self._settings.dram.bytes
        if configured is None:
            return True
        excess_bytes = arena_bytes - configured // layout.block_bytes * layout.block_bytes
        return excess_bytes < page_bytes and (excess_bytes >= 0 or free_bytes is not None)

    def ssd_bytes_of(self, layout: KVLayout) -> int:
        """Return the bytes to which the layout's volume may grow."""
        own = self._settings.layout_settings(layout).ssd
        return self.ssd_bytes if own is None else min(own, self.ssd_bytes)


def ssd_bytes(configured: int | None, volumes: Path) -> int:
    """Return the size of the SSD tier: as configured, or a part of the space that it may use.

    A size that is not configured is never below the bytes in use.

    Raises:
        OSError: the disk cannot be measured.
    """
    if configured is not None:
        return configured
    used = sum(path.stat().st_size for path in volumes.glob("*/*.segment"))
    existing = next(path for path in (volumes, *volumes.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return max(used, int((free + used) * AUTO_FRACTION))
