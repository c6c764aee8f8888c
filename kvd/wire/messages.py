"""Encodes the core's records as protobuf messages; decodes and checks requests. Pure.

Instants of the core become durations from now, so that clients need not share its clock (D17).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from kvd.core.records.entries import TTL_NEVER_NS
from kvd.core.records.errors import InvalidRequestError
from kvd.core.records.records import (
    BlockInfo,
    LoadAnswer,
    SessionInfo,
    StateInfo,
    StoreAnswer,
    TierStats,
    WindowInfo,
)
from kvd.core.records.tier import Tier
from kvd.core.state.turn_log import MAX_TURNS, RecordedTurn
from shared.kvd_client.messages import blocks_message, key_message, spans_message
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.serving.message_fields import MessageFields
from shared.types.graft_source import GraftSource
from shared.types.granted_slots import GrantedState, GrantedWindow, LoadSpan, StoreBlock
from shared.types.kv_layout import KVLayout
from shared.types.lineage import LINEAGE_BYTES, WHOLE, Lineage
from shared.types.session_key import SessionKey, session_key
from shared.types.units import NS_PER_S

MAX_DURATION_S = 100 * 365 * 86400.0  # an instant plus this, in ns, is less than 2^63
TURNS_PER_MESSAGE = 512  # encoding them blocks the event loop for a few milliseconds

TIERS = {Tier.DRAM: pb.TIER_DRAM, Tier.SSD: pb.TIER_SSD}

_LOAD = MessageFields(
    LoadAnswer,
    pb.PrepareLoadResponse,
    given=("spans", "columns", "progress_index", "state", "windows", "fetch_waited_s"),
)
_LOAD_SPAN = MessageFields(LoadSpan, pb.LoadSpan)
_STORE = MessageFields(
    StoreAnswer,
    pb.PrepareStoreResponse,
    renamed={"refused": "refused_reason"},
    given=("blocks", "columns", "states", "windows"),
)
_STATE = MessageFields(GrantedState, pb.GrantedState)
_WINDOW = MessageFields(GrantedWindow, pb.GrantedWindow)
_STORE_BLOCK = MessageFields(StoreBlock, pb.StoreBlock)
_SESSION = MessageFields(
    SessionInfo,
    pb.SessionInfo,
    renamed={"total_bytes": "bytes"},
    left_out=(
        *("key", "last_access_ns", "ttl_ns", "expires_at_ns"),
        *("retain_ns", "retained_until_ns"),
    ),
    given=(
        *("session", "idle_s", "ttl_s", "expires_in_s", "layout"),
        *("retain_s", "retained_for_s"),
    ),
)
_BLOCK = MessageFields(
    BlockInfo,
    pb.BlockInfo,
    left_out=("is_unverified",),
    given=("key", "tiers", "verified"),
)
_STATE_INFO = MessageFields(StateInfo, pb.StateInfo, given=("tiers",))
_WINDOW_INFO = MessageFields(WindowInfo, pb.WindowInfo, given=("tiers",))
_TURN = MessageFields(
    RecordedTurn,
    pb.RecentTurn,
    left_out=("arrived_ns", "started_ns", "ended_ns"),
    given=("arrived_s", "started_s", "ended_s"),
)


def key_of(message: pb.SessionKey, model: str = "") -> SessionKey:
    """Decode and check a session key; an empty model becomes `model`.

    Raises:
        InvalidNameError: the tenant or the session id is not a valid name.
    """
    return session_key(message.tenant, message.model or model, message.session_id)


def load_response(
    answer: LoadAnswer,
    progress_index: int = 0,
    waited_s: float = 0.0,
    *,
    has_columns: bool = False,
) -> pb.PrepareLoadResponse:
    """Encode the answer to PrepareLoad.

    Args:
        answer: the core's answer.
        progress_index: index of the load's progress word, for a PENDING answer.
        waited_s: seconds waited for a session that was being fetched.
        has_columns: whether its spans are sent as columns.
    """
    spans = () if has_columns else map(_LOAD_SPAN.encode, answer.spans)
    granted = None if answer.state is None else _STATE.encode(answer.state)
    return _LOAD.encode(
        answer,
        spans=spans,
        columns=spans_message(answer.spans) if has_columns else None,
        progress_index=progress_index,
        fetch_waited_s=waited_s,
        state=granted,
        windows=map(_WINDOW.encode, answer.windows),
    )


def store_response(answer: StoreAnswer, *, has_columns: bool = False) -> pb.PrepareStoreResponse:
    """Encode the answer to PrepareStore; with `has_columns` its blocks are sent as columns."""
    return _STORE.encode(
        answer,
        blocks=() if has_columns else map(_STORE_BLOCK.encode, answer.blocks),
        columns=blocks_message(answer.blocks) if has_columns else None,
        states=map(_STATE.encode, answer.states),
        windows=map(_WINDOW.encode, answer.windows),
    )


def session_message(info: SessionInfo, layout: KVLayout, now_ns: int) -> pb.SessionInfo:
    """Encode a session; `now_ns` is the current time of the core's clock."""
    ttl_ns = info.ttl_ns or 0
    expires_in_s = -1.0
    if info.expires_at_ns is not None:
        expires_in_s = max(0.0, (info.expires_at_ns - now_ns) / NS_PER_S)
    retained_for_ns = max(0, (info.retained_until_ns or now_ns) - now_ns)
    return _SESSION.encode(
        info,
        session=key_message(info.key),
        idle_s=(now_ns - info.last_access_ns) / NS_PER_S,
        ttl_s=-1.0 if ttl_ns == TTL_NEVER_NS else ttl_ns / NS_PER_S,
        expires_in_s=expires_in_s,
        layout=layout.fingerprint,
        retain_s=(info.retain_ns or 0) / NS_PER_S,
        retained_for_s=retained_for_ns / NS_PER_S,
    )


