"""Keys of blocks that were removed because their tokens were discarded.

Pure. A discard takes tokens from one session. Another session may begin with the same tokens (a
fork that has not been stored yet), or the session itself may return to the context before. A load
of either then finds no blocks, and this table tells it why. Not kept across restarts.

Invariant: at most MOST_DISCARDED keys are kept, the newest.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvd.core.records.entries import Span
from kvd.core.state.block import Block, BlockIndex
from kvd.core.state.session import Session

MOST_DISCARDED = 16_384  # about 3 MiB; two million tokens in blocks of 128


class DiscardedBlocks:
    """Keys of discarded blocks, newest last.

    Args:
        blocks: the index of blocks.
    """

    def __init__(self, blocks: BlockIndex) -> None:
        self._blocks = blocks
        self._tenants: OrderedDict[bytes, str] = OrderedDict()  # by key of the block

    def __contains__(self, key: bytes) -> bool:
        return key in self._tenants

    def __len__(self) -> int:
        return len(self._tenants)

    def before_discard(self, session: Session, kept: Sequence[Span]) -> None:
        """Mark the blocks that only this session uses and that a discard is about to take from it.

        Args:
            session: the session, which must not be packed.
            kept: the spans that it keeps.
        """
        kept_keys = {span.block_key for span in kept}
        for block_key in session.block_keys().keys() - kept_keys:
            block = self._blocks[block_key]
            block.is_discarded = len(block.users) == 1

    def on_remove(self, block: Block) -> None:
        """Record that a block has left all tiers, for any reason. O(1)."""
        self._tenants.pop(block.key, None)
        if block.is_discarded:
            self._tenants[block.key] = block.tenant
            if len(self._tenants) > MOST_DISCARDED:
                self._tenants.popitem(last=False)

    def forget(self, tenant: str | None) -> None:
        """Forget a tenant's blocks (None: all tenants'), so that no trace of them remains."""
        for key in [key for key, owner in self._tenants.items() if tenant in (None, owner)]:
            del self._tenants[key]
