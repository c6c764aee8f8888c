"""A digest of a waiting queue that is kept up to date in O(1) per change. Pure.

The digest of a queue is the sum of its jobs' digests modulo 2**64. A job's digest covers its rank,
so equal sums mean equal jobs in equal order (up to chance: 2**-64; nobody is to be fooled).
"""

from struct import Struct

from xxhash import xxh3_64_intdigest

from shared.types.session_key import SessionKey

Rank = tuple[int, float, int]  # (-priority, start tag, number of the job): lower is sooner
DIGEST_BITS = 64
_MASK = (1 << DIGEST_BITS) - 1
_RANK = Struct("<qdQ")
_RUNNING = Struct("<Q")


def waiting_digest(rank: Rank, key: SessionKey) -> int:
    """Digest of a job that waits."""
    tenant, _, session_id = key
    return xxh3_64_intdigest(_RANK.pack(*rank) + f"{tenant}/{session_id}".encode())


def running_digest(number: int, key: SessionKey) -> int:
    """Digest of a job that is being computed."""
    return xxh3_64_intdigest(_RUNNING.pack(number) + f"{key.tenant}/{key.session_id}".encode())


def combined(digest: int, *, added: int = 0, removed: int = 0) -> int:
    """A queue's digest, after one job's was added or removed."""
    return (digest + added - removed) & _MASK
