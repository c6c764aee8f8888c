"""Layouts that cannot be opened: kept, retried with growing pauses, and reported once."""

import os

import pytest

from kvd.caches.unavailable import LONGEST_PAUSE_S, UnavailableLayout, UnavailableLayouts
from kvd.errors import UnclearSelectionError, UnknownLayoutError
from kvd.tiers.arena_store import KeptArena
from kvd.tiers.manifest import LayoutRow


def layout_of(fingerprint):
    return UnavailableLayout(LayoutRow(fingerprint, b"", 8), None)


@pytest.fixture
def events():
    return []


@pytest.fixture
def layouts(events):
    return UnavailableLayouts(events.append)


def failing(why):
    def restore():
        raise OSError(why)

    return restore


def names(events):
    return [event.name for event in events]


def test_a_layout_is_unavailable_until_an_attempt_succeeds(layouts, events):
    """Both are reported, with the reason."""
    layout = layout_of("ab12")
    assert not layouts.attempt(layout, failing("no disk"))
    assert (len(layouts), layouts.get("ab12"), layout.why) == (1, layout, "no disk")
    assert layouts.attempt(layout, lambda: None)
    assert (len(layouts), layouts.get("ab12")) == (0, None)
    assert names(events) == ["layout_unavailable", "layout_available"]
    assert events[0].fields == {"layout": "ab12", "why": "no disk"}


def test_a_reason_is_reported_once_and_a_new_one_again(layouts, events):
    """Operators are told of changes only."""
    layout = layout_of("ab12")
    for why in ("no disk", "no disk", "no permission"):
        layouts.attempt(layout, failing(why))
    assert [event.fields["why"] for event in events] == ["no disk", "no permission"]


def test_a_layout_that_opens_at_once_is_not_reported(layouts, events):
    """It was never unavailable."""
    assert layouts.attempt(layout_of("ab12"), lambda: None)
    assert not events


def test_a_bug_is_not_retried(layouts):
    """It ends the daemon instead."""

    def restore():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        layouts.attempt(layout_of("ab12"), restore)
    assert not len(layouts)


def test_pauses_grow_up_to_a_bound():
    """Each is twice the previous one; a slow attempt is followed by ten times its own time."""
    layout = layout_of("ab12")
    pauses = []
    for _ in range(9):
        layout.record_failure("no disk", 100.0, 100.0)
        pauses.append(layout.try_at_s - 100.0)
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    layout.record_failure("no disk", 100.0, 120.0)
    assert (layout.may_try_at_s, layout.try_at_s) == (120.0 + 200.0, 120.0 + 200.0)
    assert layout.since_s == 100.0, "the first time that it failed"


def test_an_engine_gets_a_time_to_retry_at():
    """It is the time of the next attempt."""
    layout = layout_of("ab12" * 8)
    layout.record_failure("no disk", 100.0, 105.0)
    error = layout.error(110.0)
    assert error.retry_after_s == pytest.approx(45.0)
    assert "no disk" in error.message
    assert "kvd reopen ab12ab12ab12" in error.remedy


def test_only_due_layouts_are_retried(layouts):
    """Each layout has its own pause."""
    soon, later = layout_of("aa"), layout_of("bb")
    for layout in (soon, later):
        layouts.attempt(layout, failing("no disk"))
    soon.try_at_s = 0.0
    assert layouts.due() == [soon]


def test_a_layout_is_named_by_a_fingerprint_prefix(layouts):
    """The prefix must be unambiguous."""
    first, second = layout_of("aa11"), layout_of("aa22")
    for layout in (first, second):
        layouts.attempt(layout, failing("no disk"))
    assert layouts.find("aa2") is second
    with pytest.raises(UnclearSelectionError, match="2 unavailable layouts"):
        layouts.find("aa")
    for prefix in ("", "b"):
        with pytest.raises(UnknownLayoutError):
            layouts.find(prefix)
    layouts.drop(first)
    assert layouts.find("aa") is second


def test_its_memory_is_left_to_the_next_kvd(layouts):
    """The descriptors are closed, once; no arena is removed."""
    slots_fd, journal_fd = os.memfd_create("slots"), os.memfd_create("journal")
    kept = KeptArena("aa", "file", slots_fd, journal_fd)
    layout = UnavailableLayout(LayoutRow("aa", b"", 8), kept)
    layouts.attempt(layout, failing("no disk"))
    layouts.close()
    layouts.close()
    for descriptor in (slots_fd, journal_fd):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
