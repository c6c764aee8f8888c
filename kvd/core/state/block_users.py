"""The sessions that use each block, and how many of them answer for it in each tier.

A session *answers* for its blocks in a tier while the eviction policy ranks it there, or while it
is hard-pinned: eviction reaches a block through the sessions that answer for it. Eviction has to
know whether a block still has such a session that it has not passed over yet. A system prompt may
have 100,000 users, so each block counts the sessions that answer for it, and the check costs O(1).
The counts change when a session enters or leaves an eviction order: O(its blocks) each time.

Eviction looks for clean blocks in DRAM only at sessions that have some. A session found to have
none stops answering for clean blocks, and is not examined again. It answers for them again when it
is used. When a block becomes clean and no session answers for clean blocks of it, the session that
used the block last starts to. So an arena full of blocks that are dirty or in use is not searched
each time that room is needed.

Pure. Invariants (checking.py states them as code):
1. a block's counts equal a recount;
2. once a block is settled: if it has users and bytes in a tier, one of its users answers for it in
   that tier; if it has users and is clean in DRAM, one of them answers for clean blocks.
"""

from collections.abc import Iterable, Mapping

from kvd.core.eviction.policy import EvictionPolicy
from kvd.core.records.entries import Pin
from kvd.core.records.tier import Tier
from kvd.core.state.block import Block, BlockIndex
from kvd.core.state.session import Session
from shared.types.session_key import SessionKey

Answers = tuple[bool, bool, bool]  # in DRAM, on SSD, for clean blocks in DRAM
NOWHERE: Answers = (False, False, False)
EVERYWHERE: Answers = (True, True, True)


class BlockUsers:
    """Which sessions use which blocks. Sessions enter and leave a tier's eviction order only here.

    Args:
        blocks: the index of blocks.
        sessions: all sessions.
        policy: ranks the sessions.
    """

    def __init__(
        self,
        blocks: BlockIndex,
        sessions: Mapping[SessionKey, Session],
        policy: EvictionPolicy,
    ) -> None:
        self._blocks = blocks
        self._sessions = sessions
        self._policy = policy

    def answers(self, session: Session) -> Answers:
        """Return the tiers in which the session answers for its blocks."""
        if session.pin is Pin.HARD:
            return EVERYWHERE
        key, policy = session.key, self._policy
        return policy.ranks(key, Tier.DRAM), policy.ranks(key, Tier.SSD), policy.offers(key)

    def add(self, session: Session, blocks: Iterable[Block]) -> None:
        """Record that a session uses these blocks from now on, and is the last that used them."""
        answers = self.answers(session)
        for block in blocks:
            block.users[session.key] = None
            block.last_user = session.key
            _count(block, answers)

    def remove(self, session: Session, block: Block) -> None:
        """Record that a session no longer uses a block. The caller calls `settle` next."""
        del block.users[session.key]
        _count(block, self.answers(session), -1)
        if block.last_user == session.key and block.users:
            block.last_user = block.newest_user()

    def settle(self, block: Block) -> None:
        """Make sure that a user of the block answers for it in each tier where it has bytes.

        O(1), and O(its blocks) for a session that starts to answer.
        """
        assert block.last_user is not None, "a block with users has one that used it last"
        if block.slot_id is not None and not block.num_answer_dram:
            self.on_insert(self._sessions[block.last_user], Tier.DRAM)
        if block.extent is not None and not block.num_answer_ssd:
            self.on_insert(self._sessions[block.last_user], Tier.SSD)
        if not block.num_answer_clean and block.clean:
            self.start_offering(self._sessions[block.last_user])

    # --------------------------------------------------------------------------------- the orders

    def on_access(self, session: Session, now_ns: int) -> None:
        """Record a use of an evictable session: it answers in each tier where it has blocks."""
        before = self.answers(session)
        self._policy.on_access(session.key, now_ns)
        has_ssd = self._blocks.num_ssd > 0  # else no block is clean
        if has_ssd and any(self._blocks[span.block_key].clean for span in session.spans):
            self._policy.start_offering(session.key)
        self.recount(session, before)

    def on_insert(self, session: Session, tier: Tier) -> None:
        """Let a session answer in a tier, without a use. No effect if it is hard-pinned."""
        if session.pin is not Pin.HARD:
            before = self.answers(session)
            self._policy.on_insert(session.key, tier)
            self.recount(session, before)

    def on_evict(self, session: Session, tier: Tier) -> None:
        """Record that an evictable session has nothing more to give in a tier."""
        before = self.answers(session)
        self._policy.on_evict(session.key, tier)
        self.recount(session, before)

    def stop_offering(self, session: Session) -> None:
        """Record that a session has no clean block in DRAM to give."""
        before = self.answers(session)
        self._policy.stop_offering(session.key)
        self.recount(session, before)

    def start_offering(self, session: Session) -> None:
        """Let a session answer for clean blocks, without a use. No effect if it is hard-pinned."""
        if session.pin is not Pin.HARD:
            before = self.answers(session)
            self._policy.on_insert(session.key, Tier.DRAM)
            self._policy.start_offering(session.key)
            self.recount(session, before)

    def recount(self, session: Session, before: Answers) -> None:
        """Update the counts of a session's blocks after its answers changed: O(its blocks).

        Args:
            session: the session.
            before: what `answers` returned before the change.
        """
        after = self.answers(session)
        if after == before:
            return
        for block_key in session.block_keys():
            block = self._blocks[block_key]
            _count(block, before, -1)
            _count(block, after)


def _count(block: Block, answers: Answers, increment: int = 1) -> None:
    in_dram, on_ssd, for_clean = answers
    block.num_answer_dram += increment * in_dram
    block.num_answer_ssd += increment * on_ssd
    block.num_answer_clean += increment * for_clean
