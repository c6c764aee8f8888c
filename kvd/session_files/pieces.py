"""Units in which session files are passed on: pieces in kvd, chunks at its callers. Pure."""

from typing import NamedTuple

from shared.pb.kvd.v1 import kvd_pb2


class Piece(NamedTuple):
    """Some bytes of a session file.

    Attributes:
        data: the bytes, valid until the next piece is requested.
        end_token: if a chunk ends with these bytes, the token behind its last one; else None.
    """

    data: bytes | bytearray | memoryview
    end_token: int | None = None


class Chunk(NamedTuple):
    """A whole chunk, or, behind the last one, the seal of all chunks.

    Attributes:
        data: its bytes. Those of the first chunk are the file's header.
        end_token: the token behind its last one.
        seal: the seal of all chunks; then there is no data.
    """

    data: bytes | bytearray
    end_token: int
    seal: kvd_pb2.SessionSeal | None = None
