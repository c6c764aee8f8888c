"""Which connections are kept when there is no room for all."""

import random

import pytest

from shared.serving.http_connections import LOOPBACK, Bounds, ConnectionTable, Phase, address_of

UNFINISHED, ANSWERING, IDLE = Phase


def table_of(most, per_address=0):
    return ConnectionTable(Bounds(max_connections=most, max_per_address=per_address))


def test_the_connection_idle_for_longest_is_closed():
    """Those without a request go first, then idle ones; each kind in its order."""
    table = table_of(4)
    for name in "abcd":
        assert table.admit(name, "") == (True, None, "")
    table.move("a", ANSWERING)
    table.move("c", ANSWERING)
    table.move("c", IDLE)
    table.move("a", IDLE)
    cut = [table.admit(name, "").cut for name in "efgh"]
    assert cut == ["b", "d", "e", "f"]
    table.move("g", ANSWERING)
    table.move("h", ANSWERING)
    assert [table.admit(name, "").cut for name in "ij"] == ["c", "i"]
    assert table.phase_of("c") is None
    assert len(table) == 4


def test_a_connection_with_an_active_request_is_never_closed():
    """If all have one the new connection is refused, and nothing changes."""
    table = table_of(2)
    for name in "ab":
        table.admit(name, "")
        table.move(name, ANSWERING)
    assert table.admit("c", "") == (False, None, "places")
    assert table.phase_of("c") is None
    table.move("b", IDLE)
    assert table.admit("c", "") == (True, "b", "places")


def test_an_address_has_its_own_limit():
    """One with too many loses its own, however idle others are; without a limit it loses none."""
    table = table_of(10, per_address=2)
    for name, address in (("a", "x"), ("b", "y"), ("c", "y"), ("d", ""), ("e", ""), ("f", "")):
        assert table.admit(name, address).why == ""
    assert table.admit("g", "y") == (True, "b", "address")
    for name in "cg":
        table.move(name, ANSWERING)
    assert table.admit("h", "y") == (False, None, "address")
    table.remove("c")
    assert table.admit("h", "y") == (True, None, "")


def test_some_places_are_reserved():
    """One in sixteen is for requests of reserved paths."""
    table = table_of(32)
    answered = 0
    for name in range(32):
        table.admit(name, "")
        if table.may_answer():
            table.move(name, ANSWERING)
            answered += 1
    assert answered == 30


@pytest.mark.parametrize("most", [1, 2])
def test_with_few_places_one_request_is_answered(most):
    """However few there are, one request is answered."""
    table = table_of(most)
    table.admit("a", "")
    assert table.may_answer()


def test_closed_connections_leave_nothing():
    """The number of connections equals the sum of the phases', in any order of events."""
    chance, table, here = random.Random(7), table_of(20, per_address=6), set()  # noqa: S311
    for name in range(3000):
        admission = table.admit(name, chance.choice(["", "x", "y", "z", "w"]))
        here.discard(admission.cut)
        if admission.is_in:
            here.add(name)
        for one in chance.sample(sorted(here), len(here) // 3):
            table.move(one, chance.choice(list(Phase)))
        for one in chance.sample(sorted(here), len(here) // 5):
            table.remove(one)
            table.remove(one)
            here.discard(one)
        assert len(table) == len(here) <= 20
        assert all(table.phase_of(one) is not None for one in here)
    for one in here:
        table.remove(one)
    assert table.longest_waiting() is None
    assert not table._by_address


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("", ""),
        ("127.0.0.9", ""),
        ("::1", ""),
        ("::ffff:127.0.0.1", ""),
        ("203.0.113.9", "203.0.113.9"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_addresses_are_grouped_by_network(host, address):
    """Clients that can change addresses within a network share its limit."""
    assert address_of(host, LOOPBACK) == address
