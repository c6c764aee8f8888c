"""Chaining: how block keys follow from the tokens and discards of one context (D5).

Pure. Up to the first discard a context is chained like any other: equal tokens give equal keys.
The tokens that the discards have left end with a `discard_key`, which stands for all of the context
up to there. Blocks that are computed later are chained to that key in turn.
"""

from copy import copy

from kvd.core.records.entries import Span, is_plain, part_spans
from shared.types.block_key import (
    block_keys,
    discard_key,
    part_keys,
    root_key,
    state_key,
    tokens_digest,
)
from shared.types.kv_layout import KVLayout
from shared.types.lineage import WHOLE, Lineage


class Chaining:
    """The block keys of one context. Construction costs a hash.

    Args:
        layout: the layout of the blocks.
        salt: the salt of the context's tenant.
        lineage: the context's lineage; None: not named, and treated as whole. With coupled keys
            (positions baked in) the lineage is ignored: only KV that was computed before the first
            dropped token is ever kept.

    Attributes:
        root: parent key of the first block.
        is_named: whether a lineage was named.
        lineage: the lineage that the keys follow; WHOLE if none is named.
    """

    def __init__(self, layout: KVLayout, salt: bytes, lineage: Lineage | None) -> None:
        self._salt = salt
        self._block_key = block_keys(salt)
        self._step = layout.block_tokens
        self._num_parts = layout.part_slots
        self._is_coupled = layout.position_mode == "coupled"
        self.root = root_key(salt, layout.fingerprint)
        self._use(lineage)

    def _use(self, lineage: Lineage | None) -> None:
        self.is_named = lineage is not None
        self.lineage = WHOLE if lineage is None or self._is_coupled else lineage
        self._turns_at = None if self.lineage.is_whole else self.lineage.clean_tokens

    def under(self, lineage: Lineage | None) -> "Chaining":
        """Return the chaining of another lineage of the same tenant, with the root reused."""
        other = copy(self)
        other._use(lineage)  # noqa: SLF001
        return other

    def after_discards(self, num_tokens: int) -> bytes:
        """Return the parent key of the tokens behind the first ones, once all discards are done."""
        return discard_key(self._salt, self.root, self.lineage.digest, num_tokens)

    def parent(self, chain: bytes, offset: int) -> bytes:
        """Return the parent key of a block at an offset, behind a span with this chain key."""
        return self.after_discards(offset) if offset == self._turns_at else chain

    def key(self, chain: bytes, offset: int, tokens: bytes) -> bytes:
        """Return the key of a block of tokens at an offset, behind a span with this chain key."""
        return self._block_key(self.parent(chain, offset), tokens)

    def state_key(self, parent: bytes, tokens: bytes) -> bytes:
        """Return the key of a state behind tokens that follow full blocks with key `parent`."""
        return state_key(self._salt, parent, tokens)

    def state_spans(self, position: int, key: bytes, parent: bytes) -> list[Span]:
        """Return the spans of a state's parts."""
        return part_spans(part_keys(self._salt, key, self._num_parts), position, key, parent)

    def window_spans(self, block_key: bytes) -> list[Span]:
        """Return the spans of the parts of a block's window."""
        keys = part_keys(self._salt, block_key, self._num_parts)
        return part_spans(keys, 0, block_key, block_key)

    def digest(self, tokens: bytes) -> bytes:
        """Return the digest of its tokens that a span stores if it is not plain."""
        return tokens_digest(self._salt, tokens)

    def end_of_block(self, offset: int) -> int:
        """Return where a full block that begins at an offset ends; it never crosses a discard."""
        end, turns_at = offset + self._step, self._turns_at
        if turns_at is not None and offset < turns_at < end:
            return turns_at
        return end

    def follows(self, span: Span, chain: bytes, offset: int, tokens: bytes) -> bool:
        """Whether a span of these tokens has the chain key that it has if nothing was dropped."""
        if self._turns_at is None:  # as nearly always, and of very many spans: so without calls
            return span.num_tokens <= self._step and self._block_key(chain, tokens) == span.chain
        is_straddling = offset + span.num_tokens > self.end_of_block(offset)
        return not is_straddling and self.key(chain, offset, tokens) == span.chain

    def holds(self, span: Span, chain: bytes, offset: int, tokens: bytes) -> bool:
        """Whether a span holds exactly these tokens, computed after the lineage if it is named."""
        if is_plain(span):
            return self.follows(span, chain, offset, tokens)
        if self.digest(tokens) != span.tokens_digest:
            return False
        if not self.is_named or self.follows(span, chain, offset, tokens):
            return True
        end = offset + span.num_tokens
        return not self.lineage.is_whole and span.chain == self.after_discards(end)
