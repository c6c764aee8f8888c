"""BlockUsers: which sessions use a block, and how many of them answer for it in each tier.

A session *answers* for its blocks in a tier while the policy ranks it there, or while it is
hard-pinned. Whoever evicts asks of each block whether a session answers that is not passed over
yet, and a system prompt may have 100,000 users: so each block counts those that answer, and a look
costs O(1). The counts change when a session enters or leaves an order, O(its blocks) each time.

Only sessions that have clean blocks in DRAM are looked at for these. One that had none to give is
not looked at again: it answers for clean blocks no more. When a block becomes clean and nobody
answers for that, the session that used it last does; so it does with each use. So an arena full of
blocks that are dirty or in use is not looked through whenever room is wanted.

Pure. Invariants (checking.py states them as code): 1. a block's counts are those of a recount;
2. a block with a user and bytes in a tier has one that answers for it there, and one with a user
that is clean in DRAM one that answers for clean blocks, once it is settled.
"""

from collections.abc import Iterable, Mapping

from kvd.core.eviction.policy import EvictionPolicy
from kvd.core.records.entries import Pin
from kvd.core.records.records import Tier
from kvd.core.state.block import Block, BlockIndex
from kvd.core.state.session import Session
from shared.types.session_key import SessionKey

Answers = tuple[bool, bool, bool]  # in DRAM, on SSD, for clean blocks in DRAM
NOWHERE: Answers = (False, False, False)
EVERYWHERE: Answers = (True, True, True)


class BlockUsers:
    """See the module docstring. Nobody else enters or leaves an order of one tier.

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
        """Return in which tiers the session answers for its blocks."""
        if session.pin is Pin.HARD:
            return EVERYWHERE
        key, policy = session.key, self._policy
        return policy.ranks(key, Tier.DRAM), policy.ranks(key, Tier.SSD), policy.offers(key)

    def add(self, session: Session, blocks: Iterable[Block]) -> None:
        """Record that a session uses these blocks from now on, and was the last to use them."""
        answers = self.answers(session)
        for block in blocks:
            block.users[session.key] = None
            block.last_user = session.key
            _count(block, answers)

    def remove(self, session: Session, block: Block) -> None:
        """Record that a session uses a block no more; `settle` is to follow."""
        del block.users[session.key]
        _count(block, self.answers(session), -1)
        if block.last_user == session.key and block.users:
            block.last_user = block.newest_user()

    def settle(self, block: Block) -> None:
        """Have one of the block's users answer for it in each tier where it has bytes; O(1).

        A session that begins to answer costs O(its blocks).
        """
        assert block.last_user is not None, "a block with users has one that used it last"
        if block.slot_id is not None and not block.num_answer_dram:
            self.on_insert(self._sessions[block.last_user], Tier.DRAM)
        if block.extent is not None and not block.num_answer_ssd:
            self.on_insert(self._sessions[block.last_user], Tier.SSD)
        if not block.num_answer_clean and block.clean:
            self.offered(self._sessions[block.last_user])

    # --------------------------------------------------------------------------------- the orders

    def on_access(self, session: Session, now_ns: int) -> None:
        """Record a use of a session that may be evicted: it answers wherever it has blocks."""
        before = self.answers(session)
        self._policy.on_access(session.key, now_ns)
        if any(self._blocks[span.block_key].clean for span in session.spans):
            self._policy.offered(session.key)
        self.recount(session, before)

    def on_insert(self, session: Session, tier: Tier) -> None:
        """Have a session answer in a tier, without a use; a hard-pinned one does already."""
        if session.pin is not Pin.HARD:
            before = self.answers(session)
            self._policy.on_insert(session.key, tier)
            self.recount(session, before)

    def on_evict(self, session: Session, tier: Tier) -> None:
        """Record that nothing of a session that may be evicted is to be had in a tier."""
        before = self.answers(session)
        self._policy.on_evict(session.key, tier)
        self.recount(session, before)

    def spent(self, session: Session) -> None:
        """Record that a session has no clean block in DRAM that it could give."""
        before = self.answers(session)
        self._policy.spent(session.key)
        self.recount(session, before)

    def offered(self, session: Session) -> None:
        """Have a session answer for clean blocks, without a use; a hard-pinned one does already."""
        if session.pin is not Pin.HARD:
            before = self.answers(session)
            self._policy.on_insert(session.key, Tier.DRAM)
            self._policy.offered(session.key)
            self.recount(session, before)

    def recount(self, session: Session, before: Answers) -> None:
        """Count anew where a session answers, after that has changed: O(its blocks)."""
        after = self.answers(session)
        if after == before:
            return
        for block_key in session.block_keys():
            block = self._blocks[block_key]
            _count(block, before, -1)
            _count(block, after)


def _count(block: Block, answers: Answers, increment: int = 1) -> None:
    in_dram, on_ssd, if_clean = answers
    block.num_answer_dram += increment * in_dram
    block.num_answer_ssd += increment * on_ssd
    block.num_answer_clean += increment * if_clean
