"""Tables of the command line, and the result of `kvd verify`."""

import io
from datetime import datetime

import pytest
from rich.console import Console

from kvd.cli import events, tiers
from kvd.errors import CorruptionFoundError, UnverifiedError
from kvd.views import session_views, stats_views, views
from kvd.views.views import Rates
from shared.pb.kvd.v1 import kvd_pb2
from tests.cli.fixed_reports import FOLLOWER


def _text(*tables):
    out = io.StringIO()
    console = Console(file=out, width=200)
    for table in tables:
        console.print(table)
    return out.getvalue()


def _session(**facts):
    return kvd_pb2.SessionInfo(bytes=100, expires_in_s=-1, **facts)


@pytest.mark.parametrize(
    ("dram_bytes", "word"), [(100, "hot"), (50, "warm"), (0, "cold")]
)  # fmt: skip
def test_the_load_speed_of_a_session(dram_bytes, word):
    """All in DRAM is hot, some warm, none cold."""
    assert views.temperature(_session(dram_bytes=dram_bytes)) == word


def test_pins_and_ttl_of_a_session_are_shown():
    """Hard and soft pins have different words, and the TTL has its source."""
    soft = _session(pin=kvd_pb2.PIN_SOFT, ttl_source=kvd_pb2.TTL_SOURCE_TENANT)
    hard = _session(pin=kvd_pb2.PIN_HARD, ttl_source=kvd_pb2.TTL_SOURCE_SESSION)
    shown = [_text(session_views.session_table(info)) for info in (soft, hard)]
    assert "soft-pinned" in shown[0]
    assert "its tenant's" in shown[0]
    assert "soft" not in shown[1]
    assert "pinned" in shown[1]
    assert "its own" in shown[1]


def test_places_of_a_block_are_shown():
    """Its tiers, and its pending operations."""
    blocks = (
        kvd_pb2.BlockInfo(tiers=[kvd_pb2.TIER_DRAM], dirty=True, verified=True),
        kvd_pb2.BlockInfo(tiers=[kvd_pb2.TIER_DRAM, kvd_pb2.TIER_SSD], hashed=True),
        kvd_pb2.BlockInfo(tiers=[kvd_pb2.TIER_SSD], hashed=True),
    )
    _, first, second, third = _text(session_views.blocks_table(blocks, 200)).splitlines()
    assert first.rstrip().endswith("dram, dirty, not hashed")
    assert second.rstrip().endswith("dram+ssd, unverified")
    assert third.rstrip().endswith(" ssd")


def test_a_quarantined_lease_is_marked():
    """The table has its holder, the state of that process, and that it is quarantined."""
    lease = kvd_pb2.LeaseInfo(
        lease_id=5,
        kind=kvd_pb2.LEASE_KIND_STORE,
        pid=77,
        engine_name="svc",
        process_status="stopped",
        quarantined=True,
    )
    (row,) = _text(views.leases_table([lease], 200)).splitlines()[1:]
    for word in ("store", "77", "svc stopped", "quarantined"):
        assert word in row


def test_stats_without_any_layout():
    """A kvd that has never seen an engine has tables, too."""
    assert "kvd 1" in _text(*stats_views.stats_tables(kvd_pb2.GetStatsResponse(version="1"), 200))


def test_stats_show_the_largest_tenants():
    """Of very many tenants only the largest are shown, with their quotas."""
    tenants = [
        kvd_pb2.TenantStats(tenant=f"t{number}", used_bytes=number, has_quota=bool(number % 2))
        for number in range(100)
    ]
    stats = kvd_pb2.GetStatsResponse(layouts=[kvd_pb2.LayoutStats(tenants=tenants)])
    text = _text(*stats_views.stats_tables(stats, 200))
    assert "t99" in text
    assert "t79 " not in text
    assert "20 of 100" in text


def test_stats_show_the_stores_bill():
    """Bytes in each direction, and requests of each kind, since the follower began."""
    text = _text(tiers.remote_line(FOLLOWER, FOLLOWER.started_unix_s + 3600))
    assert "1h ago" in text
    assert "115.0 GB sent, 9.2 GB received; 11,602 requests: 2,345 find, 3,456 get" in text


def test_stats_show_reads_ahead():
    """Of each layout, with their use."""
    counters = {
        "ssd_read_bytes": 3 << 20,
        "ssd_written_bytes": 5 << 20,
        "prefetch_blocks": 41,
        "prefetch_hits": 29,
        "prefetch_late": 7,
        "prefetch_wasted": 5,
        "prefetch_cancelled": 2,
    }
    layout = kvd_pb2.LayoutStats(model="ab12", counters=counters)
    text = _text(*stats_views.stats_tables(kvd_pb2.GetStatsResponse(layouts=[layout]), 200))
    (row,) = [line for line in text.splitlines() if line.split()[:1] == ["ab12"] and "41" in line]
    assert row.split() == ["ab12", "3.0", "MB", "5.0", "MB", "41", "29", "7", "5", "2"]


