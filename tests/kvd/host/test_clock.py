"""kvd's clock never goes back, whatever restarts, reboots and wall clocks do."""

import pytest

from kvd.host.clock import read_boot_id, resume_clock

S = 1_000_000_000


class Boottime:
    """A boottime clock that tests set."""

    def __init__(self, now_ns):
        self.now_ns = now_ns

    def __call__(self):
        return self.now_ns


def test_a_restart_within_one_boot_continues():
    """A restart without a reboot neither loses nor adds time."""
    boottime = Boottime(100 * S)
    clock = resume_clock("", "boot-1", 0, boottime)
    assert clock.now_ns() == 100 * S
    saved = clock.dump(wall_ns=5000 * S)
    boottime.now_ns = 130 * S
    # The wall clock has jumped by a year: it does not matter within one boot.
    resumed = resume_clock(saved, "boot-1", 36_000_000 * S, boottime)
    assert resumed.now_ns() == 130 * S


def test_a_reboot_continues_from_the_saved_time():
    """After it the time that has passed by the wall clock is added."""
    saved = resume_clock("", "boot-1", 0, Boottime(1000 * S)).dump(wall_ns=5000 * S)
    after = resume_clock(saved, "boot-2", 5060 * S, Boottime(3 * S))
    assert after.now_ns() == 1060 * S


def test_a_wall_clock_set_back_does_not_turn_time_back():
    """A machine that boots with a wrong wall clock continues where it was."""
    saved = resume_clock("", "boot-1", 0, Boottime(1000 * S)).dump(wall_ns=5000 * S)
    assert resume_clock(saved, "boot-2", 0, Boottime(3 * S)).now_ns() == 1000 * S


@pytest.mark.parametrize("saved", ["", "junk", "[]", "{}", '{"boot_id": "boot-1"}', "null"])
def test_damaged_state_starts_a_new_clock(saved):
    """Without a usable saved state time starts with the boot."""
    assert resume_clock(saved, "boot-1", 0, Boottime(7 * S)).now_ns() == 7 * S


def test_offsets_accumulate_over_boots():
    """Each boot continues the one before."""
    saved = ""
    for boot in range(3):
        clock = resume_clock(saved, f"boot-{boot}", 100 * boot * S, Boottime(boot * S))
        saved = clock.dump(wall_ns=100 * boot * S)
    assert clock.now_ns() == 200 * S


def test_the_kernel_has_a_boot_id():
    """The identifier exists and does not change."""
    assert read_boot_id() == read_boot_id() != ""
