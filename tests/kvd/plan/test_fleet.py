"""When servers of a fleet are absent."""

from kvd.plan.fleet import ONE_SERVER, FleetOptions, draw_outages
from shared.types.units import NS_PER_S

DAY_S = 86_400.0


def test_servers_fail_at_the_given_rate():
    """Ten a day of each kind, less those that would fall into an absence."""
    fleet = FleetOptions(40, 40, failures_per_day=5, drains_per_day=5, away_s=60)
    drawn = draw_outages(fleet, DAY_S)
    assert 300 < len(drawn) < 500
    assert 100 < sum(outage.is_lost for outage in drawn) < 300
    assert drawn == sorted(drawn) == draw_outages(fleet, DAY_S)
    assert drawn[-1].starts_ns < DAY_S * NS_PER_S


def test_no_server_is_absent_twice_at_a_time():
    """The second absence is left out."""
    fleet = FleetOptions(3, 3, failures_per_day=500, away_s=600)
    back_ns = dict.fromkeys(range(3), 0)
    outages = draw_outages(fleet, DAY_S)
    assert {outage.server for outage in outages} == set(range(3))
    for outage in outages:
        assert outage.starts_ns >= back_ns[outage.server]
        back_ns[outage.server] = outage.starts_ns + 600 * NS_PER_S


def test_one_server_is_always_present():
    """Unless the options allow otherwise."""
    assert draw_outages(ONE_SERVER, DAY_S) == []
    assert ONE_SERVER.share == 1.0
    assert FleetOptions(1000, 16).share == 0.016
