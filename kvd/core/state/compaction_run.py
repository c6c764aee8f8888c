"""A compaction under way, and the plan it follows: values that compacting.py works on. Pure."""

from dataclasses import dataclass, field
from enum import Enum

from kvd.core.records.entries import Span
from kvd.core.state.block import Block
from shared.types.session_key import SessionKey


@dataclass(frozen=True, slots=True)
class Dense:
    """A block to be made: the KV of some spans, one after the other."""

    span: Span
    sources: tuple[Span, ...]
    token_ids: bytes


@dataclass(slots=True)
class Plan:
    """A part of a session's spans, and what is to take its place.

    Attributes:
        first: index of the first span that is replaced.
        old: the spans that are replaced, dense or not.
        new: the spans that take their place.
        dense: the new ones among those.
        end_offset: position of what follows in the session, in tokens.
    """

    first: int
    old: list[Span] = field(default_factory=list)
    new: list[Span] = field(default_factory=list)
    dense: list[Dense] = field(default_factory=list)
    end_offset: int = 0


class Phase(Enum):
    """How far a run is; kvd/core/operations/compacting.py says what each phase means."""

    COPYING = "copying"
    WRITING = "writing"
    COMMITTING = "committing"


@dataclass(frozen=True, slots=True)
class Target:
    """A slot that becomes a dense block."""

    dense: Dense
    slot_id: int
    generation: int


@dataclass(slots=True, eq=False)
class Compaction:
    """A run under way.

    Attributes:
        op_id: of the operation that the performer has yet to answer, if any.
        targets: slots being filled, while COPYING.
        sources: blocks whose KV goes into new ones: COPYING while that is under way, held while
            COMMITTING.
        made: the new blocks, held while WRITING.
    """

    op_id: int
    key: SessionKey
    plan: Plan
    sources: list[Block]
    targets: list[Target]
    made: list[Block] = field(default_factory=list)
    phase: Phase = Phase.COPYING
