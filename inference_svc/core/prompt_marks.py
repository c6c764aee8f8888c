"""Where in a context other turns may go on: where conversations turn. Pure.

What is stored of some layers is of use at few positions only: a state stands for all tokens before
a position, and cannot be cut; a window is of the last tokens before one. So it is stored where the
next request leaves the context. That is behind what conversations begin with, which others share;
before the prompt for the answer, since templates write an answer that is over in other tokens than
those it was made of; at a turn's end, which is no mark of the prompt; and now and then in a long
prompt, for whoever leaves it there.
"""

from collections.abc import Iterable


def prompt_marks(num_tokens: int, turning_points: Iterable[int], every: int) -> tuple[int, ...]:
    """Return the positions inside a prompt where other turns may go on, in order.

    Args:
        num_tokens: of the context, history and input.
        turning_points: positions where others may leave it; 0 is none.
        every: tokens between marks of a long prompt; multiples of it, so that prompts which begin
            alike have marks at the same places. 0: none but the turning points.
    """
    regular = range(every, num_tokens, every) if every else ()
    return tuple(sorted({mark for mark in (*turning_points, *regular) if 0 < mark < num_tokens}))
