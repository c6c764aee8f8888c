"""What kvd grants an engine, decoded and checked: an answer that makes no sense is never acted on.

Pure. The memory behind slot numbers is added by shared/kvd_client/client.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.kvd_client.arena_map import ArenaMap, LoadProgress, ProgressWords
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
        spans: contiguous, covering [from_token, end_token).
        more: whether more is stored beyond end_token; request it after complete_load.
        miss_reason: slug, why no more is granted; "" if it is not said, as it is of a MISS.
        arena: stays mapped for as long as this grant is referred to.
        progress: reports which layers are ready; None unless PENDING.
        state: the model's state at end_token, to be read once all layers are ready. None: the
            layout has none, or the arena could not hold all at once; then there is `more`, and what
            was loaded is of no use before the state has come, too.
        windows: those of the blocks before end_token, in order, as far as a layer with a window
            attends to them from there; to be read, and left out, as a state.
        fetch_waited_s: for how long kvd has waited for the session to be fetched from elsewhere.
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
        lease_id: 0 when there is nothing to write and nothing to complete.
        blocks: in token order, not overlapping; what is stored already is not among them.
        end_token: after completion [0, end_token) is stored.
        more: whether to call again after complete_store, with from_token = end_token.
        refused_reason: "no_space", "gap", or "".
        arena: the arena of the slots; stays mapped for as long as this grant is referred to.
        states: of the positions asked for, by position, none behind end_token; there may be some
            where there are no blocks.
        windows: for the positions asked for, in token order, from from_token to end_token; of
            blocks among these, or of such as are stored.
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
_TIERS = {pb.TIER_DRAM: "dram", pb.TIER_SSD: "ssd"}
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
        layout: of the slots.
        words: progress words, for an answer that is PENDING.

    Raises:
        KvdProtocolError: if it is not a miss or a non-empty contiguous hit inside the arena, or is
            pending though that was not asked for, or has a state or windows where there can be
            none, or not all that there are to be, or has waited for less than no time.
    """
    lookup = _LOOKUPS.get(response.lookup)
    if lookup is None or (lookup is Lookup.PENDING and not request.accept_pending):
        raise _nonsense(f"lookup {response.lookup}")
    is_granted = lookup is not Lookup.MISS
    spans = tuple(
        _LOAD_SPAN.decode_row(span, _TIERS.get(span.tier, "unknown")) for span in response.spans
    )
    if is_granted != bool(spans) or is_granted != bool(response.lease_id):
        raise _nonsense(f"a {lookup.value} with {len(spans)} spans")
    end = _checked_end(spans, request, arena, layout.block_tokens)
    if is_granted and end != response.end_token:
        raise _nonsense(f"spans up to token {end}, {response.end_token} announced")
    state = _state(response.state, arena, layout) if response.HasField("state") else None
    if state is not None and not (is_granted and state.position == end):
        raise _nonsense(f"a state at {state.position}, with tokens up to {end}")
    if is_granted and layout.state_bytes and state is None and not response.more:
        raise _nonsense(f"tokens up to {end} without a state")
    if not response.fetch_waited_s >= 0:  # which not even NaN is
        raise _nonsense(f"a wait of {response.fetch_waited_s} seconds")
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


def _check_windows(
    windows: Sequence[GrantedWindow], end: int, layout: KVLayout, *, is_whole: bool
) -> None:
    """Check that windows follow each other up to the end, from where layers attend from there."""
    if not windows:
        if is_whole and layout.window:
            raise _nonsense(f"tokens up to {end} without their windows")
        return
    ends = [window.token_offset + window.num_tokens for window in windows]
    is_joined = ends == [*(window.token_offset for window in windows[1:]), end]
    slot_ids = [slot_id for window in windows for slot_id in window.slot_ids]
    is_enough = windows[0].token_offset <= max(0, end - layout.window)
    if not is_whole or not is_joined or not is_enough or len(set(slot_ids)) < len(slot_ids):
        raise _nonsense(f"windows of tokens up to {ends}, with tokens up to {end}")


def _checked_end(
    spans: Sequence[LoadSpan],
    request: pb.PrepareLoadRequest,
    arena: ArenaMap,
    block_tokens: int,
) -> int:
    """Return the token after the last span; the spans follow each other inside the request."""
    end = request.from_token
    for span in spans:
        _check_tokens(span.slot_id, span.start, span.num_tokens, arena, block_tokens)
        if span.token_offset != end:
            raise _nonsense(f"a span at token {span.token_offset}, {end} comes next")
        end += span.num_tokens
    if spans and end > len(request.token_ids) // TOKEN_BYTES:
        raise _nonsense(f"spans up to token {end}, beyond the request's")
    return end


