"""How fast SSD is read, as far as it was seen."""

from kvd.core.io.reading import MEASURED_BYTES, ReadRate


def test_only_the_time_in_which_something_is_read_counts():
    """Reads at the same time share it."""
    rate = ReadRate()
    assert rate.estimate_ns(1000) == 0, "nothing is known"
    rate.on_begin(100)
    rate.on_begin(150)
    rate.on_end(1000, 200)
    rate.on_end(1000, 300)
    assert rate.estimate_ns(1000) == 100
    rate.on_begin(5000)
    rate.on_end(2000, 5200)
    assert rate.estimate_ns(1000) == 100


def test_a_disk_that_becomes_slower_is_noticed():
    """What was read last counts most."""
    rate = ReadRate()
    now_ns = 0
    for pace in (1, 1, 1, 1, 1, 1, 10, 10, 10):  # nanoseconds for so many bytes
        rate.on_begin(now_ns)
        now_ns += pace * 1000
        rate.on_end(MEASURED_BYTES // 2, now_ns)
    assert 7000 < rate.estimate_ns(MEASURED_BYTES // 2) < 10_000


def test_a_rate_is_the_mean_of_what_was_read_lately():
    """All counts the same until it is much; then what came before counts half."""
    rate = ReadRate()
    rate.on_begin(0)
    rate.on_end(1000, 100)
    rate.on_begin(100)
    rate.on_end(1000, 400)
    assert rate.estimate_ns(1000) == 200
    rate = ReadRate()
    rate.on_begin(0)
    rate.on_end(MEASURED_BYTES, 1_000_000)
    rate.on_begin(1_000_000)
    rate.on_end(MEASURED_BYTES, 3_000_000)  # now all of it counts half
    assert rate.estimate_ns(MEASURED_BYTES) == 1_500_000
    rate.on_begin(3_000_000)
    rate.on_end(MEASURED_BYTES, 9_000_000)
    assert rate.estimate_ns(MEASURED_BYTES) == (1_500_000 + 6_000_000) // 2