def test_an_event_is_a_line():
    """Date, time and zone are always present; the tenant if it is not the default one."""
    key = kvd_pb2.SessionKey(tenant="acme", session_id="a")
    event = kvd_pb2.Event(unix_s=1e9, name="session_cut", session=key, fields={"num_tokens": "3"})
    day, clock, *rest = events.event_line(event).split()
    assert datetime.fromisoformat(f"{day} {clock}").timestamp() == 1e9  # it has its zone
    assert rest == ["session_cut", "acme/a", "tokens=3"]
    event.session.tenant = "default"
    assert events.event_line(event).split()[3] == "a"
    assert events.event_line(kvd_pb2.Event(name="restored")).split()[2:] == ["restored", "-"]


def test_an_events_numbers_are_numbers():
    """In JSON; a key of digits stays text."""
    fields = {"num_tokens": "3", "why": "full", "block": "12", "layout": "34"}
    document = events.event_document(kvd_pb2.Event(name="session_cut", fields=fields))
    assert document["fields"] == {**fields, "num_tokens": 3}


def test_rates_between_two_samples():
    """By kvd's own clock; after a restart since the start."""

    def look(pid, uptime_s, **counters):
        layout = kvd_pb2.LayoutStats(layout="ff", counters=counters)
        process = kvd_pb2.ProcessStats(pid=pid, uptime_s=uptime_s, cpu_s=uptime_s / 2)
        return kvd_pb2.GetStatsResponse(layouts=[layout], process=process)

    now = look(7, 30.0, load_hits=60, load_misses=20)
    rates = Rates(now, look(7, 10.0, load_hits=50, load_misses=20))
    assert (rates.seconds, rates.count("ff", "load_hits"), rates.cpu_share) == (20.0, 10, 0.5)
    assert rates.share("ff", "load_hits", "load_misses") == 1.0
    assert rates.per_second("ff", "load_hits", "load_misses") == 0.5
    for other in (Rates(now), Rates(now, look(6, 10.0, load_hits=50)), Rates(now, now)):
        assert other.count("ff", "load_hits") == 60
        assert not other.is_of_interval
    assert Rates(now, look(7, 29.0)).share("gone", "load_hits", "load_misses") is None


def test_progress_is_a_share_of_all_copies():
    """The line counts the copies of both tiers."""
    progress = kvd_pb2.VerifyProgress(
        num_copies=8,
        dram=kvd_pb2.TierVerified(num_blocks=1, bytes=1024, num_corrupt=1),
        ssd=kvd_pb2.TierVerified(num_blocks=3, bytes=1024),
    )
    line = views.verify_line(progress)
    assert line.split() == ["50%", "4", "copies,", "2.0", "KB,", "1", "corrupt"]


def _report(dram_corrupt=0, ssd_corrupt=0, repaired=0, lost=0, errors=0):
    return kvd_pb2.VerifyProgress(
        dram=kvd_pb2.TierVerified(num_corrupt=dram_corrupt),
        ssd=kvd_pb2.TierVerified(num_corrupt=ssd_corrupt),
        num_repaired=repaired,
        num_lost=lost,
        num_errors=errors,
    )


@pytest.mark.parametrize(
    ("report", "repair", "error", "remedy"),
    [
        (_report(ssd_corrupt=1), False, CorruptionFoundError, "--repair"),
        (_report(dram_corrupt=1), False, CorruptionFoundError, "dropped"),
        (_report(ssd_corrupt=2, repaired=1, lost=1), True, CorruptionFoundError, "recomputed"),
        (_report(errors=1), True, UnverifiedError, "again"),
    ],
)
def test_what_makes_a_verification_fail(report, repair, error, remedy):
    """Exit 1 for corrupt copies that were not replaced, and for read errors."""
    with pytest.raises(error) as raised:
        tiers.check_report(report, repair=repair)
    assert raised.value.exit_code == 1
    assert remedy in str(raised.value)


@pytest.mark.parametrize(
    ("report", "repair"), [(_report(), False), (_report(ssd_corrupt=2, repaired=2), True)]
)
def test_what_makes_a_verification_pass(report, repair):
    """Exit 0 when no copy is wrong, or none any more."""
    tiers.check_report(report, repair=repair)
