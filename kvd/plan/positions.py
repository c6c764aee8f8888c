"""What a context overflow does to what is stored, by what positions are stored with the keys. Pure.

decoupled   nothing: keys are stored without positions, and what a truncation keeps stays valid
coupled     what is stored is useless after a truncation: the turn that was truncated computes what
            is left of its history anew (the paper's OF, section 4.3.4)
"""

from dataclasses import replace
from typing import Literal

from kvd.plan.trace import Session, Turn

Positions = Literal["decoupled", "coupled"]


def coupled(session: Session, *, is_for_good: bool = False) -> Session:
    """What a session can reuse if positions are stored: a truncated history counts as new tokens.

    Args:
        session: whose history shrinks where its context was truncated.
        is_for_good: the session never hits again after its first truncation.
    """
    turns: list[Turn] = []
    kept_tokens, is_lost = 0, False
    for turn in session.turns:
        is_lost = turn.history_tokens < kept_tokens or (is_lost and is_for_good)
        turns.append(_recomputed(turn) if is_lost else turn)
        kept_tokens = turn.kept_tokens
    return replace(session, turns=tuple(turns))


def _recomputed(turn: Turn) -> Turn:
    return replace(turn, new_tokens=turn.history_tokens + turn.new_tokens, history_tokens=0)
