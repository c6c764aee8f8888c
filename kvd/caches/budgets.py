"""How much of each tier a layout may have, as the settings say."""

import shutil
from pathlib import Path

from kvd.config import Settings
from kvd.tiers.arena import dram_bytes
from shared.process.log import get_logger
from shared.types.kv_layout import KVLayout

AUTO_FRACTION = 0.25  # of the state directory's free space, for the SSD tier
UNBOUNDED = 1 << 60  # bytes: more than any disk has

log = get_logger(__name__)


class Budgets:
    """Each layout's part of the tiers.

    Attributes:
        ssd_bytes: bound on all segments of all layouts, in bytes.
    """

    def __init__(self, settings: Settings, volumes: Path) -> None:
        """Measure what "auto" means for SSD; `volumes` is the directory of all segments."""
        self._settings = settings
        self._volumes = volumes
        self.ssd_bytes = self.measure()

    def measure(self) -> int:
        """Measure again what "auto" means for SSD; returns the bytes of all segments.

        A disk that cannot be measured bounds nothing: a small number would have what is stored
        dropped. It takes nothing either (kvd/tiers/segment_files.py).
        """
        try:
            self.ssd_bytes = ssd_bytes(self._settings.ssd.bytes, self._volumes)
        except OSError as error:
            log.warning("ssd_not_measured", directory=str(self._volumes), error=str(error))
            self.ssd_bytes = UNBOUNDED
        return self.ssd_bytes

    def arena_bytes_of(self, layout: KVLayout) -> int:
        """Return the bytes that an arena of the layout is to have; "auto" is measured now."""
        own = self._settings.layout_settings(layout).dram
        return dram_bytes(self._settings.dram.bytes if own is None else own)

    def free_dram_bytes(self, taken_bytes: int) -> int | None:
        """Return what arenas may have beside `taken_bytes`; None: no bound but the machine's."""
        total = self._settings.dram.total_bytes
        return None if total is None else max(0, total - taken_bytes)

    def fits(self, layout: KVLayout, arena_bytes: int, page_bytes: int, taken_bytes: int) -> bool:
        """Whether an arena that was left is of a size that the settings ask for.

        With "auto" any size will do: what is available changes from start to start. With a bound on
        all, an arena may be smaller than it was to be: others had taken the rest when it was made.

        Args:
            layout: the arena's layout.
            arena_bytes: its size, up to the end of its last page.
            page_bytes: size of its memory's pages.
            taken_bytes: of the arenas that are in use already.
        """
        free_bytes = self.free_dram_bytes(taken_bytes)
        if free_bytes is not None and arena_bytes >= free_bytes + page_bytes:
            return False
        wanted = self._settings.layout_settings(layout).dram or self._settings.dram.bytes
        if wanted is None:
            return True
        too_many = arena_bytes - wanted // layout.block_bytes * layout.block_bytes
        return too_many < page_bytes and (too_many >= 0 or free_bytes is not None)

    def ssd_bytes_of(self, layout: KVLayout) -> int:
        """Return the bytes that the volume of the layout may grow to."""
        own = self._settings.layout_settings(layout).ssd
        return self.ssd_bytes if own is None else min(own, self.ssd_bytes)


def ssd_bytes(configured: int | None, volumes: Path) -> int:
    """Return the bytes of the SSD tier: as configured, or part of the free, at least all used."""
    if configured is not None:
        return configured
    used = sum(path.stat().st_size for path in volumes.glob("*/*.segment"))
    existing = next(path for path in (volumes, *volumes.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return max(used, int((free + used) * AUTO_FRACTION))
