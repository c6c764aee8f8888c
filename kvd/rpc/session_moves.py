"""What happened to sessions, for those who ask: as messages, and in the error if one is gone."""

from collections.abc import Iterable
from functools import partial

from kvd.caches.caches import Caches
from kvd.core.engine import CacheEngine
from kvd.core.records.errors import UnknownSessionError
from kvd.core.state.session_history import Move, MoveKind
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.session_key import SessionKey, session_key
from shared.types.units import NS_PER_S, format_duration

_GONE = {
    MoveKind.DROPPED: "left all tiers for room",
    MoveKind.EXPIRED: "expired",
    MoveKind.FLUSHED: "was flushed",
}


def history_messages(moves: Iterable[Move], now_ns: int) -> list[kvd_pb2.SessionMove]:
    """Encode; instants become durations from now (D17)."""
    return [
        kvd_pb2.SessionMove(
            kind=move.kind.value,
            age_s=max(0.0, (now_ns - move.last_ns) / NS_PER_S),
            duration_s=(move.last_ns - move.first_ns) / NS_PER_S,
            num_blocks=move.num_blocks,
            num_tokens=move.num_tokens,
            why=move.why,
        )
        for move in moves
    ]


def gone_error(caches: Caches, key: SessionKey) -> UnknownSessionError | None:
    """Say what became of a session that is not stored any more; None: it is not remembered."""
    for cache in caches.of_model(key.model):
        full = session_key(key.tenant, cache.layout.model, key.session_id)
        moves, now_ns = cache.act(partial(_history, full))
        if moves and moves[-1].kind in _GONE:
            last = moves[-1]
            ago = format_duration(max(0.0, (now_ns - last.last_ns) / NS_PER_S))
            why = f" ({last.why})" if last.why == "corrupt" else ""
            return UnknownSessionError(
                f"session {key.session_id!r} of tenant {key.tenant!r} is not stored any more: "
                f"it {_GONE[last.kind]}{why} {ago} ago",
                "list what is stored with: kvd ls",
            )
    return None


def _history(key: SessionKey, core: CacheEngine) -> tuple[tuple[Move, ...], int]:
    return core.inspection.history.of(key), core.now_ns
