"""Writes the frames of a session file (file_format.py) into one buffer. Pure."""

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
    """Consecutive frames of a file.

    Attributes:
        data: their bytes, valid until the writer's next frame is added.
        ends: for each frame its number of tokens, and its end in `data`.
    """

    data: memoryview
    ends: Sequence[tuple[int, int]]


class FrameWriter:
    """Writes frames into memory that it reuses for each batch: fresh memory costs page faults."""

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
        """Write a held frame: tokens without rows."""
        num_tokens = len(token_ids) // TOKEN_BYTES
        self._add(num_tokens, HELD, token_offset, (token_ids,))
        self._ends.append((num_tokens, self._num_bytes))

    def add_part(self, num_tokens: int, part: StatePart) -> None:
        """Write a part of a state; `num_tokens`: the tokens before it in the file."""
        self._add(0, PART, num_tokens, (PART_START.pack(part.position, part.index), part.data))
        self._ends.append((0, self._num_bytes))

    def add_window(
        self, num_tokens: int, window: WindowRows, runs: Sequence[bytes | memoryview]
    ) -> None:
        """Write a part of a window; `num_tokens`: as in add_part, `runs`: as in WindowRows.rows."""
        start = WINDOW_START.pack(window.position, window.token_offset, window.index)
        self._add(window.num_tokens, WINDOW, num_tokens, (start, *runs))
        self._ends.append((0, self._num_bytes))

    def take(self) -> FrameBatch:
        """Return the frames that were written, and begin a new batch."""
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
    """Return the held frames with which a tail begins, behind the header."""
    writer = FrameWriter()
    most = MAX_HELD_TOKENS * TOKEN_BYTES
    for start in range(0, len(token_ids), most):
        writer.add_held(start // TOKEN_BYTES, token_ids[start : start + most])
    return bytes(writer.take().data)


def end_bytes(num_tokens: int) -> bytes:
    """Return the end of a file that has `num_tokens` tokens."""
    return frame_bytes(num_tokens, b"")
