"""Compaction plans: which spans of a session to merge, into which blocks, under which keys.

Pure; changes nothing. A plan moves only spans that a discard has left, out of blocks that only this
session uses: moving tokens out of a shared block frees nothing. It takes whole spans, in order, as
many as fit into a block, so that a new block ends where a span ended. The block takes over that
span's chain key, so that the keys of all that was computed after it stay the same. The chain key
stands for all of the context up to there, so a key made of it and the number of tokens means equal
KV (shared/types/block_key.py: dense_key).

A span with a window stays where it is, because the window is found by the key of its block. A span
also stays as long as it cannot be moved: its block is shared, not in DRAM, not hashed or verified
yet, or in use.
"""

from collections.abc import Sequence

from kvd.core.operations.chaining import Chaining
from kvd.core.records.actions import CompactTokens, DenseBlock, SourceSlot, TokenRun
from kvd.core.records.entries import Span, is_plain
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState
from kvd.core.state.compaction_run import Compaction, Dense, Plan
from kvd.core.state.session import Session
from shared.types.block_key import TOKEN_BYTES, dense_key

MANY_SPANS = 4  # spans per block, on average; each one costs an entry in a load's answer


def is_wasteful(state: CacheState, session: Session) -> bool:
    """Whether discards have left so much unused space that compaction pays; O(spans)."""
    num_tokens = num_spans = 0
    keys = set()
    for span in session.spans:
        if _is_loose(state, span) and len(state.blocks[span.block_key].users) == 1:
            keys.add(span.block_key)
            num_tokens += span.num_tokens
            num_spans += 1
    capacity = len(keys) * state.layout.block_tokens
    if len(keys) * state.layout.block_bytes < max(1, state.limits.compact_min_bytes):
        return False
    is_loose = capacity - num_tokens >= state.limits.max_waste * capacity
    return is_loose or num_spans >= MANY_SPANS * len(keys)


def is_pending(state: CacheState, session: Session) -> bool:
    """Whether some span can only not be moved yet: its block is being hashed, written or used."""
    blocks = (state.blocks[span.block_key] for span in session.spans if _is_loose(state, span))
    return any(
        block.slot_id is not None and len(block.users) == 1 and not may_be_copied(state, block)
        for block in blocks
    )


def plan_compaction(
    state: CacheState, session: Session, first: int, offset: int, max_blocks: int
) -> Plan | None:
    """Plan up to `max_blocks` new blocks.

    Cost: O(spans looked at), with a hash for each that may be moved.

    Args:
        state: the cache's tables.
        session: the session to compact.
        first: index of the span to begin with.
        offset: token position of that span.
        max_blocks: number of slots for new blocks.

    Returns:
        The plan; None if there is nothing to merge.
    """
    planning = _Planning(state, session, Plan(first))
    for span in session.spans[first:]:
        planning.take(span, offset)
        offset += span.num_tokens
        if len(planning.plan.dense) == max_blocks:
            break
    else:
        planning.close(offset)
    return planning.finish()


class _Planning:
    """Gathers spans into groups; each group of several spans becomes a block."""

    def __init__(self, state: CacheState, session: Session, plan: Plan) -> None:
        self.plan = plan
        self._state = state
        self._salt = state.salt_of(session.key.tenant)
        self._chaining = Chaining(state.layout, state.salt_of(session.key.tenant), session.lineage)
        self._group: list[Span] = []
        self._num_tokens = 0
        self._between: list[Span] = []  # spans since the last dense block, which stay as they are

    def take(self, span: Span, offset: int) -> None:
        """Add the next span, which begins at a token offset."""
        is_movable = self._is_movable(span, offset + span.num_tokens)
        if not is_movable or self._num_tokens + span.num_tokens > self._state.layout.block_tokens:
            self.close(offset)
        self._group.append(span)
        self._num_tokens += span.num_tokens
        if not is_movable:
            self.close(offset + span.num_tokens)

    def close(self, offset: int) -> None:
        """End the group of spans at a token offset."""
        plan, group = self.plan, self._group
        self._group, self._num_tokens = [], 0
        if len(group) > 1:
            dense = self._make_dense(group)
            plan.dense.append(dense)
            plan.old += [*self._between, *group]
            plan.new += [*self._between, dense.span]
            plan.end_offset = offset
            self._between = []
        elif plan.dense:
            self._between += group
        else:
            plan.first += len(group)

    def finish(self) -> Plan | None:
        """Return the plan, which ends with its last new block; None if there is none."""
        return self.plan if self.plan.dense else None

    def _is_movable(self, span: Span, end: int) -> bool:
        """Whether a span may be moved now, and has the chain key of the session's lineage."""
        if not _is_loose(self._state, span) or self._chaining.lineage.is_whole:
            return False
        block = self._state.blocks[span.block_key]
        return may_be_copied(self._state, block) and (
            span.chain == self._chaining.after_discards(end)
        )

    def _make_dense(self, group: Sequence[Span]) -> Dense:
        """Return the dense block that replaces a group of spans."""
        chain, num_tokens = group[-1].chain, sum(span.num_tokens for span in group)
        tokens = b"".join(map(self._tokens, group))
        key = dense_key(self._salt, chain, num_tokens)
        span = Span(key, 0, num_tokens, self._chaining.digest(tokens), chain)
        return Dense(span, tuple(group), tokens)

    def _tokens(self, span: Span) -> bytes:
        start, end = span.start, span.start + span.num_tokens
        token_ids = self._state.blocks[span.block_key].token_ids
        return token_ids[start * TOKEN_BYTES : end * TOKEN_BYTES]


def _is_loose(state: CacheState, span: Span) -> bool:
    """Whether a discard has left the span, and no window belongs to its block."""
    if is_plain(span) or not span.num_tokens:
        return False
    return state.stored_parts is None or not state.stored_parts.behind(span.block_key)


def may_be_copied(state: CacheState, block: Block) -> bool:
    """Whether a block has one user, and its bytes are in DRAM, verified and not in use."""
    is_good = bool(block.checksums) and not block.is_unverified
    is_at_rest = block.io is BlockIo.IDLE and not block.readers and not block.holders
    is_own = len(block.users) == 1 and block.slot_id is not None
    return is_own and is_good and is_at_rest and not state.unwritten.holds(block)


def copy_action(state: CacheState, run: Compaction) -> CompactTokens:
    """Return the action that copies the sources of a run to its targets."""
    targets = []
    for target in run.targets:
        runs = tuple(
            TokenRun(_slot(state.blocks[span.block_key]), span.start, span.num_tokens)
            for span in target.dense.sources
        )
        targets.append(DenseBlock(target.slot_id, target.dense.span.num_tokens, runs))
    sources = tuple(SourceSlot(_slot(b), b.num_tokens, b.checksums) for b in run.sources)
    return CompactTokens(run.op_id, sources, tuple(targets))


def _slot(block: Block) -> int:
    assert block.slot_id is not None, "a source is in DRAM"
    return block.slot_id
