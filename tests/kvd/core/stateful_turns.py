"""Stores and loads with states against a CacheWorld whose layout has them: two slots each."""

from dataclasses import dataclass, replace

from kvd.core.eviction.policies import POLICIES
from kvd.core.records.actions import HashSlot
from kvd.core.records.records import LoadAnswer, StoreAnswer
from kvd.core.state.limits import Limits
from shared.types.granted_slots import GrantedState, Lookup
from shared.types.session_key import SessionKey
from tests.kvd.core.turns import ENGINE_ID
from tests.property.cache_world import LAYOUT, CacheWorld, Row, compute, to_bytes

STATE_LAYOUT = replace(LAYOUT, position_mode="coupled", state_bytes=LAYOUT.block_bytes + 1)
NUM_PARTS = 2
assert STATE_LAYOUT.state_slots == NUM_PARTS


def state_world(num_slots: int = 24, num_extents: int = 64, **limits) -> CacheWorld:
    limits = Limits(num_slots, num_extents, **limits)
    return CacheWorld(limits, POLICIES["lru"], STATE_LAYOUT)


def state_of(tokens: list[int]) -> list[list[Row]]:
    """What the slots of the state behind these tokens hold, symbolically."""
    return [[hash(("state", part, compute([], tokens)[-1]))] for part in range(NUM_PARTS)]


def write_state(world: CacheWorld, tokens: list[int], granted: GrantedState) -> None:
    contents = state_of(tokens[: granted.position])
    for slot_id, rows in zip(granted.slot_ids, contents, strict=True):
        world.slots[slot_id] = rows


def prepare_with(
    world: CacheWorld,
    key: SessionKey,
    tokens: list[int],
    positions: list[int],
    from_token: int = 0,
) -> StoreAnswer:
    """Ask for slots and fill those granted."""
    answer = world.engine.stores.prepare(
        key, to_bytes(tokens), from_token, ENGINE_ID, state_positions=positions
    )
    rows = compute([], tokens)
    for block in answer.blocks:
        end = block.token_offset + block.num_tokens
        world.slots[block.slot_id] = rows[block.token_offset : end]
    for granted in answer.states:
        write_state(world, tokens, granted)
    world.pump()
    return answer


def store_with(
    world: CacheWorld,
    key: SessionKey,
    tokens: list[int],
    positions: list[int],
    from_token: int = 0,
    *,
    settle: bool = True,
) -> StoreAnswer:
    """Store tokens and the states at positions."""
    answer = prepare_with(world, key, tokens, positions, from_token)
    if answer.lease_id:
        world.engine.stores.complete(answer.lease_id, ENGINE_ID, success=True)
        world.pump()
    world.finish_all(HashSlot)
    if settle:
        world.quiesce()
    return answer


@dataclass
class Loaded:
    """What a load gave: position of its state, 0 if none; and the answer."""

    position: int
    answer: LoadAnswer


def load_with(
    world: CacheWorld,
    key: SessionKey,
    tokens: list[int],
    from_token: int = 0,
    *,
    dram_only: bool = False,
) -> Loaded:
    """Load and complete; tokens and state are what they should be."""
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
    return Loaded(answer.state.position if answer.state else 0, answer)


def check_loaded(
    world: CacheWorld, tokens: list[int], answer: LoadAnswer, from_token: int = 0
) -> None:
    """Every row, and the state, are of exactly these tokens."""
    rows, end = compute([], tokens), from_token
    for span in answer.spans:
        assert span.token_offset == end, "spans follow each other"
        end += span.num_tokens
        there = world.slots[span.slot_id][span.start : span.start + span.num_tokens]
        assert there == rows[span.token_offset : end], "a load is right"
    assert end == answer.end_token
    assert answer.state is not None or answer.more, "what is granted has its state, or more comes"
    if answer.state is not None:
        assert answer.state.position == end
        there = [world.slots[slot_id] for slot_id in answer.state.slot_ids]
        assert there == state_of(tokens[:end]), "a state is that of these tokens"


def positions_of(world: CacheWorld, key: SessionKey) -> list[int]:
    """Where a session has states."""
    session = world.engine._state.sessions[key]
    spans = [*session.spans, *session.tail_spans()]
    return sorted({span.start for span in spans if not span.num_tokens})
