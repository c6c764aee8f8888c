"""Grants of kvd to an engine: decode them, and refuse answers that contradict themselves.

Pure. shared/kvd_client/client.py adds the memory behind the slot ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, lt

from shared.kvd_client.arena_map import ArenaMap, LoadProgress, ProgressWords
from shared.kvd_client.messages import blocks_of, spans_of, tier_of
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.serving.message_fields import MessageFields
from shared.types.block_key import TOKEN_BYTES
from shared.types.errors import UnavailableError
from shared.types.granted_slots import GrantedState, GrantedWindow, LoadSpan, Lookup, StoreBlock
from shared.types.kv_layout import KVLayout


class KvdProtocolError(UnavailableError):
    """kvd's answer contradicts itself or the layout."""

    reason = "kvd_protocol"


@dataclass(frozen=True)
class LoadGrant:
    """Slots that may be read until complete_load.

    Attributes:
        lookup: on a MISS there is no lease and nothing to complete.
        lease_id: id of the lease; 0: there is none.
        spans: contiguous spans that cover [from_token, end_token).
        end_token: token behind the last span.
        more: whether more is stored beyond end_token; request it after complete_load.
        miss_reason: slug of the reason why no more is granted; "" if kvd gives none. A MISS always
            has one.
        arena: the arena of the slots; stays mapped for as long as this grant is referred to.
        progress: reports which layers are ready; None unless PENDING.
        state: the model's state at end_token, to be read once all layers are ready. None: the
            layout has none, or the arena could not hold everything at once. In that case `more` is
            set, and the loaded tokens cannot be used before the state has been loaded, too.
        windows: in order, the windows of the blocks before end_token that layers with a window
            attend to from there; read and left out like a state.
        fetch_waited_s: seconds that kvd has waited for the session to come from a remote store.
    """

    lookup: Lookup
    lease_id: int
    spans: tuple[LoadSpan, ...]
    end_token: int
    more: bool
    miss_reason: str
    arena: ArenaMap
    progress: LoadProgress | None = None
    state: GrantedState | None = None
    windows: tuple[GrantedWindow, ...] = ()
    fetch_waited_s: float = 0.0


@dataclass(frozen=True)
class StoreGrant:
    """Slots that must be written before complete_store.

    Attributes:
        lease_id: id of the lease; 0: there is nothing to write and nothing to complete.
        blocks: new blocks, in token order, not overlapping; stored ones are not among them.
        end_token: after completion the tokens [0, end_token) are stored.
        more: whether to call again after complete_store, with from_token = end_token.
        refused_reason: "no_space", "gap", or "".
        arena: the arena of the slots; stays mapped for as long as this grant is referred to.
        states: states at the requested positions, by position, none behind end_token; there may be
            some though there are no blocks.
        windows: windows for the requested positions, in token order, between from_token and
            end_token; of the new blocks or of stored ones.
    """

    lease_id: int
    blocks: tuple[StoreBlock, ...]
    end_token: int
    more: bool
    refused_reason: str
    arena: ArenaMap
    states: tuple[GrantedState, ...] = ()
    windows: tuple[GrantedWindow, ...] = ()


_LOAD_SPAN = MessageFields(LoadSpan, pb.LoadSpan)
_STORE_BLOCK = MessageFields(StoreBlock, pb.StoreBlock)
_LOOKUPS = {
    pb.LOOKUP_HIT: Lookup.HIT,
    pb.LOOKUP_PENDING: Lookup.PENDING,
    pb.LOOKUP_MISS: Lookup.MISS,
}


