"""Lineage: which discards and grafts the tokens of a context come after, in 40 bytes. Pure.

After a discard the tokens that are left are the same as those of a session that never had the
others, but their KV is not: it was computed while the others were there. Tokens alone do not tell
the two apart. The lineage does: equal tokens of equal lineage mean equal KV, whoever has computed
it, and whatever kvd still holds of it.

A graft is the other way round: tokens of another session's context follow, with the KV that they
have there, computed over what is not before them here.

WHOLE, that nothing was discarded or grafted, is a lineage like the others; `None` in its place, in
the calls to kvd, is that the caller does not say.

It follows from the tokens, the discards and the grafts alone, so that an engine finds it again by
replaying a transcript, and kvd by recording those that it receives.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.types.block_key import TOKEN_BYTES

LINEAGE_BYTES = 16

_RANGE = struct.Struct("<QQ")
_GRAFT = struct.Struct("<QQQQQ")


@dataclass(frozen=True, slots=True)
class Lineage:
    """The discards and grafts of one context.

    Attributes:
        digest: of all of them and of the tokens they fell on; b"": there was none that matters.
        clean_tokens: leading tokens of the context before which nothing was discarded or grafted:
            their KV is that of a session without any. Without meaning if there was none.
    """

    digest: bytes = b""
    clean_tokens: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the context is as if nothing had ever been discarded or grafted."""
        return not self.digest

    def is_clean(self, end: int) -> bool:
        """Whether the first `end` tokens are those of a session without any discard or graft."""
        return self.is_whole or end <= self.clean_tokens

    def after(self, token_ids: bytes, ranges: Sequence[tuple[int, int]]) -> "Lineage":
        """Return the lineage after one more discard; O(tokens).

        What is dropped from the end leaves the rest as it was, and is no discard that matters.

        Args:
            token_ids: of the context before it, little-endian uint32.
            ranges: half-open positions in that context, sorted, not touching.
        """
        if not ranges:
            return self
        first, first_end = ranges[0]
        if first_end * TOKEN_BYTES == len(token_ids):
            return WHOLE if self.is_clean(first) else self
        hasher = hashlib.blake2b(self.digest, digest_size=LINEAGE_BYTES)
        hasher.update(token_ids)
        hasher.update(b"".join(_RANGE.pack(*item) for item in ranges))
        return Lineage(hasher.digest(), first if self.is_whole else min(first, self.clean_tokens))

    def after_graft(
        self, token_ids: bytes, source: "Lineage", source_ids: bytes, start: int, end: int
    ) -> "Lineage":
        """Return the lineage once KV of another context's tokens follows; O(tokens).

        Args:
            token_ids: of the context before it, little-endian uint32: the seam is behind them.
            source: lineage of the other context.
            source_ids: its tokens, from the first one on; what is behind `end` does not matter.
            start: first of them whose KV follows, however much of it there is.
            end: behind the last one.
        """
        seen = source_ids[: end * TOKEN_BYTES]
        hasher = hashlib.blake2b(digest_size=LINEAGE_BYTES, person=b"graft")
        lengths = (len(self.digest), len(token_ids), len(source.digest), start, end)
        hasher.update(_GRAFT.pack(*lengths))
        for part in (self.digest, token_ids, source.digest, seen):
            hasher.update(part)
        seam = len(token_ids) // TOKEN_BYTES
        clean_tokens = seam if self.is_whole else min(seam, self.clean_tokens)
        return Lineage(hasher.digest(), clean_tokens)


WHOLE = Lineage()


def join_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join half-open ranges of tokens that overlap or touch; they are sorted."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
