"""Slots that engines fill, from the grant to the block; and the states among what they hold.

Pure. What is granted for a state is all of its parts or nothing, and best effort: the tokens of a
store are what counts, and a state for which there is no room is computed again.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvd.core.operations.chaining import Chaining
from kvd.core.operations.state_matching import StateChain, kept_positions
from kvd.core.records.entries import Span
from kvd.core.records.errors import InvalidRequestError
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import NewBlock, StoreLease
from kvd.core.state.stored_states import group_states
from shared.types.granted_slots import GrantedState
from shared.types.session_key import SessionKey

NewStates = Mapping[int, Sequence[Span]]  # parts, by position


def committed(state: CacheState, tenant: str, span: Span, part: NewBlock) -> Block:
    """Make a block of a filled slot. The journal forgets the slot until it is hashed."""
    state.slots.commit(part.slot_id)
    state.clear_slot(part.slot_id)
    block = Block(
        span.block_key, span.num_tokens, tenant, part.token_ids, part.slot_id, part.generation
    )
    state.blocks.add(block)
    return block


def free(state: CacheState, tenant: str, part: NewBlock) -> None:
    """Free a slot that does not become a block."""
    state.free_slot(part.slot_id)
    state.tenants.charge(tenant, -1)


# ------------------------------------------------------------------------------------------ states


def check_positions(state: CacheState, positions: Iterable[int], num_tokens: int) -> None:
    """Raise InvalidRequestError for positions that no state of these tokens can have."""
    for position in positions:
        if state.stored_states is None:
            raise InvalidRequestError(
                "the layout has no states", "send no state_positions, or a layout's state_bytes"
            )
        if not 0 < position <= num_tokens:
            raise InvalidRequestError(
                f"a state behind {position} of {num_tokens} tokens",
                "send positions behind tokens that are sent",
            )


def new_states(
    state: CacheState,
    key: SessionKey,
    token_ids: bytes,
    chaining: Chaining,
    positions: Sequence[int],
) -> NewStates:
    """Choose the positions of a store whose states are worth being stored: O(tokens) hashing.

    Those are left out that are stored, that would be superseded as soon as they are, and all if the
    arena is too small to hold one beside a block of tokens.
    """
    layout = state.layout
    if not positions or len(state.slots) <= layout.state_slots:
        return {}
    chain = StateChain(chaining, layout.block_tokens, token_ids)
    known = chain.stored(state)
    stored = {found.position for found in known}
    wanted = kept_positions(known, positions, key) - stored
    return chain.spans_at(sorted(wanted))


def grant_states(
    state: CacheState, lease: StoreLease, states: NewStates, end_token: int
) -> tuple[GrantedState, ...]:
    """Give slots to states up to a token, the newest first, as far as there are any free."""
    slots = state.slots
    granted = []
    for position in sorted(states, reverse=True):
        if position > end_token or slots.num_free < len(states[position]):
            continue
        parts = [NewBlock(*slots.allocate(), b"") for _ in states[position]]
        lease.state_parts += zip(states[position], parts, strict=True)
        slot_ids, generations, _ = zip(*parts, strict=True)
        granted.append(GrantedState(position, slot_ids, generations))
    return tuple(reversed(granted))


def commit_states(state: CacheState, lease: StoreLease, end_token: int) -> None:
    """Make blocks of the lease's states that are behind tokens it still has, and free the others.

    The lease holds these blocks, as it does those of tokens.
    """
    parts, lease.state_parts = lease.state_parts, []
    for span, part in parts:
        assert isinstance(part, NewBlock), "a state is committed once"
        block = state.find_block(span.block_key)
        if span.start > end_token:
            free(state, lease.key.tenant, part)
            continue
        if block is None:
            block = committed(state, lease.key.tenant, span, part)
        else:  # another session has committed the same meanwhile
            free(state, lease.key.tenant, part)
        block.holders += 1
        lease.state_parts.append((span, block))
    num_states = len(group_states(span for span, _ in lease.state_parts))
    state.outbox.count("store_states", num_states)
