"""Grafts: where a context goes on with KV of another session's. Pure.

A conversation that was edited has tokens behind the edit whose KV another session has computed
(`edits.py`). The store gives it to this one: a graft. What follows is of another lineage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.types.lineage import Lineage


@dataclass(frozen=True)
class Graft:
    """One graft, as it is recorded.

    Attributes:
        seam: number of tokens of the context before it.
        num_tokens: whose KV was there.
        session_id: the session that has computed it.
        source_start: position of its first token in that session's context.
        healed_tokens: tokens before the seam that were computed anew though they are the same.
        lineage: of the context from the seam on.
    """

    seam: int
    num_tokens: int
    session_id: str
    source_start: int
    healed_tokens: int
    lineage: Lineage


def kept_among(grafts: Sequence[Graft], num_tokens: int) -> int:
    """Count the grafted tokens among the first tokens of a context."""
    return sum(max(0, min(graft.num_tokens, num_tokens - graft.seam)) for graft in grafts)
