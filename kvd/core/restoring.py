"""Recovery: from the rows of the index to the state they describe.

Pure. Reads no data: blocks are verified when they are used (D11). Rows that cannot be are removed,
not trusted: blocks outside the tier, two blocks on one extent, sessions beyond the prefix whose
blocks exist.
"""

from collections.abc import Iterable, Iterator

from kvd.core.actions import RESTORED
from kvd.core.block import Block
from kvd.core.records import BlockRecord, SessionRecord, Span, Tier
from kvd.core.session import Session
from kvd.core.state import CacheState
from shared.block_key import TOKEN_BYTES


def restore(
    state: CacheState, sessions: Iterable[SessionRecord], blocks: Iterable[BlockRecord]
) -> None:
    """See CacheEngine.restore."""
    assert not len(state.blocks), "a cache is restored before it is used"
    num_dropped = _restore_blocks(state, blocks)
    newest_first = sorted(sessions, key=lambda record: record.last_access_ns, reverse=True)
    for record in newest_first[state.limits.max_sessions :]:
        state.outbox.session_changed(record.key)
    for record in reversed(newest_first[: state.limits.max_sessions]):
        _restore_session(state, record)
    for block in [block for block in state.blocks if not block.users]:
        num_dropped += 1
        state.forget(block)
    fields = {
        "num_sessions": len(state.sessions),
        "num_blocks": len(state.blocks),
        "num_dropped_blocks": num_dropped,
    }
    state.outbox.emit(RESTORED, None, fields)


def _restore_blocks(state: CacheState, records: Iterable[BlockRecord]) -> int:
    used: set[int] = set()
    num_dropped = 0
    for record in records:
        is_sound = (
            0 <= record.extent < len(state.extents)
            and record.extent not in used
            and len(record.token_ids) == record.num_tokens * TOKEN_BYTES
            and state.blocks.get(record.key) is None
        )
        if not is_sound:
            num_dropped += 1
            state.drop_row(record.key, None)
            continue
        used.add(record.extent)
        block = Block(record.key, record.num_tokens)
        state.blocks.add(block)
        state.blocks.enter_ssd(block, record.extent, record.checksums)
    state.extents.restore(used)
    return num_dropped


def _restore_session(state: CacheState, record: SessionRecord) -> None:
    spans = list(_sound_prefix(state, record.spans))
    if len(spans) < len(record.spans):
        state.outbox.session_changed(record.key)
    if not spans:
        return
    session = Session(
        key=record.key,
        last_access_ns=min(record.last_access_ns, state.now_ns),
        ttl_ns=record.ttl_ns,
        pinned=record.pinned,
        ended=record.ended,
        lost="" if len(spans) == len(record.spans) else "evicted",
    )
    session.spans = spans
    state.sessions[record.key] = session
    for block_key in session.block_keys():
        block = state.blocks[block_key]
        block.users[session.key] = None
        block.last_user = session.key
    if not session.pinned:
        state.policy.entered(session.key, Tier.SSD)
        if session.ended:
            state.policy.ended(session.key)
    state.schedule_expiry(session)


def _sound_prefix(state: CacheState, spans: Iterable[Span]) -> Iterator[Span]:
    for span in spans:
        block = state.blocks.get(span.block_key)
        if block is None or span.start + span.num_tokens > block.num_tokens:
            return
        yield span
