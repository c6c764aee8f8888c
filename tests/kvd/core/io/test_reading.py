"""The read rate of SSD, as measured by reads."""

from kvd.core.io.reading import MEASURED_BYTES, ReadRate


def test_only_time_with_active_reads_counts():
    """Simultaneous reads share it."""
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


def test_a_slower_disk_is_noticed():
    """The latest reads have the largest weight."""
    rate = ReadRate()
    now_ns = 0
    for pace in (1, 1, 1, 1, 1, 1, 10, 10, 10):  # nanoseconds for so many bytes
        rate.on_begin(now_ns)
        now_ns += pace * 1000
        rate.on_end(MEASURED_BYTES // 2, now_ns)
    assert 7000 < rate.estimate_ns(MEASURED_BYTES // 2) < 10_000


def test_the_rate_is_the_mean_of_recent_reads():
    """All reads have equal weight until there are many; then older ones count half."""
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
    rate.on_end(MEASURED_BYTES, 3_000_000)  # now all reads count half
    assert rate.estimate_ns(MEASURED_BYTES) == 1_500_000
    rate.on_begin(3_000_000)
    rate.on_end(MEASURED_BYTES, 9_000_000)
    assert rate.estimate_ns(MEASURED_BYTES) == (1_500_000 + 6_000_000) // 2
