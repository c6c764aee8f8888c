"""What is to be read ahead for one session: its blocks that are on SSD only, in token order.

Pure. Invariant: between two uses of a session no more than `MOST_TIMES` its blocks are planned.
"""

from collections import deque
from dataclasses import dataclass

from kvd.core.records.records import Tier
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from shared.types.session_key import SessionKey

MOST_TIMES = 2  # its blocks are read ahead for a session between two uses of it


@dataclass(slots=True, eq=False)
class ReadPlan:
    """A session that is being read ahead.

    Attributes:
        missing: keys of the blocks that are not begun, as they were found.
        is_waiting: a turn of it waits; else it is likely to return.
    """

    session: Session
    missing: deque[bytes]
    is_waiting: bool
    num_begun: int = 0

    def next_block(self, state: CacheState) -> Block | None:
        """The block to be read next; those that were lost, or came with a load, are passed over."""
        while self.missing:
            block = state.blocks.get(self.missing[0])
            if block is not None and _is_missing(block):
                return block
            self.missing.popleft()
        return None

    def begun(self, state: CacheState) -> None:
        """Note that the next block is about to be read into DRAM."""
        self.missing.popleft()
        self.num_begun += 1
        self.session.num_read_ahead += 1
        state.users.entered(self.session, Tier.DRAM)


def plan_session(state: CacheState, key: SessionKey, *, is_waiting: bool) -> ReadPlan | None:
    """Find what is to be read of a session: O(its blocks); None: nothing, or no more.

    The session is unfolded; it answers in DRAM for what it has there.
    """
    session = state.sessions.get(key)
    if session is None or session.num_read_ahead >= MOST_TIMES * session.num_spans:
        return None
    state.unfold(session)
    keys = session.block_keys()
    missing = deque(key for key in keys if _is_missing(state.blocks[key]))
    if len(missing) < len(keys):
        state.users.offered(session)
    is_too_much = session.num_read_ahead + len(missing) > MOST_TIMES * session.num_spans
    return None if is_too_much or not missing else ReadPlan(session, missing, is_waiting)


def _is_missing(block: Block) -> bool:
    """Whether a block on SSD could be read into DRAM."""
    return block.slot_id is None and block.extent is not None and block.io is BlockIo.IDLE
