"""The record of a session's moves."""

from kvd.core.records.entries import Pin
from kvd.core.state.session_history import MOMENT_NS, MOST_OF_A_SESSION, MoveKind, SessionHistory
from tests.kvd.core.turns import ONES, OTHER_TENANT, THREES, TWOS, A, B, load, new_world, store
from tests.property.cache_world import to_bytes


def moves(world, key) -> list[str]:
    """Return the kinds, with the numbers of blocks and tokens and the reason if there are any."""
    found = []
    for move in world.engine.inspection.history.of(key):
        numbers = (move.num_blocks or "", move.num_tokens or "", move.why)
        found.append(" ".join(str(word) for word in (move.kind.value, *numbers) if word))
    return found


def test_the_history_of_a_session_is_recorded():
    """Stores, writes, evictions, reads, loads, pins and flushes: each once, with its counts."""
    world = new_world(num_slots=3)
    store(world, A, ONES + TWOS)
    world.now_ns += 2 * MOMENT_NS
    store(world, B, [7] * 12)
    world.now_ns += 2 * MOMENT_NS
    load(world, A, ONES + TWOS)
    world.engine.sessions.pin(A, Pin.HARD)
    world.engine.sessions.pin(A, Pin.NONE)
    world.engine.sessions.set_ttl(A, 5)
    world.engine.sessions.end(A)
    world.engine.sessions.flush(A, dry_run=False)
    assert moves(world, A) == [
        "stored 2 8",
        "written 2 8",
        "evicted_dram 2 8",
        "read 2 8",
        "loaded 8 ssd",
        "pinned hard",
        "unpinned",
        "ttl_set",
        "ended",
        "flushed 2 8 flush",
    ]
    assert moves(world, B)[:2] == ["stored 3 12", "written 3 12"]


def test_cuts_and_discards_are_recorded():
    """Without an SSD tier, room is made by cutting the coldest session, tail first."""
    world = new_world(num_slots=3, num_extents=0)
    store(world, A, ONES + TWOS + THREES)
    world.engine.sessions.discard(A, to_bytes(ONES + TWOS + THREES), [(8, 12)])
    store(world, B, [7] * 8)
    assert moves(world, A) == ["stored 3 12", "discarded 4", "cut 1 evicted"]
    store(world, B, [7] * 12)
    assert moves(world, A)[-1] == "dropped 1 4 evicted"


