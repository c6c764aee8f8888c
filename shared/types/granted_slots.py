"""What kvd grants of its arena: slots of loads, stores, states, windows. Pure."""

from enum import Enum
from typing import NamedTuple


class Lookup(Enum):
    """Answer of a load; never an exception."""

    HIT = "hit"
    PENDING = "pending"  # granted, still being read: a layer may be read once it is ready
    MISS = "miss"


class LoadSpan(NamedTuple):
    """Tokens [start, start + num_tokens) of a slot are the request's from `token_offset` on.

    Attributes:
        slot_id: index of the slot in the arena.
        start: the first of the slot's tokens.
        num_tokens: number of tokens.
        token_offset: position of the first token in the request.
        generation: the slot's generation, which grows each time it is reused.
        tier: where the block was found, "dram" or "ssd"; it is in the slot now either way. An
            engine that is older than its kvd may find "unknown" here.
    """

    slot_id: int
    start: int
    num_tokens: int
    token_offset: int
    generation: int
    tier: str


class StoreBlock(NamedTuple):
    """The request's tokens from `token_offset` on are to be the slot's tokens [0, num_tokens)."""

    slot_id: int
    token_offset: int
    num_tokens: int
    generation: int


class GrantedState(NamedTuple):
    """A model's state behind the request's first tokens, in several slots.

    Attributes:
        position: number of the tokens.
        slot_ids: the parts, in order: part i has the bytes from `i * block_bytes` on. All bytes of
            a slot count: zeros follow the last byte of the state.
        generations: of these slots.
    """

    position: int
    slot_ids: tuple[int, ...]
    generations: tuple[int, ...]


class GrantedWindow(NamedTuple):
    """The window of a block: what layers with a window have of some of the request's tokens.

    Attributes:
        token_offset: position of the first token in the request.
        num_tokens: number of tokens.
        start: row of the first one, in each slot.
        slot_ids: the parts, in order: KVLayout.window_parts says which layers are in which. All
            bytes of a slot count: zeros are where no row is.
        generations: of these slots.
    """

    token_offset: int
    num_tokens: int
    start: int
    slot_ids: tuple[int, ...]
    generations: tuple[int, ...]
