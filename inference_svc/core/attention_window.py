"""Which tokens of a sequence can be built on where layers attend to the last tokens only. Pure.

Of such layers the store keeps, and gives, KV of the last tokens only, as many as they attend to
(`window` tokens): in the sequence's memory the slots before are empty. What comes next is right
wherever these layers have KV of the last `window` tokens.
"""

from collections.abc import Sequence

from inference_svc.core.discards import Range, num_in


def is_whole(num_tokens: int, window_from: int, window: int) -> bool:
    """Whether what follows the first tokens of a sequence can be computed.

    Args:
        num_tokens: of these.
        window_from: first token of the sequence of which layers with a window have KV.
        window: most tokens that such a layer attends to; 0: there are none.
    """
    return not window or not window_from or window_from <= num_tokens - window


def after_discard(window_from: int, ranges: Sequence[Range]) -> int:
    """Return `window_from` of what is left of a sequence once tokens are dropped.

    Args:
        window_from: before that.
        ranges: of tokens that are dropped, merged.
    """
    before = [(start, min(end, window_from)) for start, end in ranges if start < window_from]
    return window_from - num_in(before)
