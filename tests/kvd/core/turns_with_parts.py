"""Stores and loads against a CacheWorld whose layout has states or windows: two slots each."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.core.eviction.policies import POLICIES
from kvd.core.records.actions import HashSlots
from kvd.core.records.records import LoadAnswer, StoreAnswer
from kvd.core.state.limits import Limits
from shared.types.granted_slots import Lookup
from shared.types.kv_layout import KVLayout
from shared.types.session_key import SessionKey
from tests.kvd.core.turns import ENGINE_ID
from tests.property.cache_world import CacheWorld, compute, to_bytes
from tests.property.test_state_engine import STATE_LAYOUT, state_of
from tests.property.test_window_engine import WINDOW_LAYOUT, check_windows, fill_windows


def state_world(num_slots: int = 24, num_extents: int = 64, **limits) -> CacheWorld:
    return window_world(num_slots, num_extents, layout=STATE_LAYOUT, **limits)


def window_world(
    num_slots: int = 48,
    num_extents: int = 96,
    policy: str = "lru",
    layout: KVLayout = WINDOW_LAYOUT,
    **limits,
) -> CacheWorld:
    return CacheWorld(Limits(num_slots, num_extents, **limits), POLICIES[policy], layout)


def prepare_with(
    world: CacheWorld,
    key: SessionKey,
    tokens: list[int],
    positions: Sequence[int] = (),
    from_token: int = 0,
) -> StoreAnswer:
    """Ask for slots and fill the granted ones."""
    answer = world.engine.stores.prepare(
        key, to_bytes(tokens), from_token, ENGINE_ID, load_ends=positions
    )
    rows = compute([], tokens)
    for block in answer.blocks:
        end = block.token_offset + block.num_tokens
        world.slots[block.slot_id] = rows[block.token_offset : end]
    for granted in answer.states:
        contents = state_of(compute([], tokens[: granted.position])[-1])
        for slot_id, there in zip(granted.slot_ids, contents, strict=True):
            world.slots[slot_id] = there
    fill_windows(world.slots, rows, answer)
    world.pump()
    return answer


def store_with(
    world: CacheWorld,
    key: SessionKey,
    tokens: list[int],
    positions: Sequence[int] = (),
    from_token: int = 0,
    *,
    settle: bool = True,
) -> StoreAnswer:
    """Store tokens, and the states or windows for loads that end at the positions."""
    answer = prepare_with(world, key, tokens, positions, from_token)
    if answer.lease_id:
        world.engine.stores.complete(answer.lease_id, ENGINE_ID, success=True)
        world.pump()
    world.finish_all(HashSlots)
    if settle:
        world.quiesce()
    return answer


@dataclass
class Loaded:
    """The result of a load: its end (0 without a necessary state), and the answer."""

    end: int
    answer: LoadAnswer


def load_with(
    world: CacheWorld,
    key: SessionKey,
    tokens: list[int],
    from_token: int = 0,
    *,
    dram_only: bool = False,
) -> Loaded:
    """Load and complete; check the tokens, and the state or windows."""
    answer = world.engine.loads.prepare(
        key, to_bytes(tokens), from_token, ENGINE_ID, dram_only=dram_only
    )
    world.pump()
    if answer.lookup is Lookup.PENDING:
        world.quiesce()
        answer = world.engine.loads.settle(answer.lease_id)
    if answer.lookup is Lookup.HIT:
        check_loaded(world, tokens, answer, from_token)
        world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    world.pump()
    is_vain = world.layout.state_bytes and answer.state is None
    return Loaded(0 if is_vain else answer.end_token, answer)


def check_loaded(
    world: CacheWorld, tokens: list[int], answer: LoadAnswer, from_token: int = 0
) -> None:
    """Check that every row, and the state or every window, is of exactly these tokens."""
    rows, end = compute([], tokens), from_token
    for span in answer.spans:
        assert span.token_offset == end, "spans follow each other"
        end += span.num_tokens
        there = world.slots[span.slot_id][span.start : span.start + span.num_tokens]
        assert there == rows[span.token_offset : end], "a load is right"
    assert end == answer.end_token
    if world.layout.window:
        check_windows(world.slots, rows, answer, world.layout.window)
        return
    assert answer.state is not None or answer.more, "what is granted has its state, or more comes"
    if answer.state is not None:
        assert answer.state.position == end
        there = [world.slots[slot_id] for slot_id in answer.state.slot_ids]
        assert there == state_of(rows[end - 1]), "a state is that of these tokens"


def positions_of(world: CacheWorld, key: SessionKey) -> list[int]:
    """Return the positions at which a session has states."""
    session = world.engine._state.sessions[key]
    spans = [*session.spans, *session.tail_spans()]
    return sorted({span.start for span in spans if not span.num_tokens})


def window_ranges(world: CacheWorld, key: SessionKey) -> list[tuple[int, int]]:
    """Return the tokens of which a session has windows: half-open ranges."""
    detail = world.engine.inspection.describe(key)
    return [(w.token_offset, w.token_offset + w.num_tokens) for w in detail.windows]
