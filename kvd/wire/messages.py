"""The core's records as protobuf messages, and session keys back. Pure."""

from kvd.core.records.errors import InvalidRequestError
from kvd.core.records.records import BlockInfo, LoadAnswer, Lookup, SessionInfo, StoreAnswer, Tier
from kvd.core.records.rows import TTL_NEVER_NS, Pin
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.kv_layout import KVLayout
from shared.types.lineage import LINEAGE_BYTES, WHOLE, Lineage
from shared.types.session_key import SessionKey, session_key
from shared.types.units import NS_PER_S

MAX_DURATION_S = 100 * 365 * 86400.0  # in ns, added to an instant, it is less than 2^63

TIERS = {Tier.DRAM: kvd_pb2.TIER_DRAM, Tier.SSD: kvd_pb2.TIER_SSD}
_LOOKUPS = {
    Lookup.HIT: kvd_pb2.LOOKUP_HIT,
    Lookup.PENDING: kvd_pb2.LOOKUP_PENDING,
    Lookup.MISS: kvd_pb2.LOOKUP_MISS,
}
_PINS = {Pin.NONE: kvd_pb2.PIN_NONE, Pin.SOFT: kvd_pb2.PIN_SOFT, Pin.HARD: kvd_pb2.PIN_HARD}
_TTL_SOURCES = {
    "default": kvd_pb2.TTL_SOURCE_DEFAULT,
    "tenant": kvd_pb2.TTL_SOURCE_TENANT,
    "session": kvd_pb2.TTL_SOURCE_SESSION,
}


def key_message(key: SessionKey) -> kvd_pb2.SessionKey:
    """Encode."""
    return kvd_pb2.SessionKey(tenant=key.tenant, model=key.model, session_id=key.session_id)


def key_of(message: kvd_pb2.SessionKey, model: str = "") -> SessionKey:
    """Decode and check; an empty model becomes `model`.

    Raises:
        InvalidNameError: tenant or session id cannot be one.
    """
    return session_key(message.tenant, message.model or model, message.session_id)


def load_response(answer: LoadAnswer, progress_index: int = 0) -> kvd_pb2.PrepareLoadResponse:
    """Encode; a PENDING answer goes with the index of its progress word."""
    return kvd_pb2.PrepareLoadResponse(
        lookup=_LOOKUPS[answer.lookup],
        lease_id=answer.lease_id,
        spans=[
            kvd_pb2.LoadSpan(
                slot_id=span.slot_id,
                start=span.start,
                num_tokens=span.num_tokens,
                token_offset=span.token_offset,
                tier=TIERS[span.tier],
                generation=span.generation,
            )
            for span in answer.spans
        ],
        end_token=answer.end_token,
        more=answer.more,
        miss_reason=answer.miss_reason,
        progress_index=progress_index,
    )


def store_response(answer: StoreAnswer) -> kvd_pb2.PrepareStoreResponse:
    """Encode."""
    return kvd_pb2.PrepareStoreResponse(
        lease_id=answer.lease_id,
        blocks=[
            kvd_pb2.StoreBlock(
                slot_id=block.slot_id,
                token_offset=block.token_offset,
                num_tokens=block.num_tokens,
                generation=block.generation,
            )
            for block in answer.blocks
        ],
        end_token=answer.end_token,
        more=answer.more,
        refused_reason=answer.refused,
    )


def session_message(info: SessionInfo, layout: KVLayout, now_ns: int) -> kvd_pb2.SessionInfo:
    """Encode; instants become durations from now (D17)."""
    ttl_ns = info.ttl_ns or 0
    expires_in_s = -1.0
    if info.expires_at_ns is not None:
        expires_in_s = max(0.0, (info.expires_at_ns - now_ns) / NS_PER_S)
    return kvd_pb2.SessionInfo(
        session=key_message(info.key),
        num_tokens=info.num_tokens,
        num_blocks=info.num_blocks,
        bytes=info.total_bytes,
        dram_bytes=info.dram_bytes,
        ssd_bytes=info.ssd_bytes,
        dirty_bytes=info.dirty_bytes,
        shared_blocks=info.shared_blocks,
        pin=_PINS[info.pin],
        leases=info.leases,
        idle_s=(now_ns - info.last_access_ns) / NS_PER_S,
        ttl_s=-1.0 if ttl_ns == TTL_NEVER_NS else ttl_ns / NS_PER_S,
        expires_in_s=expires_in_s,
        layout=layout.fingerprint,
        ended=info.ended,
        ttl_source=_TTL_SOURCES[info.ttl_source],
        num_spans=info.num_spans,
        waste_bytes=info.waste_bytes,
    )


def block_message(block: BlockInfo) -> kvd_pb2.BlockInfo:
    """Encode."""
    return kvd_pb2.BlockInfo(
        key=block.key.hex(),
        token_offset=block.token_offset,
        start=block.start,
        num_tokens=block.num_tokens,
        tiers=[TIERS[tier] for tier in block.tiers],
        slot_id=block.slot_id or 0,
        extent=block.extent or 0,
        sessions=block.num_sessions,
        dirty=block.dirty,
        hashed=block.is_hashed,
        verified=Tier.DRAM in block.tiers and not block.is_unverified,
    )


def lineage_of(
    request: kvd_pb2.PrepareLoadRequest | kvd_pb2.PrepareStoreRequest | kvd_pb2.DiscardRequest,
) -> Lineage | None:
    """Decode the lineage that a request names; None if it names none.

    Raises:
        InvalidRequestError: it is none that could be.
    """
    if not request.HasField("lineage"):
        return None
    digest = request.lineage.digest
    if not digest:
        return WHOLE
    if len(digest) != LINEAGE_BYTES:
        raise InvalidRequestError(
            f"a lineage digest of {len(digest)} bytes",
            f"send {LINEAGE_BYTES} bytes (shared/types/lineage.py), or none: nothing was discarded",
        )
    return Lineage(digest, request.lineage.clean_tokens)


def ttl_ns_of(ttl_s: float) -> int | None:
    """Decode SetTtlRequest.ttl_s: 0 is the default (None), negative is never.

    Raises:
        InvalidRequestError: it is no duration.
    """
    if ttl_s == 0:
        return None
    return TTL_NEVER_NS if ttl_s < 0 else ns_of(ttl_s)


def ns_of(duration_s: float) -> int:
    """Decode a duration; a negative one is in the past.

    Raises:
        InvalidRequestError: it is not a number, or longer than numbers of the index can be.
    """
    if not abs(duration_s) <= MAX_DURATION_S:  # not `>`: NaN is neither
        raise InvalidRequestError(
            f"a duration of {duration_s} s", f"give at most {MAX_DURATION_S:.0f} s"
        )
    return int(duration_s * NS_PER_S)
