"""Where a chat's messages begin among its tokens: where a context may be cut. Pure.

A frame is a message as the template writes it: from its opening special token to the next one's.
Special tokens are looked for in the tokens that clients sent as messages or as token ids. Raw text
has no frames and may be cut anywhere; what a model answers begins none, whatever it writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FrameTokens:
    """Special tokens of a chat template; without any there are no frames.

    Attributes:
        opening: begin a message.
        closing: end an answer; where no token begins messages, a frame begins after one of these.
    """

    opening: frozenset[int] = frozenset()
    closing: frozenset[int] = frozenset()

    @property
    def ids(self) -> frozenset[int]:
        """All of them."""
        return self.opening | self.closing

    def starts(self, token_ids: Sequence[int], framed: bytes) -> list[int]:
        """Find where frames begin.

        Args:
            token_ids: of a context.
            framed: for each of them, whether it may begin a message (see `Context`).

        Returns:
            Positions, ascending; [] if there are no frames.
        """
        if self.opening:
            found = enumerate(zip(token_ids, framed, strict=True))
            return [at for at, (token, may) in found if may and token in self.opening]
        if not any(framed):
            return []
        return [at + 1 for at, token in enumerate(token_ids) if token in self.closing]

    def last_start(self, token_ids: Sequence[int]) -> int:
        """Where the last frame of a rendered chat begins; 0 if there are no frames."""
        starts = self.starts(token_ids, b"\1" * len(token_ids))
        return starts[-1] if starts else 0


def common_prefix(first: Sequence[int], *others: Sequence[int]) -> int:
    """How many leading tokens all of them share."""
    length = 0
    for tokens in zip(first, *others, strict=False):
        if len(set(tokens)) > 1:
            break
        length += 1
    return length