def block_message(block: BlockInfo) -> pb.BlockInfo:
    """Encode one span of a session and its block."""
    return _BLOCK.encode(
        block,
        key=block.key.hex(),
        tiers=[TIERS[tier] for tier in block.tiers],
        verified=Tier.DRAM in block.tiers and not block.is_unverified,
    )


def state_message(info: StateInfo) -> pb.StateInfo:
    """Encode a state of a session."""
    return _STATE_INFO.encode(info, tiers=[TIERS[tier] for tier in info.tiers])


def window_message(info: WindowInfo) -> pb.WindowInfo:
    """Encode the windows of a session's blocks."""
    return _WINDOW_INFO.encode(info, tiers=[TIERS[tier] for tier in info.tiers])


def lineage_of(
    request: pb.PrepareLoadRequest | pb.PrepareStoreRequest | pb.DiscardRequest,
) -> Lineage | None:
    """Decode the lineage of a request; return None if it has none.

    Raises:
        InvalidRequestError: the lineage is not valid.
    """
    return _decode_lineage(request.lineage) if request.HasField("lineage") else None


def graft_of(request: pb.GraftRequest, key: SessionKey) -> tuple[Lineage, GraftSource]:
    """Decode a graft: the lineage of the session's tokens, and the source of those behind them.

    Raises:
        InvalidRequestError: a lineage is not valid.
    """
    source = GraftSource(
        key._replace(session_id=request.source_session_id),
        request.source_token_ids,
        _decode_lineage(request.source_lineage),
        request.source_range.start,
        request.source_range.end,
    )
    return _decode_lineage(request.lineage), source


def _decode_lineage(message: pb.Lineage) -> Lineage:
    """Decode a lineage; one without a digest means that nothing was discarded.

    Raises:
        InvalidRequestError: the digest has a wrong length.
    """
    digest = message.digest
    if not digest:
        return WHOLE
    if len(digest) != LINEAGE_BYTES:
        raise InvalidRequestError(
            f"a lineage digest has {len(digest)} bytes",
            f"send {LINEAGE_BYTES} bytes (shared/types/lineage.py), or none if nothing was "
            "discarded",
        )
    return Lineage(digest, message.clean_tokens)


def ttl_ns_of(ttl_s: float) -> int | None:
    """Decode SetTtlRequest.ttl_s: 0 means the default (None), a negative value means never.

    Raises:
        InvalidRequestError: the value is not a valid duration.
    """
    if ttl_s == 0:
        return None
    return TTL_NEVER_NS if ttl_s < 0 else ns_of(ttl_s)


def ns_of(duration_s: float) -> int:
    """Decode a duration; a negative one is in the past.

    Raises:
        InvalidRequestError: the value is NaN, or too long for the index's numbers.
    """
    if not abs(duration_s) <= MAX_DURATION_S:  # `>` would accept NaN
        raise InvalidRequestError(
            f"a duration of {duration_s} s is too long", f"give at most {MAX_DURATION_S:.0f} s"
        )
    return int(duration_s * NS_PER_S)


def recent_turns_messages(
    turns: Iterable[RecordedTurn],
    layout: KVLayout,
    tiers: Sequence[TierStats],
    policy: str,
    ttl_s: float | None,
    now_ns: int,
) -> Iterator[pb.RecentTurns]:
    """Yield a layout's recent turns in messages of bounded size; there is at least one message.

    Args:
        turns: recorded turns, oldest first.
        layout: layout of the turns.
        tiers: statistics of the tiers, for their capacities.
        policy: name of the eviction policy.
        ttl_s: default TTL of sessions; None: they do not expire.
        now_ns: current time of the core's clock.
    """
    capacity_bytes = {tier.tier: tier.capacity_bytes for tier in tiers}
    head = pb.RecentTurns(
        layout=layout.fingerprint,
        model=layout.model,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        dram_bytes=capacity_bytes[Tier.DRAM],
        ssd_bytes=capacity_bytes[Tier.SSD],
        policy=policy,
        ttl_s=ttl_s or 0.0,
        max_turns=MAX_TURNS,
    )
    remaining = iter(turns)
    batch = list(islice(remaining, TURNS_PER_MESSAGE))
    while True:
        message = pb.RecentTurns(turns=[_turn_message(turn, now_ns) for turn in batch])
        message.MergeFrom(head)
        yield message
        batch = list(islice(remaining, TURNS_PER_MESSAGE))
        if not batch:
            return


def recorded_turns(messages: Sequence[pb.RecentTurn]) -> list[RecordedTurn]:
    """Decode recorded turns; their instants count from the arrival of the oldest turn."""
    oldest_s = max((message.arrived_s for message in messages), default=0.0)
    return [_recorded_turn(message, oldest_s) for message in messages]


def _turn_message(turn: RecordedTurn, now_ns: int) -> pb.RecentTurn:
    return _TURN.encode(
        turn,
        arrived_s=(now_ns - turn.arrived_ns) / NS_PER_S,
        started_s=(now_ns - turn.started_ns) / NS_PER_S,
        ended_s=(now_ns - turn.ended_ns) / NS_PER_S,
    )


def _recorded_turn(message: pb.RecentTurn, oldest_s: float) -> RecordedTurn:
    def instant_ns(ago_s: float) -> int:
        return round((oldest_s - ago_s) * NS_PER_S)

    return _TURN.decode(
        message,
        arrived_ns=instant_ns(message.arrived_s),
        started_ns=instant_ns(message.started_s),
        ended_ns=instant_ns(message.ended_s),
    )
