"""Bandwidth limits: of one caller, and of threads that share one."""

from kvd.host.pacing import Pace, SharedPace


def test_pace_spreads_bytes_evenly():
    """Early work delays later work; a pause is not made up for."""
    pace = Pace(100)
    assert pace.resume_at(50, now_s=10.0) == 10.5
    assert pace.resume_at(50, now_s=10.2) == 11.0
    assert pace.resume_at(0, now_s=12.0) == 12.0
    assert pace.resume_at(100, now_s=20.0) == 21.0


def test_threads_share_a_rate() -> None:
    """Each waits until the bytes taken before would have passed."""
    now_s, slept = 100.0, []
    pace = SharedPace(1000, lambda: now_s, slept.append)
    for num_bytes in (500, 2000, 1):
        pace.take(num_bytes)
    now_s = 200.0
    pace.take(1)
    assert slept == [0.5, 2.5]
    SharedPace(0, lambda: now_s, slept.append).take(1 << 40)
    assert slept == [0.5, 2.5]
