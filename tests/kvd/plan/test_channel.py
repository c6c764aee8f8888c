"""A channel transfers one item at a time, in order of arrival."""

from kvd.plan.channel import Channel
from shared.types.units import NS_PER_S


def test_transfers_follow_one_another():
    """One waits for the active transfer and those before it."""
    channel = Channel(bytes_per_s=1e9)  # one byte per nanosecond
    assert channel.is_idle
    assert channel.next_ns() is None
    assert channel.waits_ns(0) == 0
    first = channel.move(1, 100, now_ns=0)
    assert (channel.waits_ns(40), channel.remaining_ns(40)) == (60, 60)
    second = channel.move(2, 50, now_ns=40)
    assert (channel.waits_ns(40), channel.remaining_ns(40)) == (110, 60)
    assert channel.end(99) is None
    assert channel.end(100) is first
    assert not channel.is_idle
    assert channel.next_ns() == 150
    assert channel.waits_ns(100) == 50
    assert channel.end(150) is second
    assert channel.is_idle
    assert channel.bytes_moved == 150


def test_two_transfers_of_one_session_differ():
    """A cancelled one is distinguished from its replacement."""
    channel = Channel(bytes_per_s=NS_PER_S)
    assert channel.move(1, 10, now_ns=0) != channel.move(1, 10, now_ns=0)
