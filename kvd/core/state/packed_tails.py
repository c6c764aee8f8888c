"""PackedTails: blocks of idle sessions kept as bytes instead of objects.

A server may have hundreds of thousands of sessions, of which few are in use. Most blocks of an idle
session are *private* (no other session uses them) and on SSD only. The run of such blocks at the
end of a session is *packed*: 28 bytes a block instead of about 600. Only the index of blocks treats
packed blocks differently: they keep their extents, entries and quota, and are scrubbed.

How a packed block is found: the keys of blocks form a trie, and packed blocks are private. So a
look-up along the content chain reaches the first block of a packed run before the others, and only
that one is registered (`heads`). After a discard a block's key does not follow from the key before
it, so in such a run every block is registered.

Pure. Invariants:
1. a packed block is used by one session, once, and is at rest: it has no slot, no lease and no
   operation that changes it;
2. no key is both packed and in the index of blocks.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from kvd.core.records.entries import (
    FULL_SPAN_BYTES,
    PLACE_BYTES,
    BlockRecord,
    is_plain,
    pack_full,
    pack_places,
)
from kvd.core.state.block import Block, BlockIndex
from kvd.core.state.session import Session
from shared.types.block_key import KEY_BYTES
from shared.types.session_key import SessionKey

PACK_BATCH = 64  # sessions per call, to keep each call short


class PackedTails:
    """Packs and unpacks the tails of sessions.

    Args:
        blocks: the index of blocks.
        sessions: all sessions.
        use_blocks: records that a session uses these blocks.
        packs_sessions: whether to pack at all.

    Attributes:
        heads: the owner of each registered packed block, by the block's key; see the module
            docstring.
        num_blocks: number of packed blocks of all sessions.
        kept_unpacked: a session whose blocks are being read ahead, if any.
    """

    def __init__(
        self,
        blocks: BlockIndex,
        sessions: Mapping[SessionKey, Session],
        use_blocks: Callable[[Session, Sequence[Block]], None],
        *,
        packs_sessions: bool,
    ) -> None:
        self._blocks = blocks
        self._sessions = sessions
        self._use_blocks = use_blocks
        self._packs_sessions = packs_sessions
        self.heads: dict[bytes, SessionKey] = {}
        self.num_blocks = 0
        self.kept_unpacked: SessionKey | None = None
        self._waiting: OrderedDict[SessionKey, None] = OrderedDict()  # perhaps packable

    def pack_later(self, key: SessionKey) -> None:
        """Consider packing a session after the current call."""
        if self._packs_sessions:
            self._waiting[key] = None

    def pack_idle(self) -> None:
        """Pack idle sessions, at most PACK_BATCH of them. Must not run during another call."""
        for _ in range(min(len(self._waiting), PACK_BATCH)):
            key, _ = self._waiting.popitem(last=False)
            session = self._sessions.get(key)
            if session is not None and (key == self.kept_unpacked or self.pack(session)):
                self._waiting[key] = None

    def pack(self, session: Session) -> bool:
        """Pack as many of the session's last blocks as possible: O(its blocks).

        Returns:
            Whether more can be packed once a lease or an operation has ended.
        """
        if len(session.block_keys()) < len(session.spans):
            return False  # a discard has left two spans of one block: too rare to handle
        taken: list[Block] = []
        is_busy = False
        for span in reversed(session.spans):
            block = self._blocks[span.block_key]
            if len(block.users) > 1 or block.slot_id is not None or block.extent is None:
                break
            is_busy = not block.may_vanish()
            if is_busy:
                break
            taken.append(block)
        if taken:
            taken.reverse()
            self._pack_blocks(session, taken)
        return is_busy

    def unpack(self, session: Session) -> None:
        """Put all blocks of a session into the index. It is packed again when it is idle."""
        if not session.packed:
            return
        records, spans = list(session.tail_blocks()), list(session.tail_spans())
        self._unregister(session)
        session.packed = session.packed_spans = b""
        session.spans = [*session.spans, *spans]
        blocks = []
        for record in records:
            block = Block(record.key, record.num_tokens, session.key.tenant)
            self._blocks.add(block)
            self._blocks.enter_ssd(block, record.extent)
            blocks.append(block)
        self._use_blocks(session, blocks)
        self.pack_later(session.key)

    def take(self, session: Session, num_blocks: int) -> list[BlockRecord]:
        """Remove a session's last packed blocks. The caller frees their extents and entries."""
        num_kept = session.num_packed - num_blocks
        taken = list(session.tail_blocks())[num_kept:]
        self._unregister(session)
        session.packed = session.packed[: num_kept * PLACE_BYTES]
        session.packed_spans = session.packed_spans[: num_kept * FULL_SPAN_BYTES]
        self._register(session)
        return taken

    def restore(self, sessions: Sequence[Session]) -> None:
        """Register sessions that recovery has read as packed ones, with plain spans only."""
        self.num_blocks += sum(len(session.packed) for session in sessions) // PLACE_BYTES
        self.heads.update((session.packed[:KEY_BYTES], session.key) for session in sessions)

    def head_keys(self, session: Session) -> list[bytes]:
        """Return the keys under which a session's packed blocks are registered."""
        if session.packed_spans:
            return [block.key for block in session.tail_blocks()]
        return [session.packed[:KEY_BYTES]] if session.packed else []

    def _pack_blocks(self, session: Session, blocks: list[Block]) -> None:
        """Turn the last blocks of a session, in token order, into bytes."""
        num_kept = len(session.spans) - len(blocks)
        spans = [*session.spans[num_kept:], *session.tail_spans()]
        records = []
        for block in blocks:
            records.append(BlockRecord(block.key, self._blocks.leave_ssd(block), block.num_tokens))
            self._blocks.remove(block)
        self._unregister(session)
        session.spans = session.spans[:num_kept] if num_kept else ()
        session.packed = pack_places(records) + session.packed
        session.packed_spans = b"" if all(map(is_plain, spans)) else pack_full(spans)
        self._register(session)

    def _register(self, session: Session) -> None:
        self.num_blocks += session.num_packed
        for key in self.head_keys(session):
            assert key not in self.heads, "a packed block has one owner"
            self.heads[key] = session.key

    def _unregister(self, session: Session) -> None:
        self.num_blocks -= session.num_packed
        for key in self.head_keys(session):
            del self.heads[key]
