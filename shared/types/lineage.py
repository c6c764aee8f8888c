"""Lineage: a digest of the discards and grafts in a context, in 40 bytes. Pure.

After a discard, the tokens that are left are the same as those of a session that never had the
others, but their KV is not: it was computed while the others were there. The tokens alone do not
tell the two apart. The lineage does: equal tokens with equal lineages have equal KV, no matter
which engine computed it and how much of it kvd still has.

A graft is the reverse: tokens of another session's context are appended with the KV that they have
there. That KV was computed over tokens that are not before them here.

WHOLE says that nothing was discarded or grafted; it is a lineage like the others. In calls to kvd,
`None` in place of a lineage means that the caller does not name one.

A lineage follows from the tokens, the discards and the grafts alone. So an engine can compute it by
replaying a transcript, and kvd by recording the discards and grafts that it receives.
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
        digest: digest of all of them, and of the tokens they fell on; b"": none that matters.
        clean_tokens: number of leading tokens before which nothing was discarded or grafted. Their
            KV is that of a session without any. Meaningless if `digest` is empty.
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

        A discard of the last tokens leaves the KV before it as it was, and so does not count.

        Args:
            token_ids: tokens of the context before the discard, little-endian uint32.
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
        """Return the lineage after KV of another context's tokens was appended; O(tokens).

        Args:
            token_ids: tokens of the context before, little-endian uint32; the seam is after them.
            source: lineage of the other context.
            source_ids: its tokens, from the first one on; those after `end` are ignored.
            start: position of the first token whose KV is appended, however much of it exists.
            end: position after the last one.
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
    """Join half-open ranges of tokens that overlap or touch. They have to be sorted."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
