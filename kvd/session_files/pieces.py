"""What the files of sessions come in, from kvd and at its callers. Pure."""

from typing import NamedTuple

from shared.pb.kvd.v1 import kvd_pb2


class Piece(NamedTuple):
    """Some bytes of a file, which may be one in chunks.

    Attributes:
        data: the bytes, valid until the next piece is asked for.
        end_token: where the chunk ends that ends with them; None: none does.
    """

    data: bytes | bytearray | memoryview
    end_token: int | None = None


class Chunk(NamedTuple):
    """A whole chunk, or, behind the last one, what opens them.

    Attributes:
        data: its bytes; that of the first one is the file's header.
        end_token: where it ends.
        seal: with no data: of all chunks.
    """

    data: bytes | bytearray
    end_token: int
    seal: kvd_pb2.SessionSeal | None = None
