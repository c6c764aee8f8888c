"""Resident sequences: KV of sessions whose turn is over. The scheduler decides which stay.

Beside its KV a resident sequence has a tail: the KV of its last partial block before RoPE. When
that block grows, it is stored again with these tokens (D9). After a discard there is no tail: a
block that a discard has touched never grows, and the next store begins behind it.

Invariant: a session has one resident sequence at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inference_svc.core.ranges import Range
from inference_svc.core.scheduling.held_slots import PageCopy
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.kv.write_ring import WriteRing
from inference_svc.runtime.transfer.compaction import Compactor
from shared.types.session_key import SessionKey


@dataclass(eq=False)
class ResidentSequence:
    """One session's KV in the engine's memory, between its turns.

    Attributes:
        kv: the sequence's KV.
        tail_from: the block boundary at or before `kv.num_tokens`; after a discard blocks are
            counted from there.
        tail: KV of tokens [tail_from, kv.num_tokens) before RoPE; None: there are no such tokens,
            or nothing is saved.
    """

    kv: SequenceKv
    tail_from: int
    tail: WriteBuffer | None


class ResidentSequences:
    """The resident sequences of all sessions.

    Args:
        pool: the memory of their KV.
        block_tokens: tokens of a block of the layout.
    """

    def __init__(self, pool: KVPool, block_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._residents: dict[SessionKey, ResidentSequence] = {}

    def put(
        self, key: SessionKey, kv: SequenceKv, num_tokens: int, buffer: WriteBuffer | None
    ) -> int:
        """Make a sequence's KV the session's resident sequence.

        Args:
            key: the session's key.
            kv: the sequence's KV, which no longer belongs to the caller.
            num_tokens: number of its first tokens that are kept.
            buffer: the write buffer of the turn that ends, with the last block's KV before RoPE;
                None: nothing is saved.

        Returns:
            The last block boundary at or before `num_tokens`.
        """
        assert key not in self._residents, f"{key} has a resident sequence already"  # noqa: S101
        kv.num_tokens, kv.gate = num_tokens, None
        tail_from, tail = num_tokens, None
        if buffer is not None and buffer.first_token <= num_tokens:
            tail_from = self._boundary(buffer.first_token, num_tokens)
            tail = self._copy_tail(buffer, tail_from, num_tokens - tail_from)
        self._residents[key] = ResidentSequence(kv, tail_from, tail)
        return tail_from

    def get(self, key: SessionKey) -> ResidentSequence:
        """Return a session's resident sequence, which stays."""
        return self._residents[key]

    def take(self, key: SessionKey) -> ResidentSequence:
        """Remove a session's resident sequence and return it; it belongs to the caller then."""
        return self._residents.pop(key)

    def release(self, key: SessionKey) -> None:
        """Release a resident sequence's memory."""
        resident = self._residents.pop(key)
        self._pool.release(resident.kv)
        self.release_tail(resident)

    def release_tail(self, resident: ResidentSequence) -> None:
        """Release the memory of a tail, once its tokens are in the next write buffer."""
        if resident.tail is not None:
            self._pool.release(resident.tail)
            resident.tail = None

    async def discard(
        self,
        key: SessionKey,
        kept: Sequence[Range],
        compactor: Compactor,
        copies: Sequence[PageCopy] = (),
    ) -> int:
        """Drop tokens of a resident sequence, and compact the others in place.

        Args:
            key: the session's key; nothing else uses its sequence meanwhile.
            kept: runs of tokens that stay, in order, not adjacent.
            compactor: the model's compactor.
            copies: copies of pages that are shared with other sequences; this one gets them in
                place of the shared pages.

        Returns:
            How many tokens are left; if 0, or if this raises, the caller owes `release`.
        """
        resident = self._residents[key]
        self.release_tail(resident)
        resident.tail_from = await compactor.compact(resident.kv, kept, copies)
        return resident.tail_from

    def kept_tokens(self, buffer: WriteBuffer | None, num_tokens: int) -> int:
        """Return how many of a turn's first tokens its resident may keep, given its write buffer.

        These are all of them, unless the answer was cut within tokens that are stored already:
        then only whole blocks.
        """
        return num_tokens if buffer is None else self._whole_tokens(buffer.first_token, num_tokens)

    def _whole_tokens(self, a_boundary: int, num_tokens: int) -> int:
        """Return `num_tokens`, rounded down to whole blocks if that is before the boundary."""
        if num_tokens >= a_boundary:
            return num_tokens
        return max(0, self._boundary(a_boundary, num_tokens))

    def next_buffer(
        self, resident: ResidentSequence, num_tokens: int, ring: WriteRing
    ) -> WriteBuffer:
        """Lend the write buffer of the session's next turn.

        Args:
            resident: the resident sequence that the turn builds on.
            num_tokens: number of its first tokens that are used. If they end within a stored
                block, the buffer begins behind that block, whose tokens are not saved again.
            ring: lends the buffer's memory.
        """
        first_token = resident.tail_from
        if num_tokens < first_token:
            first_token = num_tokens = self._boundary(
                first_token, num_tokens + self._block_tokens - 1
            )
        buffer = ring.lend(first_token, num_tokens)
        if num_tokens > buffer.first_token:
            assert resident.tail is not None, "a partial block has its tail"  # noqa: S101
            _copy_tokens(resident.tail, buffer, buffer.first_token, num_tokens - buffer.first_token)
        return buffer

    def _copy_tail(
        self, buffer: WriteBuffer, tail_from: int, num_tokens: int
    ) -> WriteBuffer | None:
        """Copy a tail to memory of the pool: the write ring's is released with the turn."""
        if not num_tokens:
            return None
        tail = self._pool.new_write_buffer(tail_from, num_tokens)
        _copy_tokens(buffer, tail, tail_from, num_tokens)
        return tail

    def _boundary(self, a_boundary: int, num_tokens: int) -> int:
        """Return the last block boundary at or before `num_tokens`, given another one."""
        return a_boundary + (num_tokens - a_boundary) // self._block_tokens * self._block_tokens


def _copy_tokens(
    source: WriteBuffer, target: WriteBuffer, first_token: int, num_tokens: int
) -> None:
    """Copy tokens [first_token, first_token + num_tokens) of all layers and components."""
    read_from, write_to = (buffer.places(first_token, num_tokens) for buffer in (source, target))
    with torch.inference_mode():
        for tensors, copies in zip(source.components, target.components, strict=True):
            for layer_tensor, layer_copy in zip(tensors.layers, copies.layers, strict=True):
                write_to.write(layer_copy, read_from.read(layer_tensor))
