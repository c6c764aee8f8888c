"""Sessions for the bench: their keys and their token ids. Pure."""

import numpy as np

from kvd.bench.options import MODEL
from shared.types.session_key import SessionKey

TENANT = "bench"


def bench_key(name: str) -> SessionKey:
    """A session of the bench's layouts."""
    return SessionKey(TENANT, MODEL, name)


def token_ids_of(seed: int, num_tokens: int) -> bytes:
    """Token ids (little-endian uint32) of which no two seeds share the first one."""
    tokens = np.arange(num_tokens, dtype="<u4")
    tokens[0] = 0x8000_0000 + seed
    return tokens.tobytes()
