"""A session grows with the parts of an import that have arrived: when, by what, and until when."""

import pytest

from kvd.core.operations.growing import NOT_FETCHED, Growth
from kvd.core.records.entries import Pin
from kvd.core.records.errors import ErasingError, SessionChangedError
from kvd.core.state.session import Session
from shared.types.lineage import WHOLE
from tests.kvd.core.turns import (
    ONES,
    THREES,
    TWOS,
    B,
    complete_store,
    load,
    new_world,
    prepare_load,
    prepare_store,
    restart_committed,
    store,
)
from tests.property.cache_world import CacheWorld, to_bytes

TOKENS = ONES + TWOS + THREES
SOURCE = B._replace(session_id="import")


class Import:
    """An import of session B whose parts arrive one after another."""

    def __init__(self, world: CacheWorld, most_tokens: int = 0) -> None:
        self.world = world
        self.growth = Growth(B, SOURCE, WHOLE, most_tokens)

    def comes(self, num_tokens: int) -> bool:
        """Have so much stored; return whether the session has it then."""
        store(self.world, SOURCE, TOKENS[:num_tokens])
        grown = self.world.engine.growing.grow(self.growth, to_bytes(TOKENS))
        self.world.pump()
        self.world.engine.check()
        return grown

    def end(self, *, is_whole: bool) -> None:
        self.world.engine.growing.end(self.growth, is_whole=is_whole)
        self.world.pump()
        self.world.engine.check()


def session(world: CacheWorld) -> Session | None:
    return world.engine._state.sessions.get(B)


def test_a_session_has_the_parts_that_have_arrived() -> None:
    """It is marked as incomplete until all of it has arrived."""
    world = new_world()
    coming = Import(world)
    for num_tokens in (4, 8, 8, 12):
        assert coming.comes(num_tokens)
        assert world.engine.growing.is_growing(B)
        assert (session(world).num_tokens, session(world).lost) == (num_tokens, NOT_FETCHED)
        assert load(world, B, TOKENS[:num_tokens]).end_token == num_tokens
    assert load(world, B, [*TOKENS, 9]).miss_reason == NOT_FETCHED
    coming.end(is_whole=True)
    assert not world.engine.growing.is_growing(B)
    assert (session(world).num_tokens, session(world).lost) == (12, "")


def test_arrived_parts_stay() -> None:
    """If no more comes; the next kvd knows, too, that the session is incomplete."""
    world = new_world()
    coming = Import(world)
    coming.comes(8)
    coming.end(is_whole=False)
    world.engine.sessions.flush(SOURCE, dry_run=False)
    assert load(world, B, TOKENS).end_token == 8
    for _ in range(2):
        restart_committed(world)
        assert (session(world).num_tokens, session(world).lost) == (8, "evicted")
    store(world, B, TOKENS)
    restart_committed(world)
    assert (session(world).num_tokens, session(world).lost) == (12, "")


@pytest.mark.parametrize(
    ("there", "most", "has_grown"),
    [
        (ONES, 4, True),
        (ONES[:3], 3, True),  # of a block that arrives as a whole
        (ONES + TWOS[:1], 5, True),
        (ONES, 3, False),  # it is longer than was looked at
        (ONES + TWOS, 8, False),  # as long
        (TWOS, 4, False),  # of other tokens
        (TWOS[:1], 1, False),
    ],
)
def test_a_stored_prefix_grows(there: list[int], most: int, has_grown: bool) -> None:
    """If the import begins with it, and is longer; else it stays as it is."""
    world = new_world()
    store(world, B, there)
    before = session(world).spans
    coming = Import(world, most)
    assert coming.comes(8) == has_grown
    if not has_grown:
        assert session(world).spans == before
        assert not world.engine.growing.is_growing(B)
    else:
        assert (session(world).num_tokens, session(world).lost) == (8, NOT_FETCHED)
    coming.end(is_whole=False)


def test_a_session_with_an_active_store_does_not_grow() -> None:
    """The store may end at any time; a load is no obstacle."""
    world = new_world()
    store(world, B, ONES)
    coming = Import(world, 4)
    answer = prepare_store(world, B, ONES + ONES)
    assert not coming.comes(8)
    complete_store(world, answer, success=False)
    prepare_load(world, B, ONES)
    assert coming.comes(8)
    assert coming.comes(12)


@pytest.mark.parametrize("change", ["stored", "being stored", "flushed", "ended", "cut"])
def test_a_session_that_changes_during_the_import_is_left(change: str) -> None:
    """Whatever the change was; the import learns of it."""
    world = new_world()
    coming = Import(world)
    coming.comes(8)
    if change == "stored":
        store(world, B, ONES + TWOS + ONES)
    elif change == "being stored":
        prepare_store(world, B, ONES + TWOS + ONES)
    elif change == "flushed":
        world.engine.sessions.flush(B, dry_run=False)
    elif change == "ended":
        world.engine.sessions.end(B)
    else:
        world.engine._state.cut(session(world), 1, "evicted")
    before = session(world) and list(session(world).spans)
    with pytest.raises(SessionChangedError):
        coming.comes(12)
    coming.end(is_whole=False)
    assert (session(world) and session(world).spans) == before
    assert change != "stored" or session(world).lost == ""


def test_of_two_imports_one_lets_the_session_grow() -> None:
    """The end of the other one changes nothing."""
    world = new_world()
    one, two = Import(world), Import(world)
    one.comes(4)
    assert not two.comes(4)
    two.end(is_whole=False)
    assert world.engine.growing.is_growing(B)
    one.end(is_whole=True)
    assert session(world).lost == ""


@pytest.mark.parametrize("is_pinned", [True, False])
def test_an_import_with_no_room_for_the_session(is_pinned: bool) -> None:
    """It continues without, or the session takes the place of the import's own blocks."""
    world = new_world(max_sessions=1)
    coming = Import(world)
    store(world, SOURCE, ONES)
    if is_pinned:
        world.engine.sessions.pin(SOURCE, Pin.HARD)
    assert coming.comes(4) != is_pinned
    assert (session(world) is None) == is_pinned
    assert world.engine.growing.is_growing(B) != is_pinned
    if not is_pinned:
        assert load(world, B, ONES).end_token == 4
        assert world.engine.inspection.info(SOURCE) is None
        assert not world.engine.growing.grow(coming.growth, to_bytes(TOKENS)), "nothing has come"
    coming.end(is_whole=False)


def test_an_import_ends_though_its_session_is_gone() -> None:
    """It was flushed, for example, just before the end."""
    world = new_world()
    coming = Import(world)
    coming.comes(4)
    world.engine.sessions.flush(B, dry_run=False)
    coming.end(is_whole=True)
    assert session(world) is None
    assert not world.engine.growing.is_growing(B)


def test_a_session_of_an_erased_tenant_does_not_grow() -> None:
    """Its dropped blocks do not come back."""
    world = new_world()
    store(world, SOURCE, ONES)
    world.engine.erasing.begin(lambda tenant: tenant == B.tenant)
    with pytest.raises(ErasingError):
        world.engine.growing.grow(Growth(B, SOURCE, WHOLE, 0), to_bytes(TOKENS))
    assert session(world) is None
