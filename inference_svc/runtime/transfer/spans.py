"""Checks of a load's grant: its spans of tokens, and its windows of the last tokens.

A grant that is inconsistent is refused before any of it is copied.
"""

from collections.abc import Sequence
from typing import Protocol

from inference_svc.runtime.kv.arena_kv import Block
from inference_svc.runtime.kv.sequence_kv import SequenceKv
from shared.types.granted_slots import GrantedWindow
from shared.types.kv_layout import KVLayout


class Span(Block, Protocol):
    """Tokens [start, start + num_tokens) of a slot, for positions from `token_offset` on."""

    @property
    def start(self) -> int:
        """First token in the slot."""


def check_spans(kv: SequenceKv, spans: Sequence[Span], layout: KVLayout) -> int:
    """Check that spans can be appended to a sequence's KV; return the position after the last.

    Args:
        kv: the KV to append to; the first span has to begin at its `num_tokens`.
        spans: the spans, in order, without gaps.
        layout: the layout of the slots.

    Raises:
        ValueError: if the spans leave a gap, leave the slot or the sequence's KV.
    """
    end = kv.num_tokens
    for span in spans:
        is_inside = span.start >= 0 and 0 < span.num_tokens <= layout.block_tokens - span.start
        has_room = end + span.num_tokens <= kv.capacity_tokens
        if span.token_offset != end or not is_inside or not has_room:
            raise ValueError(
                f"tokens {span.start}+{span.num_tokens} of a slot cannot be loaded at "
                f"{span.token_offset}; the sequence's KV has {end} of {kv.capacity_tokens} tokens"
            )
        end += span.num_tokens
    return end


def check_windows(windows: Sequence[GrantedWindow], end_token: int, layout: KVLayout) -> int:
    """Check a grant's windows; return the first token that they have KV of.

    Args:
        windows: the windows of the last tokens before `end_token`, in order, without gaps.
        end_token: the token that is computed next.
        layout: the layout of the slots; it has windows.

    Raises:
        ValueError: if they leave a gap, leave their slots, lack tokens that the next one attends
            to, or begin with a window of which it attends to no token.
    """
    first = end = windows[0].token_offset if windows else end_token
    for window in windows:
        is_inside = (
            window.start >= 0 and 0 < window.num_tokens <= layout.block_tokens - window.start
        )
        is_next = window.token_offset == end and len(window.slot_ids) == layout.window_slots
        if not (is_inside and is_next):
            raise ValueError(f"the window at {window.token_offset} does not follow {end}")
        end += window.num_tokens
    wanted_from = max(0, end_token - layout.window)
    is_needless = bool(windows) and first + windows[0].num_tokens <= wanted_from
    if end != end_token or first > wanted_from or is_needless:
        raise ValueError(
            f"windows of tokens {first} to {end} came with {end_token} tokens; layers attend to "
            f"the last {layout.window}"
        )
    return first


def windows_beside(spans: Sequence[Span], layout: KVLayout, first_slot: int) -> list[GrantedWindow]:
    """Return windows of the last tokens of spans, for an arena that is not kvd's (proofs, tests).

    The window of slot s lies in the slots from `first_slot` + s * `layout.window_slots` on.
    """
    num_slots = layout.window_slots
    first_token = sum(span.num_tokens for span in spans) - layout.window
    return [
        GrantedWindow(
            span.token_offset,
            span.num_tokens,
            span.start,
            tuple(first_slot + span.slot_id * num_slots + part for part in range(num_slots)),
            (0,) * num_slots,
        )
        for span in spans
        if layout.window and span.token_offset + span.num_tokens > first_token
    ]
