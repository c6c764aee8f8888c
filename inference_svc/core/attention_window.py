"""Layers with an attention window: which KV of a sequence they need, and how much they hold. Pure.

For such layers the store keeps and returns KV of the last tokens only: as many as they attend to
(`window` tokens). A sequence may hold no more of them (`HeldRows`). New tokens are computed
correctly wherever these layers have KV of the last `window` tokens.
"""

from dataclasses import dataclass

from shared.types.units import ceil_div


def is_whole(num_tokens: int, window_from: int, window: int) -> bool:
    """Return whether new tokens can be computed behind the first `num_tokens` of a sequence.

    Args:
        num_tokens: number of the sequence's tokens that precede the new ones.
        window_from: first token of the sequence with KV in layers with a window.
        window: most tokens that such a layer attends to; 0: there are no such layers.
    """
    return not window or not window_from or window_from <= num_tokens - window


@dataclass(frozen=True)
class HeldRows:
    """How many tokens a sequence holds in layers with a window, and the token slots it takes.

    In these layers a sequence has `num_rows` rows, for the tokens from `window_from` on. When new
    tokens do not fit, the last ones are moved to the first rows. They move in strides that are
    large enough to be worth the copy, and some tokens before the window stay, so that an answer's
    last tokens may be taken back.

    A token slot holds one token in all layers. A sequence with more tokens than rows holds the
    others only in layers without a window, which takes a part of a slot.

    Attributes:
        window: most tokens that such a layer attends to.
        spare_tokens: number of tokens before the window that are kept, too.
        step_tokens: most tokens that are appended at once.
        token_items: elements of a token's KV in all layers.
        full_items: elements of a token's KV in layers without a window.
    """

    window: int
    spare_tokens: int
    step_tokens: int
    token_items: int
    full_items: int

    @property
    def kept_tokens(self) -> int:
        """Number of last tokens that stay whenever rows are moved."""
        return self.window + self.spare_tokens

    @property
    def num_rows(self) -> int:
        """Most tokens that a layer with a window holds."""
        return self.kept_tokens + self.step_tokens

    def slots_for(self, num_tokens: int) -> int:
        """Return the number of token slots that a sequence of `num_tokens` tokens takes."""
        beyond = max(0, num_tokens - self.num_rows)
        return num_tokens - beyond + ceil_div(beyond * self.full_items, self.token_items)

    def tokens_in(self, num_slots: int) -> int:
        """Return how many tokens of one sequence fit in `num_slots` token slots."""
        beyond = max(0, num_slots - self.num_rows)
        return num_slots - beyond + beyond * self.token_items // self.full_items

    def first_held(self, window_from: int, num_tokens: int, num_new: int) -> int:
        """Return `window_from` after rows were moved to have room for new tokens.

        Args:
            window_from: the first held token now.
            num_tokens: number of the sequence's tokens.
            num_new: number of tokens to be appended, at most `step_tokens`.
        """
        assert num_new <= self.step_tokens, "more tokens come at once than there are rows for"
        missing = num_tokens + num_new - window_from - self.num_rows
        if missing <= 0:
            return window_from
        stride = window_from + missing + self.step_tokens // 2
        return min(stride, num_tokens - self.kept_tokens)
