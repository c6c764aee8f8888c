"""Blocks of a small layout, for tests of volumes."""

from kvd.core.records.extent_shape import ExtentShape
from kvd.tiers.faults import NoFaults
from tests.kvd.tiers.disk import LAYOUT

SHAPE = ExtentShape(LAYOUT)
WHOLE = SHAPE.sectors_per_extent
EXTENT = SHAPE.full_bytes


class Failing(NoFaults):
    """Raises an errno at reads, writes or a write point; for one extent or all."""

    def __init__(self, number, *, read=False, write=False, point=None, extent=None):
        self.number, self.read, self.write = number, read, write
        self.point, self.extent = point, extent

    def before_read(self, extent):
        if self.read:
            raise OSError(self.number, "injected")

    def before_write(self, extent):
        if self.write and self.extent in (None, extent):
            raise OSError(self.number, "injected")

    def reach(self, point):
        if point is self.point:
            self.point = None  # once
            raise OSError(self.number, "injected")
