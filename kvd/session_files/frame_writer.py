"""Writes the frames of a session file (file_format.py), some side by side. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvd.session_files.file_format import (
    FRAME,
    HELD,
    MAX_HELD_TOKENS,
    PART,
    PART_START,
    TOKENS,
    WINDOW,
    WINDOW_START,
    StatePart,
    WindowRows,
)
from shared.types.block_key import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class FrameBatch:
    """Some frames of a file, side by side.

    Attributes:
        data: their bytes, valid until the next batch is begun.
        ends: of each frame its number of tokens, and where it ends in `data`.
    """

    data: memoryview
    ends: Sequence[tuple[int, int]]


class FrameWriter:
    """Writes frames into memory of its own, the same for each batch: fresh memory is slow."""

    def __init__(self) -> None:
        self._memory = bytearray()
        self._num_bytes = 0
        self._ends: list[tuple[int, int]] = []

    def add_tokens(
        self, token_offset: int, token_ids: bytes, runs: Sequence[bytes | memoryview]
    ) -> None:
        """Write a frame of tokens; `runs` as in Frame.rows."""
        num_tokens = len(token_ids) // TOKEN_BYTES
        self._add(num_tokens, TOKENS, token_offset, (token_ids, *runs))
        self._ends.append((num_tokens, self._num_bytes))

    def add_held(self, token_offset: int, token_ids: bytes) -> None:
        """Write a frame of tokens without rows."""
        num_tokens = len(token_ids) // TOKEN_BYTES
        self._add(num_tokens, HELD, token_offset, (token_ids,))
        self._ends.append((num_tokens, self._num_bytes))

    def add_part(self, num_tokens: int, part: StatePart) -> None:
        """Write a part of a state, behind so many tokens of the file."""
        self._add(0, PART, num_tokens, (PART_START.pack(part.position, part.index), part.data))
        self._ends.append((0, self._num_bytes))

    def add_window(
        self, num_tokens: int, window: WindowRows, runs: Sequence[bytes | memoryview]
    ) -> None:
        """Write a part of a window, behind so many tokens of the file; `runs` as in its rows."""
        start = WINDOW_START.pack(window.position, window.token_offset, window.index)
        self._add(window.num_tokens, WINDOW, num_tokens, (start, *runs))
        self._ends.append((0, self._num_bytes))

    def take(self) -> FrameBatch:
        """Return what was written, and begin anew."""
        batch = FrameBatch(memoryview(self._memory)[: self._num_bytes], self._ends)
        self._num_bytes, self._ends = 0, []
        return batch

    def _add(
        self, num_tokens: int, kind: int, seed: int, pieces: Sequence[bytes | memoryview]
    ) -> None:
        start = self._num_bytes
        end = start + FRAME.size + sum(map(len, pieces))
        if end > len(self._memory):
            grown = bytearray(max(end, 2 * len(self._memory)))
            grown[:start] = memoryview(self._memory)[:start]
            self._memory = grown
        memory = memoryview(self._memory)
        at = start + FRAME.size
        for piece in pieces:
            memory[at : at + len(piece)] = piece
            at += len(piece)
        checksum = xxhash.xxh3_64_intdigest(memory[start + FRAME.size : end], seed=seed)
        FRAME.pack_into(memory, start, num_tokens, kind, checksum)
        self._num_bytes = end


def frame_bytes(
    token_offset: int, token_ids: bytes, runs: Sequence[bytes | memoryview] = ()
) -> bytes:
    """Return one frame of tokens; `runs` as in Frame.rows."""
    writer = FrameWriter()
    writer.add_tokens(token_offset, token_ids, runs)
    return bytes(writer.take().data)


def held_bytes(token_ids: bytes) -> bytes:
    """Return what a tail begins with, behind the header: these tokens."""
    writer = FrameWriter()
    most = MAX_HELD_TOKENS * TOKEN_BYTES
    for start in range(0, len(token_ids), most):
        writer.add_held(start // TOKEN_BYTES, token_ids[start : start + most])
    return bytes(writer.take().data)


def end_bytes(num_tokens: int) -> bytes:
    """Return the end of a file of so many tokens."""
    return frame_bytes(num_tokens, b"")
