"""The screens of kvd top, at widths that terminals have."""

import io

import pytest
from rich.console import Console

from kvd.top.screen import Act, Command, Screen
from kvd.top.views import Snapshot, points, top_view, trend_line
from shared.pb.kvd.v1 import kvd_pb2

SIZES = [(80, 24), (140, 40), (40, 10)]


def stats(uptime_s=100.0, **counters):
    """Make statistics of two tiers, one engine, counters."""
    layout = kvd_pb2.LayoutStats(
        layout="ff",
        model="5e" * 16,
        num_sessions=60,
        tiers=[
            kvd_pb2.TierStats(
                tier=kvd_pb2.TIER_DRAM, capacity_bytes=1 << 30, used_bytes=3 << 28, num_blocks=7
            ),
            kvd_pb2.TierStats(
                tier=kvd_pb2.TIER_SSD,
                capacity_bytes=1 << 40,
                degraded=True,
                degraded_reason="full",
                surplus_bytes=2 << 30,
            ),
        ],
        dirty_bytes=5 << 20,
        counters=counters,
        queue=kvd_pb2.QueueStats(
            waiting_jobs=5, running_sessions=2, prefetch_window=11, eviction_window=222
        ),
    )
    engine = kvd_pb2.EngineInfo(name="inference-svc@llama", pid=77, queue_jobs=5, running_jobs=2)
    process = kvd_pb2.ProcessStats(pid=1, uptime_s=uptime_s, cpu_s=uptime_s / 10)
    return kvd_pb2.GetStatsResponse(
        version="1", layouts=[layout], engines=[engine], process=process
    )


def session(number):
    key = kvd_pb2.SessionKey(tenant="acme", model="5e" * 16, session_id=f"conversation-{number:02}")
    return kvd_pb2.SessionInfo(session=key, num_tokens=number, bytes=100, expires_in_s=-1)


LOOKS = [
    points(
        stats(102.0 + 2 * number, load_hits=5 + number, load_misses=10, load_tokens_dram=number**2),
        stats(100.0 + 2 * number, load_hits=4 + number, load_misses=10),
    )
    for number in range(100)
]
SEEN = Snapshot(
    stats(110.0, load_hits=30, load_misses=10, load_tokens_dram=500),
    stats(100.0, load_hits=0, load_misses=10),
    LOOKS,
    [session(number) for number in range(60)],
    60,
)


def lines(seen, screen, width, height):
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    options = console.options.update(height=height)
    rendered = console.render_lines(top_view(seen, screen, width, height), options, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in rendered]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("shown", ["list", "help", "session", "question"])
def test_every_screen_fits(width, height, shown):
    """No line is longer than the terminal's width, and there are no more than its height."""
    detail = kvd_pb2.DescribeSessionResponse(
        info=session(3), history=[kvd_pb2.SessionMove(kind="stored", num_blocks=3)] * 40
    )
    seen = Snapshot(SEEN.stats, SEEN.before, LOOKS, SEEN.sessions, 60, detail)
    screens = {
        "list": Screen(),
        "help": Screen(shows_help=True),
        "session": Screen(shows_session=True),
        "question": Screen(question=Command(Act.FLUSH, ("acme", "m", "x" * 128))),
    }
    found = [line for line in lines(seen, screens[shown], width, height) if line]
    assert max(map(len, found)) <= width
    if shown != "help":
        assert len(found) <= height


def test_the_last_interval_is_shown():
    """Hit rate and tokens per second since the last sample; present windows and jobs."""
    text = "\n".join(lines(SEEN, Screen(), 100, 30))
    assert "hits 100% of 3.0 loads/s" in text
    assert "50 dram" in text
    assert "5 wait, 2 run" in text
    assert "prefetch 11, eviction 222" in text
    assert "75%  768.0 MB of 1.0 GB" in text
    assert "shrinks by 2.0 GB  degraded: full" in text
    assert "inference-svc@llama  pid 77" in text


def test_the_list_scrolls_with_the_selection():
    """The selected session is always visible, and the keys are at the foot."""
    for number in (0, 30, 59):
        name = ("acme", "5e" * 16, f"conversation-{number:02}")
        found = lines(SEEN, Screen(chosen=name), 80, 24)
        assert any(line.startswith(f"conversation-{number:02}") for line in found)
        assert "q quit" in [line for line in found if line][-1]


def test_a_problem_is_shown_at_the_foot():
    """The last sample stays, with the error."""
    seen = Snapshot(SEEN.stats, None, (), SEEN.sessions, 60, problem="no kvd answers; asking again")
    found = [line for line in lines(seen, Screen(), 80, 24) if line]
    assert found[-1] == "no kvd answers; asking again"
    assert found[0].startswith("kvd 1")


def test_the_last_samples_are_bars():
    """A hit rate fills its bar, rates are relative to their maximum; the newest is at the right."""
    one = points(
        stats(102.0, load_hits=5, load_misses=10, load_tokens_ssd=10),
        stats(100.0, load_hits=5, load_misses=5, load_tokens_ssd=0),
    )
    two = points(
        stats(104.0, load_hits=15, load_misses=10, load_tokens_ssd=30, ssd_read_bytes=7),
        stats(102.0, load_hits=5, load_misses=10, load_tokens_ssd=10),
    )
    line = trend_line("ff", [{}, one, two], 80).plain
    assert line.split() == [
        *("trend", "hit", "rate", "▁█", "tokens/s", "▅█", "ssd", "bytes/s", "▁█"),
    ]
    assert len(line) <= 80


def test_a_restart_leaves_a_gap():
    """No rate is negative; a layout that did not exist is blank."""
    assert points(stats(1.0, load_hits=5), stats(100.0, load_hits=50)) == {}
    assert points(stats(1.0), None) == {}
    assert not set("▁▂▃▄▅▆▇█") & set(trend_line("other", LOOKS, 80).plain)


def test_a_low_terminal_keeps_its_lines_for_sessions():
    """Bars are shown where there is room."""
    assert any(line.startswith("trend") for line in lines(SEEN, Screen(), 80, 24))
    assert not any(line.startswith("trend") for line in lines(SEEN, Screen(), 80, 16))