def test_repeated_moves_are_one():
    """Moves of one kind within a moment are one, also with others between; later ones are not."""
    history = SessionHistory()
    for at_ns in range(0, 3 * MOMENT_NS, MOMENT_NS // 2):
        history.record(A, MoveKind.STORED, at_ns, num_blocks=1)
        history.record(A, MoveKind.WRITTEN, at_ns, num_blocks=2)
    history.record(A, MoveKind.STORED, 9 * MOMENT_NS, num_blocks=1)
    stored, written, later = history.of(A)
    assert (stored.num_blocks, stored.first_ns, stored.last_ns) == (6, 0, 5 * MOMENT_NS // 2)
    assert (written.num_blocks, later.kind, later.num_blocks) == (12, MoveKind.STORED, 1)


def test_the_history_is_bounded():
    """Per session, and in total; the session with the oldest change is forgotten first."""
    history = SessionHistory(max_moves=MOST_OF_A_SESSION + 3)
    history.record(None, MoveKind.WRITTEN, 0)
    for number in range(3):
        history.record(B, MoveKind.ENDED, number * 2 * MOMENT_NS)
    for number in range(MOST_OF_A_SESSION + 5):
        history.record(A, MoveKind.ENDED, number * 2 * MOMENT_NS)
        history.check()
    assert (len(history.of(A)), len(history.of(B))) == (MOST_OF_A_SESSION, 3)
    for number in range(4):
        history.record(OTHER_TENANT, MoveKind.ENDED, number * 2 * MOMENT_NS)
        history.check()
    assert (len(history.of(A)), len(history.of(B))) == (MOST_OF_A_SESSION - 1, 0)


def test_an_erased_tenant_leaves_no_history():
    """Other tenants' histories stay."""
    history = SessionHistory()
    for key in (A, B, OTHER_TENANT):
        history.record(key, MoveKind.ENDED, 0)
    history.forget(A.tenant)
    history.check()
    assert (history.of(A), history.of(B), len(history.of(OTHER_TENANT))) == ((), (), 1)
    history.forget(None)
    assert history.of(OTHER_TENANT) == ()


def test_the_session_with_the_oldest_change_is_forgotten_first():
    """Not the one that came first."""
    history = SessionHistory(max_moves=3)
    for number, key in enumerate((A, B, A)):
        history.record(key, MoveKind.ENDED, number * 2 * MOMENT_NS)
    history.record(OTHER_TENANT, MoveKind.ENDED, 9 * MOMENT_NS)
    history.check()
    assert [len(history.of(key)) for key in (A, B, OTHER_TENANT)] == [2, 0, 1]


def test_a_forgotten_history_makes_room():
    """So many moves of other sessions are remembered then."""
    history = SessionHistory(max_moves=2)
    history.record(A, MoveKind.ENDED, 0)
    history.record(A, MoveKind.ENDED, 2 * MOMENT_NS)
    history.forget(A.tenant)
    history.check()
    history.record(OTHER_TENANT, MoveKind.ENDED, 0)
    history.record(OTHER_TENANT, MoveKind.ENDED, 2 * MOMENT_NS)
    assert len(history.of(OTHER_TENANT)) == 2


def test_a_move_continues_within_a_moment():
    """With the same kind and reason, and few others between."""
    history = SessionHistory()
    history.record(A, MoveKind.WRITTEN, 0, num_tokens=1)
    history.record(A, MoveKind.WRITTEN, MOMENT_NS, num_tokens=2)
    history.record(A, MoveKind.WRITTEN, 2 * MOMENT_NS + 1, num_tokens=4)
    assert [move.num_tokens for move in history.of(A)] == [3, 4]
    for reason in "abcd":
        history.record(B, MoveKind.CUT, 0, why=reason)
    history.record(B, MoveKind.CUT, 0, why="a", num_blocks=1)
    history.record(B, MoveKind.PINNED, 0)
    history.record(B, MoveKind.UNPINNED, 0)
    history.record(B, MoveKind.CUT, 0, why="b")
    assert [(move.why, move.num_blocks) for move in history.of(B)] == [
        *(("a", 1), ("b", 0), ("c", 0), ("d", 0), ("", 0), ("", 0), ("b", 0))
    ]


def misses(world, key):
    return [move for move in moves(world, key) if move.startswith("missed")]


def test_misses_are_recorded():
    """For known sessions: a first turn finds nothing, and misses nothing."""
    world = new_world()
    load(world, A, ONES)
    assert not moves(world, A)
    store(world, A, ONES)
    load(world, A, ONES)
    assert not misses(world, A)
    load(world, A, ONES + TWOS)
    assert misses(world, A) == ["missed 4 not_stored"]
    load(world, A, TWOS)
    assert misses(world, A)[-1] == "missed 4 tokens_differ"


def test_what_is_asked_for_repeatedly_is_missed_once():
    """Loads in parts, and those that wait for slots, ask for the same tokens again and again."""
    world = new_world(num_slots=2)
    store(world, A, ONES)
    for num_asked in (4, 12, 12, 8):
        load(world, A, (ONES + TWOS + THREES + ONES)[: 4 + num_asked])
        world.now_ns += MOMENT_NS
    assert misses(world, A) == ["missed 12 not_stored"]
    world.now_ns += 1
    load(world, A, ONES + TWOS)
    assert misses(world, A)[1:] == ["missed 4 not_stored"], "a later turn's"


def test_why_a_session_is_gone():
    """A load is told, whatever was asked for in vain before; who stores it again has it again."""
    world = new_world(default_ttl_ns=10)
    store(world, A, ONES)
    assert world.engine.inspection.history.removal(A) is None
    world.now_ns += 20
    world.engine.expire()
    assert [load(world, A, ONES).miss_reason for _ in range(2)] == ["expired"] * 2
    assert world.engine.inspection.history.removal(A).kind is MoveKind.EXPIRED
    store(world, A, ONES)
    assert world.engine.inspection.history.removal(A) is None
    world.engine.sessions.flush(A, dry_run=False)
    assert load(world, A, ONES).miss_reason == "flushed"
    assert load(world, B, ONES).miss_reason == "unknown_session"


def test_a_session_dropped_for_room_was_evicted():
    world = new_world(num_slots=2, num_extents=0)
    store(world, A, ONES)
    store(world, B, [7] * 8)
    assert load(world, A, ONES).miss_reason == "evicted"
    assert misses(world, A) == ["missed 4 evicted"]


def test_an_erased_session_is_not_known_any_more():
    world = new_world()
    store(world, OTHER_TENANT, ONES)
    world.engine.sessions.flush(OTHER_TENANT, dry_run=False)
    world.engine.inspection.history.forget(OTHER_TENANT.tenant)
    assert load(world, OTHER_TENANT, ONES).miss_reason == "unknown_session"
