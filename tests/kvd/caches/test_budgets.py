"""Which arenas of an earlier kvd have a size that the settings allow."""

import pytest

from kvd.caches.budgets import UNBOUNDED, Budgets
from kvd.config import DramSettings, Settings, SsdSettings
from tests.synthetic_engine import small_layout

LAYOUT = small_layout()
BLOCK = LAYOUT.block_bytes
SECTOR, HUGE = 4096, 2 << 20


def fits(tmp_path, num_slots, taken=0, page=SECTOR, extra=0, **dram):
    settings = Settings(
        runtime_dir=tmp_path,
        state_dir=tmp_path,
        dram=DramSettings(**dram),
        ssd=SsdSettings(bytes=0),
    )
    budgets = Budgets(settings, tmp_path)
    return budgets.fits(LAYOUT, num_slots * BLOCK + extra, page, taken * BLOCK)


@pytest.mark.parametrize(("num_slots", "fit"), [(19, False), (20, True), (21, False)])
def test_without_a_bound_an_arena_must_have_the_configured_size(tmp_path, num_slots, fit):
    """A changed dram.bytes takes effect at the next start."""
    assert fits(tmp_path, num_slots, bytes=20 * BLOCK + 5) == fit


def test_auto_accepts_any_size(tmp_path):
    """The available memory changes from start to start."""
    assert fits(tmp_path, 3)


def test_huge_pages_are_rounded_up(tmp_path):
    """The memory exceeds the slots by less than a page, which may be more than a slot."""
    rounded = {"page": HUGE, "extra": HUGE - BLOCK, "bytes": 20 * BLOCK}
    assert fits(tmp_path, 20, **rounded)
    assert fits(tmp_path, 20, total_bytes=20 * BLOCK, **rounded)
    assert not fits(tmp_path, 20 + HUGE // BLOCK, **rounded)


@pytest.mark.parametrize(
    ("num_slots", "taken", "fit"),
    [(20, 0, True), (10, 20, True), (11, 20, False), (10, 0, True), (21, 0, False)],
)
def test_with_a_total_bound_an_arena_may_be_smaller(tmp_path, num_slots, taken, fit):
    """It was made when others had taken the rest; a bound that was lowered takes effect."""
    bounds = {"bytes": 20 * BLOCK, "total_bytes": 30 * BLOCK}
    assert fits(tmp_path, num_slots, taken, **bounds) == fit


def test_ssd_is_measured_again(tmp_path):
    """The usage of another disk, which is mounted now, counts in the budget."""
    settings = Settings(runtime_dir=tmp_path, state_dir=tmp_path)
    budgets = Budgets(settings, tmp_path / "volumes")
    used = 4 * budgets.ssd_bytes
    (tmp_path / "volumes" / "layout").mkdir(parents=True)
    with (tmp_path / "volumes" / "layout" / "00000.segment").open("wb") as file:
        file.truncate(used)
    assert budgets.measure() == budgets.ssd_bytes == used


def test_a_disk_that_cannot_be_measured_sets_no_bound(tmp_path):
    """A guessed bound would evict stored sessions."""
    (tmp_path / "volumes" / "layout").mkdir(parents=True)
    segment = tmp_path / "volumes" / "layout" / "00000.segment"
    segment.symlink_to(segment)  # looking at it fails
    budgets = Budgets(Settings(runtime_dir=tmp_path, state_dir=tmp_path), tmp_path / "volumes")
    assert budgets.ssd_bytes_of(LAYOUT) == UNBOUNDED
