"""What servers push to the store and fetch from it."""

from kvd.plan.hardware import Costs, Hardware, ReplayOptions
from kvd.plan.kept import NOTHING, Kept
from kvd.plan.moving import CHUNK_BYTES, Mover, RemoteStore, Stored

COSTS = Costs([], Hardware(0, 0), ReplayOptions("lru", 10))
RATE = 1e9  # one byte per nanosecond


def ends(mover: Mover) -> int:
    return min(at for at in mover.next_ns() if at is not None)


def make_pushed_server(store: RemoteStore, session: int, tokens: int, number: int = 1) -> Mover:
    """Make a server that has pushed so many bytes of a session."""
    mover = Mover(store, COSTS, RATE, None)
    mover.on_store(session, Stored(Kept(tokens), number, None), 0)
    mover.push(session, 0)
    assert mover.step(ends(mover)) is None
    return mover


def test_an_idle_session_is_pushed():
    """Not while it has another turn, nor its state from before that."""
    mover = Mover(RemoteStore(), COSTS, RATE, quiet_s=10e-9)
    mover.on_store(1, Stored(Kept(5), 1, None), 0)
    mover.on_store(2, Stored(Kept(5), 2, None), 3)
    mover.on_run(1)
    mover.on_store(1, Stored(Kept(9), 3, None), 6)
    assert ends(mover) == 10
    assert mover.pop_due(10) is None
    assert (mover.pop_due(13), mover.pop_due(13)) == (2, None)
    assert mover.pop_due(16) == 1
    assert sorted(mover.unpushed) == [1, 2]


def test_only_missing_tokens_are_sent():
    """Those of the last turn, once the earlier ones are in the store."""
    store = RemoteStore()
    mover = make_pushed_server(store, 1, tokens=100)
    assert mover.totals().bytes_pushed == 1000
    mover.on_store(1, Stored(Kept(130), 2, None), 2000)
    mover.push(1, 2000)
    assert store.find(1, 2000) == Kept(100)  # until it is there whole
    mover.step(2300)
    assert store.find(1, 2300) == Kept(130)
    assert mover.totals().bytes_pushed == 1300
    assert mover.unpushed == []


def test_a_late_push_is_fenced():
    """The state after an earlier turn does not replace that after a later one."""
    store = RemoteStore()
    make_pushed_server(store, 1, tokens=50, number=8)
    make_pushed_server(store, 1, tokens=100, number=3)
    assert store.find(1, 0) == Kept(50)


def test_an_expired_session_is_not_found():
    """Its TTL continues in the store."""
    store = RemoteStore()
    store.put(1, Stored(Kept(50), 1, 1000))
    assert (store.find(1, 999), store.find(1, 1000)) == (Kept(50), NOTHING)


def test_a_turns_history_is_fetched_as_far_as_it_is_stored():
    """One session after another; each request to the store counts, also a failing one."""
    store = RemoteStore()
    make_pushed_server(store, 1, tokens=100)
    make_pushed_server(store, 2, tokens=CHUNK_BYTES // 10 + 1)
    mover = Mover(store, COSTS, RATE, None)
    mover.fetch(1, history_tokens=80, now_ns=0)
    mover.fetch(2, history_tokens=10**9, now_ns=0)
    mover.fetch(3, history_tokens=10, now_ns=0)
    first, second = mover.fetch_of(1, 0), mover.fetch_of(2, 0)
    assert first is not None
    assert second is not None
    assert (first.tokens, first.transfer.ends_ns) == (80, 800)
    assert second.transfer.ends_ns == 800 + 10 * second.tokens
    assert mover.fetch_of(3, 0) is None
    assert mover.totals().store_gets == (1 + 1) + (1 + 2) + 1
    assert (mover.step(800), mover.step(second.transfer.ends_ns)) == (1, 2)
    mover.drop_fetch(1)
    assert mover.fetch_of(1, 0) is None


def test_an_unwanted_fetch_is_not_reported():
    """Its bytes were moved all the same."""
    store = RemoteStore()
    make_pushed_server(store, 1, tokens=100)
    mover = Mover(store, COSTS, RATE, None)
    mover.fetch(1, history_tokens=80, now_ns=0)
    mover.drop_fetch(1)
    assert mover.step(800) is None
    assert mover.totals().bytes_fetched == 800


def test_where_turns_do_not_wait_only_local_history_counts():
    """And a router is told that no session is fetched for them."""
    store = RemoteStore()
    make_pushed_server(store, 1, tokens=100)
    mover = Mover(store, COSTS, RATE, None, waits=False)
    mover.fetch(1, history_tokens=80, now_ns=0)
    assert mover.fetch_of(1, 799) is None
    assert mover.fetch_of(1, 800) is not None
    assert mover.fetch_s is None
