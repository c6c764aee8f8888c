"""A compaction under way, and the plan that it follows: values for compacting.py. Pure."""

from dataclasses import dataclass, field
from enum import Enum

from kvd.core.records.entries import Span
from kvd.core.state.block import Block
from shared.types.session_key import SessionKey


@dataclass(frozen=True, slots=True)
class Dense:
    """A block to be made from the KV of some spans, put one after the other."""

    span: Span
    sources: tuple[Span, ...]
    token_ids: bytes


@dataclass(slots=True)
class Plan:
    """A range of a session's spans, and the spans that will replace them.

    Attributes:
        first: index of the first span that is replaced.
        old: the spans that are replaced, dense or not.
        new: the spans that replace them.
        dense: those of the new spans whose blocks have to be made.
        end_offset: position in the session, in tokens, of what follows the range.
    """

    first: int
    old: list[Span] = field(default_factory=list)
    new: list[Span] = field(default_factory=list)
    dense: list[Dense] = field(default_factory=list)
    end_offset: int = 0


class Phase(Enum):
    """The phase of a run; kvd/core/operations/compacting.py explains each."""

    COPYING = "copying"
    WRITING = "writing"
    COMMITTING = "committing"


@dataclass(frozen=True, slots=True)
class Target:
    """A slot that will hold a dense block."""

    dense: Dense
    slot_id: int
    generation: int


@dataclass(slots=True, eq=False)
class Compaction:
    """A compaction of one session that is under way.

    Attributes:
        op_id: the operation that the performer has yet to complete, if any.
        targets: the slots that are being filled, while COPYING.
        sources: blocks whose KV is copied into the new ones. Their `io` is COPYING during the copy;
            they are held while COMMITTING.
        new_blocks: the new blocks, held while WRITING.
    """

    op_id: int
    key: SessionKey
    plan: Plan
    sources: list[Block]
    targets: list[Target]
    new_blocks: list[Block] = field(default_factory=list)
    phase: Phase = Phase.COPYING
