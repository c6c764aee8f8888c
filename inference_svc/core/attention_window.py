"""Which tokens of a sequence can be built on where layers attend to the last tokens only. Pure.

Of such layers the store keeps, and gives, KV of the last tokens only, as many as they attend to
(`window` tokens), and a sequence may hold no more of them (`HeldRows`). What comes next is right
wherever these layers have KV of the last `window` tokens.
"""

from dataclasses import dataclass

from shared.types.units import ceil_div


def is_whole(num_tokens: int, window_from: int, window: int) -> bool:
    """Whether what follows the first tokens of a sequence can be computed.

    Args:
        num_tokens: of these.
        window_from: first token of the sequence of which layers with a window have KV.
        window: most tokens that such a layer attends to; 0: there are none.
    """
    return not window or not window_from or window_from <= num_tokens - window


@dataclass(frozen=True)
class HeldRows:
    """How many tokens a sequence holds in layers with a window, and the token slots it takes.

    There it has rows for so many, of the tokens from `window_from` on. When the next ones do not
    fit, it moves on: the last tokens go to the first rows. So it does in strides, each of which is
    worth the copy, and so that answers may be taken back a little.

    A token slot holds a token in all layers. Who has room for more tokens than there are rows has
    the others in layers without a window alone, which is a part of a slot.

    Attributes:
        window: most tokens that such a layer attends to.
        spare_tokens: of those before the window as many stay, too.
        step_tokens: most tokens that are appended at once.
        token_items: elements of a token in all layers.
        full_items: elements of a token in layers without a window.
    """

    window: int
    spare_tokens: int
    step_tokens: int
    token_items: int
    full_items: int

    @property
    def kept_tokens(self) -> int:
        """Number of the last tokens that stay whenever the rows move on."""
        return self.window + self.spare_tokens

    @property
    def num_rows(self) -> int:
        """Most tokens that a layer with a window holds."""
        return self.kept_tokens + self.step_tokens

    def slots_for(self, num_tokens: int) -> int:
        """Return the token slots of a sequence with room for so many tokens."""
        beyond = max(0, num_tokens - self.num_rows)
        return num_tokens - beyond + ceil_div(beyond * self.full_items, self.token_items)

    def tokens_in(self, num_slots: int) -> int:
        """Return how many tokens so many token slots have room for, as one sequence's."""
        beyond = max(0, num_slots - self.num_rows)
        return num_slots - beyond + beyond * self.token_items // self.full_items

    def first_held(self, window_from: int, num_tokens: int, num_new: int) -> int:
        """Return `window_from` once there are rows for new tokens.

        Args:
            window_from: before that.
            num_tokens: of the sequence.
            num_new: tokens that come behind them, `step_tokens` at most.
        """
        assert num_new <= self.step_tokens, "more tokens come at once than there are rows for"
        missing = num_tokens + num_new - window_from - self.num_rows
        if missing <= 0:
            return window_from
        stride = window_from + missing + self.step_tokens // 2
        return min(stride, num_tokens - self.kept_tokens)
