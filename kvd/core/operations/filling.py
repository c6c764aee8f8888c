"""Slots that engines fill: granted for new parts, then committed as blocks.

Pure. A state or window is granted with all of its parts or not at all, and as best effort: the
tokens of a store come first, and a state or window that finds no room is computed again later.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvd.core.operations.chaining import Chaining
from kvd.core.operations.matching import NewParts, StorePlan
from kvd.core.operations.state_matching import StateChain, kept_positions
from kvd.core.operations.window_matching import new_windows
from kvd.core.records.entries import Span
from kvd.core.records.errors import InvalidRequestError
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import NewBlock, StoreLease
from kvd.core.state.stored_parts import group_parts, is_window
from shared.types.granted_slots import GrantedState, GrantedWindow
from shared.types.session_key import SessionKey


class GrantedParts(NamedTuple):
    """The states and windows that a store was granted slots for."""

    states: tuple[GrantedState, ...] = ()
    windows: tuple[GrantedWindow, ...] = ()


def commit_slot(state: CacheState, tenant: str, span: Span, part: NewBlock) -> Block:
    """Make a block of a filled slot; the slot is not in the journal again before it is hashed."""
    state.slots.commit(part.slot_id)
    state.clear_slot(part.slot_id)
    block = Block(
        span.block_key,
        span.num_tokens,
        tenant,
        part.token_ids,
        part.parent,
        part.slot_id,
        part.generation,
    )
    state.blocks.add(block)
    return block


def free_part(state: CacheState, tenant: str, part: NewBlock) -> None:
    """Free a slot that does not become a block."""
    state.free_slot(part.slot_id)
    state.tenants.charge(tenant, -1)


# ------------------------------------------------------------------------------- states and windows


def check_positions(state: CacheState, positions: Iterable[int], num_tokens: int) -> None:
    """Raise InvalidRequestError for positions at which no load can end."""
    for position in positions:
        if state.stored_parts is None:
            raise InvalidRequestError(
                "load_ends was sent, but the layout has neither states nor windows",
                "send no load_ends, or set state_bytes or windows in the layout",
            )
        is_beyond = position > num_tokens and state.layout.state_bytes
        if position < 1 or is_beyond:
            raise InvalidRequestError(
                f"load_ends contains {position}, but {num_tokens} tokens were sent",
                "send positions within the tokens that are sent",
            )


def new_parts(
    state: CacheState,
    key: SessionKey,
    token_ids: bytes,
    chaining: Chaining,
    plan: StorePlan,
    positions: Sequence[int],
) -> list[NewParts]:
    """Choose the states or windows to store, so that loads may end at the given positions.

    Costs O(tokens) hashing where there are states.
    """
    if not positions:
        return []
    if state.layout.window:
        return new_windows(state, chaining, plan, positions)
    return _new_states(state, key, token_ids, chaining, positions)


def _new_states(
    state: CacheState,
    key: SessionKey,
    token_ids: bytes,
    chaining: Chaining,
    positions: Sequence[int],
) -> list[NewParts]:
    """Choose the states to store.

    States that are stored already, or that newer ones would supersede at once, are left out. If the
    arena is too small for a state beside a block of tokens, none is chosen.
    """
    layout = state.layout
    if len(state.slots) <= layout.state_slots:
        return []
    chain = StateChain(chaining, layout.block_tokens, token_ids)
    known = chain.stored(state)
    stored = {found.position for found in known}
    wanted = sorted(kept_positions(known, positions, key) - stored)
    return [NewParts(position, 0, spans) for position, spans in chain.spans_at(wanted).items()]


def grant_parts(
    state: CacheState, lease: StoreLease, wanted: Sequence[NewParts], end_token: int
) -> GrantedParts:
    """Grant slots to the states and windows up to `end_token`, last ones first, as far as they fit.

    A state or window gets slots for all of its parts, or none.
    """
    slots = state.slots
    states: list[GrantedState] = []
    windows: list[GrantedWindow] = []
    for new in sorted(wanted, key=lambda new: new.start, reverse=True):
        if new.start + new.num_tokens > end_token or slots.num_free < len(new.spans):
            continue
        parts = [NewBlock(*slots.allocate()) for _ in new.spans]
        lease.side_parts += zip(new.spans, parts, strict=True)
        slot_ids, generations, *_ = zip(*parts, strict=True)
        if new.num_tokens:
            windows.append(GrantedWindow(new.start, new.num_tokens, 0, slot_ids, generations))
        else:
            states.append(GrantedState(new.start, slot_ids, generations))
    return GrantedParts(tuple(reversed(states)), tuple(reversed(windows)))


def commit_parts(state: CacheState, lease: StoreLease) -> None:
    """Make blocks of the lease's states and windows whose tokens it still has; free the others.

    The lease holds these blocks, like those of tokens.
    """
    parts, lease.side_parts = lease.side_parts, []
    block_keys = {span.block_key for span, _ in lease.parts}
    end_token = sum(span.num_tokens for span, _ in lease.parts)
    for span, part in parts:
        assert isinstance(part, NewBlock), "a part is committed once"
        block = state.find_block(span.block_key)
        is_left = span.chain in block_keys if is_window(span) else span.start <= end_token
        if not is_left:
            free_part(state, lease.key.tenant, part)
            continue
        if block is None:
            block = commit_slot(state, lease.key.tenant, span, part)
        else:  # another session has committed the same part meanwhile
            free_part(state, lease.key.tenant, part)
        block.holders += 1
        lease.side_parts.append((span, block))
    counter = "store_windows" if state.layout.window else "store_states"
    state.outbox.count(counter, len(group_parts(span for span, _ in lease.side_parts)))