def load_grant(
    response: pb.PrepareLoadResponse,
    request: pb.PrepareLoadRequest,
    arena: ArenaMap,
    layout: KVLayout,
    words: ProgressWords,
) -> LoadGrant:
    """Decode the answer to a PrepareLoad.

    Args:
        response: the answer.
        request: the request that it answers.
        arena: the arena whose slots it names.
        layout: the layout of the slots.
        words: the progress words, for a PENDING answer.

    Raises:
        KvdProtocolError: the answer is not a miss or a non-empty contiguous hit inside the arena;
            it is pending though the request does not accept that; it has a state or windows where
            there can be none, or lacks some; or its wait is negative.
    """
    lookup = _LOOKUPS.get(response.lookup)
    if lookup is None or (lookup is Lookup.PENDING and not request.accept_pending):
        raise _bad_answer(f"lookup {response.lookup}")
    is_granted = lookup is not Lookup.MISS
    spans = _spans(response, request.from_token)
    if is_granted != bool(spans) or is_granted != bool(response.lease_id):
        raise _bad_answer(f"a {lookup.value} with {len(spans)} spans")
    end = _checked_end(spans, request, arena, layout.block_tokens)
    if is_granted and end != response.end_token:
        raise _bad_answer(f"spans up to token {end}, {response.end_token} announced")
    state = _state(response.state, arena, layout) if response.HasField("state") else None
    if state is not None and not (is_granted and state.position == end):
        raise _bad_answer(f"a state at {state.position}, with tokens up to {end}")
    if is_granted and layout.state_bytes and state is None and not response.more:
        raise _bad_answer(f"tokens up to {end} without a state")
    if not response.fetch_waited_s >= 0:  # written so that NaN is refused, too
        raise _bad_answer(f"a wait of {response.fetch_waited_s} seconds")
    windows = tuple(_window(granted, arena, layout) for granted in response.windows)
    _check_windows(windows, end, layout, is_whole=is_granted and not response.more)
    return LoadGrant(
        lookup=lookup,
        lease_id=response.lease_id,
        spans=spans,
        end_token=end,
        more=is_granted and response.more,
        miss_reason=response.miss_reason or ("" if is_granted else "miss"),
        arena=arena,
        progress=_progress(response, words) if lookup is Lookup.PENDING else None,
        state=state,
        windows=windows,
        fetch_waited_s=response.fetch_waited_s,
    )


def _spans(response: pb.PrepareLoadResponse, from_token: int) -> tuple[LoadSpan, ...]:
    """Decode the spans of an answer: as columns, or one by one as an older kvd sends them."""
    if response.spans:
        return tuple(_LOAD_SPAN.decode_row(span, tier_of(span.tier)) for span in response.spans)
    try:
        return spans_of(response.columns, from_token)
    except ValueError as error:
        raise _bad_answer(str(error)) from error


def _check_windows(
    windows: Sequence[GrantedWindow], end: int, layout: KVLayout, *, is_whole: bool
) -> None:
    """Check that windows are contiguous, end at `end`, and cover what layers attend to there."""
    if not windows:
        if is_whole and layout.window:
            raise _bad_answer(f"tokens up to {end} without their windows")
        return
    ends = [window.token_offset + window.num_tokens for window in windows]
    is_joined = ends == [*(window.token_offset for window in windows[1:]), end]
    slot_ids = [slot_id for window in windows for slot_id in window.slot_ids]
    is_enough = windows[0].token_offset <= max(0, end - layout.window)
    if not is_whole or not is_joined or not is_enough or len(set(slot_ids)) < len(slot_ids):
        raise _bad_answer(f"windows of tokens up to {ends}, with tokens up to {end}")


def _checked_end(
    spans: Sequence[LoadSpan],
    request: pb.PrepareLoadRequest,
    arena: ArenaMap,
    block_tokens: int,
) -> int:
    """Return the token behind the last span; check that spans are contiguous in the request."""
    if not spans:
        return request.from_token
    # By columns: there are thousands of spans, and a turn waits for this.
    slot_ids, starts, _, offsets, *_ = zip(*spans, strict=True)
    num_tokens = [span.num_tokens for span in spans]
    *begins, end = accumulate(num_tokens, initial=request.from_token)
    is_inside = (
        max(slot_ids) < arena.num_slots and max(map(add, starts, num_tokens)) <= block_tokens
    )
    if min(num_tokens) < 1 or not is_inside:
        raise _bad_answer("spans of tokens that are not in the arena's slots")
    if list(offsets) != begins:
        raise _bad_answer(f"spans of tokens from {offsets[:4]} on, not of {tuple(begins[:4])}")
    if end > len(request.token_ids) // TOKEN_BYTES:
        raise _bad_answer(f"spans up to token {end}, beyond the request's")
    return end


def _progress(response: pb.PrepareLoadResponse, words: ProgressWords) -> LoadProgress:
    if response.progress_index >= words.num_words:
        raise _bad_answer(f"progress word {response.progress_index} of {words.num_words}")
    return LoadProgress(words, response.progress_index, response.lease_id)


