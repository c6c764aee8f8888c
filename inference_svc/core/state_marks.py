"""Where in a context a model's state is stored: where conversations turn. Pure.

A state stands for all tokens before a position, and cannot be cut: of use is what was taken where
the next request leaves the context. That is behind what conversations begin with, which others
share; before the prompt for the answer, since templates write an answer that is over in other
tokens than those it was made of; at a turn's end, which is no mark of the prompt; and now and then
in a long prompt, for whoever leaves it there.
"""

from collections.abc import Iterable


def state_marks(num_tokens: int, turning_points: Iterable[int], every: int) -> tuple[int, ...]:
    """Return the positions inside a prompt whose states are to be stored, in order.

    Args:
        num_tokens: of the context, history and input.
        turning_points: positions where others may leave it; 0 is none.
        every: tokens between states of a long prompt; multiples of it, so that prompts which begin
            alike have states at the same places. 0: none but the turning points.
    """
    regular = range(every, num_tokens, every) if every else ()
    return tuple(sorted({mark for mark in (*turning_points, *regular) if 0 < mark < num_tokens}))
