"""Progress of pending loads: the minimum of their operations, in real progress words."""

import pytest

from kvd.runtime.completions import IoHistograms
from kvd.runtime.load_tracking import LoadTracker
from kvd.tiers.progress import Progress
from shared.kvd_client.arena_map import FAILED_BIT, LAYERS_MASK, ProgressWords

LEASE, OTHER = (7 << 40) + 1, (7 << 40) + 2


class World:
    """A tracker of a layout with 5 layers, and an engine's view of it."""

    def __init__(self, num_words=4):
        self.progress = Progress(num_words)
        self.words = ProgressWords(self.progress.fd, num_words)
        self.tracker = LoadTracker(num_layers=5, histograms=IoHistograms())
        self.tracker.progress = self.progress
        self.num_wakes = 0

    def wake(self):
        self.num_wakes += 1

    def begin(self, *op_ids):
        for op_id in op_ids:
            self.tracker.begin(op_id)

    def track(self, lease_id, *op_ids):
        self.tracker.track(lease_id, op_ids, self.wake)

    def ready(self, lease_id):
        """Return (layers ready, whether it failed)."""
        word = self.words.word(self.tracker.index_of(lease_id))
        return word & LAYERS_MASK, bool(word & FAILED_BIT)


@pytest.fixture
def world():
    made = World()
    yield made
    made.progress.close_all()


def test_the_slowest_operation_determines_the_progress(world):
    """A layer is ready when all reads have brought it; each step wakes the engine once."""
    world.begin(1, 2)
    world.track(LEASE, 1, 2)
    for op_id, layers, expected in ((1, 2, 0), (2, 1, 1), (2, 5, 2), (1, 5, 5)):
        world.tracker.record_progress(op_id, layers)
        assert world.ready(LEASE) == (expected, False)
    assert world.num_wakes == 3


def test_progress_of_an_active_read_counts(world):
    """A second load that joins the read starts from its progress."""
    world.begin(1)
    world.track(LEASE, 1)
    world.tracker.record_progress(1, 3)
    world.track(OTHER, 1)
    assert (world.ready(LEASE), world.ready(OTHER)) == ((3, False), (3, False))
    world.tracker.record_progress(1, 5)
    world.tracker.record_end(1, is_good=True)
    assert (world.ready(LEASE), world.ready(OTHER)) == ((5, False), (5, False))


def test_a_failed_operation_fails_its_loads_only(world):
    """And no others."""
    world.begin(1, 2)
    world.track(LEASE, 1)
    world.track(OTHER, 2)
    world.tracker.record_end(1, is_good=False)
    assert (world.ready(LEASE)[1], world.ready(OTHER)[1]) == (True, False)


def test_an_operation_may_replace_another(world):
    """A load that is tracked again before the failure is reported has not failed."""
    world.begin(1, 2)
    world.track(LEASE, 1, 2)
    world.tracker.record_progress(2, 5)
    world.begin(3)
    world.track(LEASE, 2, 3)  # the engine reads from SSD what was corrupt in DRAM
    world.tracker.record_end(1, is_good=False)
    assert world.ready(LEASE) == (0, False)
    world.tracker.record_progress(3, 5)
    assert world.ready(LEASE) == (5, False)


def test_words_are_reused(world):
    """An ended load's word is free for the next one, and late progress does not touch it."""
    world.begin(1)
    for lease_id in range(LEASE, LEASE + 10):
        world.track(lease_id, 1)
        assert world.tracker.index_of(lease_id) is not None
        world.tracker.untrack(lease_id)
        assert world.tracker.index_of(lease_id) is None
    world.begin(2)
    world.track(OTHER, 2)
    world.tracker.record_progress(1, 5)
    world.tracker.record_end(1, is_good=False)
    assert world.ready(OTHER) == (0, False)


def test_a_load_without_a_word():
    """It is tracked all the same, without publications."""
    world = World(num_words=1)
    world.begin(1)
    world.track(LEASE, 1)
    world.track(OTHER, 1)
    assert world.tracker.index_of(OTHER) is None
    world.tracker.record_progress(1, 2)
    world.tracker.untrack(OTHER)
    assert world.ready(LEASE) == (2, False)
    world.tracker.record_end(1, is_good=False)
    world.progress.close_all()


def test_ended_loads_are_forgotten(world):
    """Their operations as well."""
    world.begin(1, 2)
    world.track(LEASE, 1, 2)
    world.tracker.record_end(1, is_good=True)
    world.tracker.untrack(LEASE)
    world.tracker.record_end(2, is_good=True)
    tracker = world.tracker
    assert (tracker._running, tracker._loads, tracker._leases_of) == ({}, {}, {})