def _progress(response: pb.PrepareLoadResponse, words: ProgressWords) -> LoadProgress:
    if response.progress_index >= words.num_words:
        raise _nonsense(f"progress word {response.progress_index} of {words.num_words}")
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
        request: what was asked.
        arena: whose slots it names.
        layout: of the slots.

    Raises:
        KvdProtocolError: if a block lies outside the arena or the tokens, or two overlap, or a
            state is granted that was not asked for.
    """
    blocks = tuple(map(_STORE_BLOCK.decode_row, response.blocks))
    states = tuple(_state(granted, arena, layout) for granted in response.states)
    windows = tuple(_window(granted, arena, layout) for granted in response.windows)
    beside: tuple[GrantedState | GrantedWindow, ...] = (*states, *windows)
    if bool(blocks or beside) != bool(response.lease_id):
        raise _nonsense(
            f"lease {response.lease_id} with {len(blocks)} blocks, and {len(beside)} states "
            "and windows"
        )
    end = request.from_token
    for block in blocks:
        _check_tokens(block.slot_id, 0, block.num_tokens, arena, layout.block_tokens)
        if block.token_offset < end:
            raise _nonsense(f"a block at token {block.token_offset}, before {end}")
        end = block.token_offset + block.num_tokens
    if blocks and end > response.end_token:
        raise _nonsense(f"blocks up to token {end}, {response.end_token} announced")
    slot_ids = [block.slot_id for block in blocks]
    slot_ids += [slot_id for granted in beside for slot_id in granted.slot_ids]
    is_beyond = response.end_token > len(request.token_ids) // TOKEN_BYTES
    if is_beyond or len(set(slot_ids)) < len(slot_ids):
        raise _nonsense("blocks that share a slot or lie beyond the tokens")
    positions = [state.position for state in states]
    wanted = {p for p in request.load_ends if p <= response.end_token}
    if positions != sorted(set(positions) & wanted):
        raise _nonsense(f"states at {positions}")
    end = request.from_token
    for window in windows:
        if not request.load_ends or window.start or window.token_offset < end:
            raise _nonsense(f"a window of tokens from {window.token_offset} on, before {end}")
        end = window.token_offset + window.num_tokens
    if windows and end > response.end_token:
        raise _nonsense(f"windows up to token {end}, {response.end_token} announced")
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


def _check_tokens(
    slot_id: int, start: int, num_tokens: int, arena: ArenaMap, block_tokens: int
) -> None:
    if slot_id >= arena.num_slots or num_tokens < 1 or start + num_tokens > block_tokens:
        raise _nonsense(f"tokens {start}..{start + num_tokens} of slot {slot_id}")


def _state(message: pb.GrantedState, arena: ArenaMap, layout: KVLayout) -> GrantedState:
    """Decode a state that is granted; it has as many slots as one of the layout needs."""
    return GrantedState(message.position, *_parts(message, arena, layout.state_slots))


def _window(message: pb.GrantedWindow, arena: ArenaMap, layout: KVLayout) -> GrantedWindow:
    """Decode a window that is granted; its tokens lie in a block."""
    slot_ids, generations = _parts(message, arena, layout.window_slots)
    offset, num_tokens, start = message.token_offset, message.num_tokens, message.start
    _check_tokens(slot_ids[0], start, num_tokens, arena, layout.block_tokens)
    return GrantedWindow(offset, num_tokens, start, slot_ids, generations)


def _parts(
    message: pb.GrantedState | pb.GrantedWindow, arena: ArenaMap, num_parts: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return slots and generations of a state or a window: as many as the layout says."""
    slot_ids, generations = tuple(message.slot_ids), tuple(message.generations)
    is_whole = len(set(slot_ids)) == len(slot_ids) == len(generations) == num_parts
    if not is_whole or not slot_ids or max(slot_ids) >= arena.num_slots:
        raise _nonsense(f"{len(slot_ids)} slots where {num_parts} are needed")
    return slot_ids, generations


def _nonsense(what: str) -> KvdProtocolError:
    return KvdProtocolError(f"kvd answered {what}", "check that both run the same release")
