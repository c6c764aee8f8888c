"""Reads a session file (file_format.py) that arrives piece by piece. Pure.

It trusts nothing in the file: no length, no order, no end.
"""

from collections.abc import Iterator

import xxhash
from google.protobuf.message import DecodeError

from kvd.session_files.file_format import (
    CHECKSUM,
    FRAME,
    HELD,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_HELD_TOKENS,
    PART,
    PART_START,
    START,
    VERSION,
    VERSION_WITH_STATE,
    VERSION_WITH_WINDOWS,
    WINDOW,
    WINDOW_START,
    FileHeader,
    Frame,
    HeldTokens,
    SessionFileError,
    StatePart,
    WindowRows,
    damaged,
    part_bytes_of,
    row_bytes,
    window_row_bytes,
)
from shared.kvd_client.messages import layout_of
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.block_key import TOKEN_BYTES
from shared.types.errors import ReportedError
from shared.types.kv_layout import KVLayout
from shared.types.lineage import LINEAGE_BYTES, Lineage
from shared.types.session_key import session_key

AnyFrame = HeldTokens | Frame | StatePart | WindowRows
Data = bytes | bytearray | memoryview


class FileReader:
    """Reads one session file, piece by piece.

    Attributes:
        header: the header; None: it has not arrived completely.
        num_tokens: tokens in the frames so far.
    """

    def __init__(self) -> None:
        self.header: FileHeader | None = None
        self.num_tokens = 0
        self._num_held = 0  # of these, tokens in held frames, which come first
        self._incomplete = bytearray()  # the beginning of an incomplete header or frame
        self._next_part = 0
        self._position = 0  # of the state or the windows whose parts arrive now
        self._window_start = 0  # first token of the window whose parts arrive now
        self._window_tokens = 0
        self._is_over = False

    def feed(self, data: Data) -> Iterator[AnyFrame]:
        """Take the next bytes; yield the complete frames, valid as long as `data`.

        Beside `data` at most one frame is kept in memory.

        Raises:
            SessionFileError: the bytes cannot follow those before.
        """
        if self._incomplete:
            self._incomplete += data
        source = memoryview(self._incomplete or data)
        at = 0
        if self.header is None:
            at = self._read_header(source)
        while self.header is not None:
            frame, num_bytes = self._next_frame(self.header, source[at:])
            at += num_bytes
            if frame is None:
                break
            yield frame
        if self._is_over and at < len(source):
            raise damaged("there is data after its end")
        if at or not self._incomplete:
            self._incomplete = bytearray(source[at:])  # a new one: the frames refer to the old one

    def close(self) -> FileHeader:
        """Check that the file has ended.

        Raises:
            SessionFileError: it is incomplete.
        """
        if self.header is None or not self._is_over:
            raise SessionFileError(
                f"the session file is incomplete: it ends after {self.num_tokens} tokens",
                "copy it again, or export the session again",
            )
        return self.header

    def _read_header(self, source: memoryview) -> int:
        """Read the header if it is complete; return its length, or 0."""
        known = min(len(source), len(MAGIC))
        if source[:known] != MAGIC[:known]:
            raise SessionFileError(
                "this is not a session file", "give a file that kvd export has written"
            )
        start = START.size + CHECKSUM.size
        if len(source) < start:
            return 0
        _, version, num_bytes = START.unpack_from(source)
        if version not in (VERSION, VERSION_WITH_STATE, VERSION_WITH_WINDOWS):
            raise SessionFileError(
                f"the session file has version {version}, but this release knows versions up to "
                f"{VERSION_WITH_WINDOWS}",
                "import it with the release that wrote it",
            )
        if num_bytes > MAX_BODY_BYTES:
            raise damaged("its header")
        if len(source) < start + num_bytes:
            return 0
        body = bytes(source[start : start + num_bytes])
        (checksum,) = CHECKSUM.unpack_from(source, START.size)
        if xxhash.xxh3_64_intdigest(bytes(source[: START.size]) + body) != checksum:
            raise damaged("its header")
        self.header = _header_of(body, version)
        return start + int(num_bytes)

    def _next_frame(self, header: FileHeader, source: memoryview) -> tuple[AnyFrame | None, int]:
        """Return the next frame and its bytes; None: it is incomplete, or the end."""
        if self._is_over or len(source) < FRAME.size:
            return None, 0
        num_tokens, kind, checksum = FRAME.unpack_from(source)
        if not self._may_come(header, num_tokens, kind):
            raise damaged(f"the frame after {self.num_tokens} tokens")
        end = FRAME.size + self._payload_bytes(header.layout, num_tokens, kind)
        if len(source) < end:
            return None, 0
        payload = source[FRAME.size : end]
        if xxhash.xxh3_64_intdigest(payload, seed=self.num_tokens) != checksum:
            raise damaged(f"the frame after {self.num_tokens} tokens")
        if kind == HELD:
            self._num_held = self.num_tokens = self.num_tokens + num_tokens
            return HeldTokens(num_tokens, bytes(payload)), end
        if kind == PART:
            return self._read_part(payload), end
        if kind == WINDOW:
            return self._read_window(payload, num_tokens, header.layout.window_slots), end
        if not num_tokens:
            self._is_over = True
            return None, end
        tokens_end = num_tokens * TOKEN_BYTES
        frame = Frame(
            self.num_tokens, num_tokens, bytes(payload[:tokens_end]), payload[tokens_end:]
        )
        self.num_tokens += num_tokens
        return frame, end

    def _may_come(self, header: FileHeader, num_tokens: int, kind: int) -> bool:
        """Return whether a frame may be the next one.

        Once the first part of a state or of windows has arrived, only its other parts may follow.
        """
        layout = header.layout
        if kind == HELD:
            is_first = self.num_tokens == self._num_held and header.version == VERSION
            return is_first and 0 < num_tokens <= MAX_HELD_TOKENS
        if kind == WINDOW:
            may_have = header.version == VERSION_WITH_WINDOWS
            return may_have and 0 < num_tokens <= layout.block_tokens
        num_parts = layout.state_slots if header.version == VERSION_WITH_STATE else 0
        if kind == PART:
            return not num_tokens and self._next_part < num_parts
        is_between = 0 < self._next_part < num_parts or self._window_start < self._position
        is_behind = self._position and num_tokens
        return not (kind or is_between or is_behind) and num_tokens <= layout.block_tokens

    def _read_part(self, payload: memoryview) -> StatePart:
        position, index = PART_START.unpack_from(payload)
        is_first = not self._next_part
        is_expected = index == self._next_part and (is_first or position == self._position)
        if not is_expected or not 0 < position <= self.num_tokens:
            raise damaged(f"the state after {self.num_tokens} tokens")
        self._position = self._window_start = position
        self._next_part = index + 1
        return StatePart(position, index, payload[PART_START.size :])

    def _read_window(self, payload: memoryview, num_tokens: int, num_parts: int) -> WindowRows:
        position, token_offset, index = WINDOW_START.unpack_from(payload)
        if not self._position:  # the first window sets their beginning
            self._position, self._window_start = position, token_offset
        if not self._next_part:
            self._window_tokens = num_tokens
        expected = (self._position, self._window_start, self._window_tokens, self._next_part)
        end = token_offset + num_tokens
        is_next = (position, token_offset, num_tokens, index) == expected
        if not is_next or not end <= position <= self.num_tokens:
            raise damaged(f"the windows after {self.num_tokens} tokens")
        self._next_part = (index + 1) % num_parts
        if not self._next_part:
            self._window_start = end
        return WindowRows(position, token_offset, num_tokens, index, payload[WINDOW_START.size :])

    def _payload_bytes(self, layout: KVLayout, num_tokens: int, kind: int) -> int:
        """Return the bytes of the next frame's payload."""
        if kind == HELD:
            return num_tokens * TOKEN_BYTES
        if kind == PART:
            return PART_START.size + part_bytes_of(layout, self._next_part)
        if kind == WINDOW:
            return WINDOW_START.size + num_tokens * sum(window_row_bytes(layout, self._next_part))
        return num_tokens * (TOKEN_BYTES + sum(row_bytes(layout)))


def _header_of(body: bytes, version: int) -> FileHeader:
    """Decode the body and validate it: a right checksum does not mean that kvd wrote it."""
    try:
        message = kvd_pb2.SessionFileHeader.FromString(body)
        layout = layout_of(message.layout)
        key = session_key(message.session.tenant, layout.model, message.session.session_id)
    except (DecodeError, ReportedError) as error:
        raise SessionFileError(
            f"the header of the session file is not valid ({error})", "export the session again"
        ) from error
    digest = message.lineage.digest
    if len(digest) not in (0, LINEAGE_BYTES):
        raise damaged("its lineage")
    lineage = Lineage(digest, message.lineage.clean_tokens if digest else 0)
    if version == VERSION_WITH_WINDOWS and not layout.window:
        raise damaged("it contains windows, but its layout has none")
    return FileHeader(key, layout, lineage, message.kvd_version, message.unix_s, version)
