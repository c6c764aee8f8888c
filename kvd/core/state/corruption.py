"""Wrong bytes: how they are counted and told. Pure. An I/O error is not corruption."""

from kvd.core.records.actions import BLOCK_CORRUPT
from kvd.core.records.records import Tier
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session_history import MoveKind

CORRUPT = "corrupt"


def report_corrupt(state: CacheState, block: Block, tier: Tier) -> None:
    """Count and tell that a block's copy in this tier is not what was stored."""
    state.outbox.count("blocks_corrupt")
    state.outbox.count(f"blocks_corrupt_{tier.value}")
    fields = {"block": block.key.hex(), "tier": tier.value, "num_sessions": len(block.users)}
    state.outbox.emit(BLOCK_CORRUPT, block.last_user, fields)
    state.note_block(block, MoveKind.CORRUPT, tier.value)
