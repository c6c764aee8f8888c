"""Very many idle sessions, as the index keeps them: true chain keys, extents side by side.

Pure. The blocks' data is nowhere: a start reads the index only, and a block is verified when it is
used (D11).
"""

from array import array
from collections.abc import Iterator

from kvd.bench.options import BLOCKS_PER_SESSION, SMALL_LAYOUT
from kvd.bench.sessions import bench_key, token_ids_of
from kvd.core.records.extent_shape import ExtentShape
from kvd.core.records.rows import IndexRows, SessionRecord, columns_of, pack_spans, plain_span
from shared.types.block_key import SALT_BYTES, TOKEN_BYTES, block_key, root_key
from shared.types.session_key import SessionKey

SALT = bytes(range(SALT_BYTES))  # a secret of nobody: these sessions are the bench's own
TOKENS_PER_SESSION = BLOCKS_PER_SESSION * SMALL_LAYOUT.block_tokens
SECTORS_PER_BLOCK = ExtentShape(SMALL_LAYOUT).sectors_per_extent
NUM_SEGMENT_BLOCKS = 1 << 16


def idle_key(number: int) -> SessionKey:
    """Key of one of the idle sessions."""
    return bench_key(f"idle-{number:06}")


def block_tokens_of(number: int, num_blocks: int = BLOCKS_PER_SESSION) -> list[bytes]:
    """Token ids of each block of a session."""
    token_ids = token_ids_of(number, num_blocks * SMALL_LAYOUT.block_tokens)
    step = SMALL_LAYOUT.block_tokens * TOKEN_BYTES
    return [token_ids[start : start + step] for start in range(0, len(token_ids), step)]


def block_keys_of(number: int, num_blocks: int = BLOCKS_PER_SESSION) -> list[bytes]:
    """Key of each block of a session."""
    keys = []
    parent = root_key(SALT, SMALL_LAYOUT.fingerprint)
    for token_ids in block_tokens_of(number, num_blocks):
        parent = block_key(SALT, parent, token_ids)
        keys.append(parent)
    return keys


def session_record(number: int, keys: list[bytes]) -> SessionRecord:
    """Row of a session; the higher its number the later its last use."""
    step = SMALL_LAYOUT.block_tokens
    spans = [plain_span(key, step) for key in keys]
    return SessionRecord(idle_key(number), pack_spans(spans), last_access_ns=1 + number)


def population(num_sessions: int) -> IndexRows:
    """Rows of sessions 0 … num_sessions - 1."""
    keys: list[bytes] = []
    sessions: list[SessionRecord] = []
    for number in range(num_sessions):
        own = block_keys_of(number)
        keys += own
        sessions.append(session_record(number, own))
    extents = array("Q", extents_of(len(keys)))
    tokens = array("I", [SMALL_LAYOUT.block_tokens]) * len(keys)
    return IndexRows([columns_of(sessions)], b"".join(keys), extents, tokens)


def extents_of(num_blocks: int) -> Iterator[int]:
    """Where the blocks lie: one after the other."""
    return iter(range(0, num_blocks * SECTORS_PER_BLOCK, SECTORS_PER_BLOCK))
