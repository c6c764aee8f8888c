"""Slots of its arena that kvd grants to an engine: for loads, stores, states and windows. Pure."""

from enum import Enum
from typing import NamedTuple


class Lookup(Enum):
    """Result of a load. A miss is never an exception."""

    HIT = "hit"
    PENDING = "pending"  # granted and being read: a layer may be loaded once it is ready
    MISS = "miss"


class LoadSpan(NamedTuple):
    """Tokens [start, start + num_tokens) of a slot, as the request's tokens from `token_offset`.

    Attributes:
        slot_id: index of the slot in the arena.
        start: first token, counted from the slot's first.
        num_tokens: number of tokens.
        token_offset: position of the first token in the request.
        generation: the slot's generation, which grows each time the slot is reused.
        tier: where the block was found, "dram" or "ssd". It is in the slot now either way. An
            engine that is older than its kvd may see "unknown".
    """

    slot_id: int
    start: int
    num_tokens: int
    token_offset: int
    generation: int
    tier: str


class StoreBlock(NamedTuple):
    """A slot for the request's tokens from `token_offset` on, as the slot's [0, num_tokens)."""

    slot_id: int
    token_offset: int
    num_tokens: int
    generation: int


class GrantedState(NamedTuple):
    """A model's recurrent state after the request's first tokens, in several slots.

    Attributes:
        position: number of these tokens.
        slot_ids: slots of the parts, in order: part i has the bytes from `i * block_bytes` on. All
            bytes of a slot count: zeros follow the last byte of the state.
        generations: generations of these slots.
    """

    position: int
    slot_ids: tuple[int, ...]
    generations: tuple[int, ...]


class GrantedWindow(NamedTuple):
    """The window of a block: the KV that layers with a window have of some of the request's tokens.

    Attributes:
        token_offset: position of the first token in the request.
        num_tokens: number of tokens.
        start: row of the first token in each slot.
        slot_ids: slots of the parts, in order; KVLayout.window_parts has the layers of each part.
            All bytes of a slot count: zeros are where there is no row.
        generations: generations of these slots.
    """

    token_offset: int
    num_tokens: int
    start: int
    slot_ids: tuple[int, ...]
    generations: tuple[int, ...]
