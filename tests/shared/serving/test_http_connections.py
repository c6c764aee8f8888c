"""Which connections stay when there is no room for all."""

import random

import pytest

from shared.serving.http_connections import LOOPBACK, Bounds, ConnectionTable, Phase, address_of

UNFINISHED, ANSWERING, IDLE = Phase


def table_of(most, per_address=0):
    return ConnectionTable(Bounds(max_connections=most, max_per_address=per_address))


def test_the_one_that_waits_for_longest_goes():
    """Those that have not sent a request go first, then idle ones; each kind in its order."""
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


def test_what_is_answered_is_never_cut():
    """Where all are being answered the new one is refused, and nothing has changed."""
    table = table_of(2)
    for name in "ab":
        table.admit(name, "")
        table.move(name, ANSWERING)
    assert table.admit("c", "") == (False, None, "places")
    assert table.phase_of("c") is None
    table.move("b", IDLE)
    assert table.admit("c", "") == (True, "b", "places")


def test_an_address_has_its_own_bound():
    """Who has too many loses its own, however long others wait; who has no bound loses none."""
    table = table_of(10, per_address=2)
    for name, address in (("a", "x"), ("b", "y"), ("c", "y"), ("d", ""), ("e", ""), ("f", "")):
        assert table.admit(name, address).why == ""
    assert table.admit("g", "y") == (True, "b", "address")
    for name in "cg":
        table.move(name, ANSWERING)
    assert table.admit("h", "y") == (False, None, "address")
    table.remove("c")
    assert table.admit("h", "y") == (True, None, "")


def test_a_reserve_is_left():
    """One in sixteen places is for requests of reserved paths."""
    table = table_of(32)
    answered = 0
    for name in range(32):
        table.admit(name, "")
        if table.may_answer():
            table.move(name, ANSWERING)
            answered += 1
    assert answered == 30


@pytest.mark.parametrize("most", [1, 2])
def test_few_places(most):
    """However few there are, one request is answered."""
    table = table_of(most)
    table.admit("a", "")
    assert table.may_answer()


def test_nothing_is_left_of_who_has_gone():
    """The number of connections is that of the phases', whatever happens in whichever order."""
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
def test_addresses(host, address):
    """Who can change addresses at will within a network has its number there."""
    assert address_of(host, LOOPBACK) == address