def store_grant(
    response: pb.PrepareStoreResponse,
    request: pb.PrepareStoreRequest,
    arena: ArenaMap,
    layout: KVLayout,
) -> StoreGrant:
    """Decode the answer to a PrepareStore.

    Args:
        response: the answer.
        request: the request that it answers.
        arena: the arena whose slots it names.
        layout: the layout of the slots.

    Raises:
        KvdProtocolError: a block lies outside of the arena or the tokens, two blocks overlap, or a
            state is granted that was not requested.
    """
    blocks = _blocks(response, request, arena, layout)
    states = tuple(_state(granted, arena, layout) for granted in response.states)
    windows = tuple(_window(granted, arena, layout) for granted in response.windows)
    parts: tuple[GrantedState | GrantedWindow, ...] = (*states, *windows)
    if bool(blocks or parts) != bool(response.lease_id):
        raise _bad_answer(
            f"lease {response.lease_id} with {len(blocks)} blocks, and {len(parts)} states "
            "and windows"
        )
    slot_ids = [block.slot_id for block in blocks]
    slot_ids += [slot_id for granted in parts for slot_id in granted.slot_ids]
    is_beyond = response.end_token > len(request.token_ids) // TOKEN_BYTES
    if is_beyond or len(set(slot_ids)) < len(slot_ids):
        raise _bad_answer("blocks that share a slot or lie beyond the tokens")
    positions = [state.position for state in states]
    wanted = {p for p in request.load_ends if p <= response.end_token}
    if positions != sorted(set(positions) & wanted):
        raise _bad_answer(f"states at {positions}")
    end = request.from_token
    for window in windows:
        if not request.load_ends or window.start or window.token_offset < end:
            raise _bad_answer(f"a window of tokens from {window.token_offset} on, before {end}")
        end = window.token_offset + window.num_tokens
    if windows and end > response.end_token:
        raise _bad_answer(f"windows up to token {end}, {response.end_token} announced")
    return StoreGrant(
        lease_id=response.lease_id,
        blocks=blocks,
        end_token=response.end_token,
        more=response.more,
        refused_reason=response.refused_reason,
        arena=arena,
        states=states,
        windows=windows,
    )


def _blocks(
    response: pb.PrepareStoreResponse,
    request: pb.PrepareStoreRequest,
    arena: ArenaMap,
    layout: KVLayout,
) -> tuple[StoreBlock, ...]:
    """Decode the blocks of an answer: as columns, or one by one as an older kvd sends them.

    They are in order, do not overlap, and lie within the arena and the announced tokens.
    """
    if response.blocks:
        blocks = tuple(map(_STORE_BLOCK.decode_row, response.blocks))
    else:
        try:
            blocks = blocks_of(response.columns)
        except ValueError as error:
            raise _bad_answer(f"blocks in {error}") from error
    if not blocks:
        return blocks
    slot_ids, offsets, num_tokens, _ = zip(*blocks, strict=True)  # there are thousands of blocks
    if max(slot_ids) >= arena.num_slots or not 1 <= min(num_tokens) <= max(num_tokens) <= (
        layout.block_tokens
    ):
        raise _bad_answer("blocks of tokens that are not in the arena's slots")
    ends = [request.from_token, *map(add, offsets, num_tokens)]
    if any(map(lt, offsets, ends)):
        raise _bad_answer(f"blocks that overlap, or begin before token {request.from_token}")
    if ends[-1] > response.end_token:
        raise _bad_answer(f"blocks up to token {ends[-1]}, {response.end_token} announced")
    return blocks


def _check_tokens(
    slot_id: int, start: int, num_tokens: int, arena: ArenaMap, block_tokens: int
) -> None:
    if slot_id >= arena.num_slots or num_tokens < 1 or start + num_tokens > block_tokens:
        raise _bad_answer(f"tokens {start}..{start + num_tokens} of slot {slot_id}")


def _state(message: pb.GrantedState, arena: ArenaMap, layout: KVLayout) -> GrantedState:
    """Decode a granted state and check that it has as many slots as the layout's states."""
    return GrantedState(message.position, *_parts(message, arena, layout.state_slots))


def _window(message: pb.GrantedWindow, arena: ArenaMap, layout: KVLayout) -> GrantedWindow:
    """Decode a granted window and check that its tokens lie in a block."""
    slot_ids, generations = _parts(message, arena, layout.window_slots)
    offset, num_tokens, start = message.token_offset, message.num_tokens, message.start
    _check_tokens(slot_ids[0], start, num_tokens, arena, layout.block_tokens)
    return GrantedWindow(offset, num_tokens, start, slot_ids, generations)


def _parts(
    message: pb.GrantedState | pb.GrantedWindow, arena: ArenaMap, num_parts: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the slot ids and generations of a state or window; check that all are there."""
    slot_ids, generations = tuple(message.slot_ids), tuple(message.generations)
    is_whole = len(set(slot_ids)) == len(slot_ids) == len(generations) == num_parts
    if not is_whole or not slot_ids or max(slot_ids) >= arena.num_slots:
        raise _bad_answer(f"{len(slot_ids)} slots where {num_parts} are needed")
    return slot_ids, generations


def _bad_answer(what: str) -> KvdProtocolError:
    return KvdProtocolError(
        f"kvd sent an invalid answer: {what}", "check that kvd and the engine run the same release"
    )
