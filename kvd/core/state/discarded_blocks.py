"""Which blocks went because their tokens were discarded: who asks for them later is told so.

Pure. A discard takes tokens from one session. Another one that begins with the same tokens, a fork
that has not been stored yet, then finds nothing where their blocks were, and so does its own
session if it goes back to the context before. Not kept across restarts.

Invariant: at most MOST_DISCARDED keys are kept, the newest.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvd.core.records.entries import Span
from kvd.core.state.block import Block, BlockIndex
from kvd.core.state.session import Session

MOST_DISCARDED = 16_384  # about 3 MiB; two million tokens in blocks of 128


class DiscardedBlocks:
    """Keys of blocks, newest last.

    Args:
        blocks: those that there are.
    """

    def __init__(self, blocks: BlockIndex) -> None:
        self._blocks = blocks
        self._tenants: OrderedDict[bytes, str] = OrderedDict()  # by key of the block

    def __contains__(self, key: bytes) -> bool:
        return key in self._tenants

    def __len__(self) -> int:
        return len(self._tenants)

    def about_to_leave(self, session: Session, kept: Sequence[Span]) -> None:
        """Record that a session, not packed, loses all but the kept spans to a discard."""
        kept_keys = {span.block_key for span in kept}
        for block_key in session.block_keys().keys() - kept_keys:
            block = self._blocks[block_key]
            block.is_discarded = len(block.users) == 1

    def removed(self, block: Block) -> None:
        """Record that a block has left all tiers, for that or for anything else. O(1)."""
        self._tenants.pop(block.key, None)
        if block.is_discarded:
            self._tenants[block.key] = block.tenant
            if len(self._tenants) > MOST_DISCARDED:
                self._tenants.popitem(last=False)

    def forget(self, tenant: str | None) -> None:
        """Forget a tenant's blocks (None: all), because nothing of them shall remain."""
        for key in [key for key, of in self._tenants.items() if tenant in (None, of)]:
            del self._tenants[key]
