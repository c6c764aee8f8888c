"""Chained content keys of blocks (D5): equal keys mean equal computation, not just equal tokens.

    root    = H(salt; "root" | layout fingerprint)    model, dtype, position mode, shard
    block   = H(salt; "block" | parent key | token ids)
    discard = H(salt; "discard" | root | lineage | n)   parent of what follows the first n tokens
                                                        of a context with discards or grafts in it
    dense   = H(salt; "dense" | parent of what follows | n)     block that kvd has put together from
                                                        n tokens left by discards, the last before
                                                        that parent
    tokens  = H(salt; "tokens" | token ids)             not a key: digest of a block's tokens
    state   = H(salt; "state" | parent key | token ids) a model's state after a position: the parent
                                                        is the chain over the full blocks before it,
                                                        from the root; the token ids are the rest
    part    = H(salt; "part" | key | i)                 block with the i-th part of the state with
                                                        this key, or of the window of the block

A lineage (shared/types/lineage.py) names all discards and grafts and the tokens they fell on, so
`discard` stands for everything that is computed up to there. H is BLAKE2b-128 keyed with the
tenant's secret salt, so that keys reveal nothing to other tenants. Token ids are bytes:
little-endian uint32, as on the wire. Pure.
"""

import hashlib
import struct
from collections.abc import Callable

KEY_BYTES = 16
TOKEN_BYTES = 4
SALT_BYTES = 32

_COUNT = struct.Struct("<Q")


def root_key(salt: bytes, layout_fingerprint: str) -> bytes:
    """Return the key before the first block of any session of this tenant and layout."""
    return _digest(salt, b"root", layout_fingerprint.encode())


def block_keys(salt: bytes) -> Callable[[bytes, bytes], bytes]:
    """Return the function that computes a tenant's block keys from (parent, token ids).

    The token ids are all those of the block, which may be partial. The salt is hashed once, because
    chains are long and hashing it takes as long as hashing a block.
    """
    salted = hashlib.blake2b(digest_size=KEY_BYTES, key=salt, person=b"block")

    def key(parent: bytes, token_ids: bytes) -> bytes:
        digest = salted.copy()
        digest.update(parent + token_ids)
        return digest.digest()

    return key


def discard_key(salt: bytes, root: bytes, lineage: bytes, num_tokens: int) -> bytes:
    """Return the parent of what follows the first tokens of a context with this lineage."""
    return _digest(salt, b"discard", root + lineage + _COUNT.pack(num_tokens))


def dense_key(salt: bytes, chain: bytes, num_tokens: int) -> bytes:
    """Return the key of a dense block of the `num_tokens` tokens before `chain`."""
    return _digest(salt, b"dense", chain + _COUNT.pack(num_tokens))


def state_key(salt: bytes, parent: bytes, token_ids: bytes) -> bytes:
    """Return the key of a state. It depends on the tokens the model has seen, and on no more."""
    return _digest(salt, b"state", parent + token_ids)


def part_keys(salt: bytes, key: bytes, num_parts: int) -> tuple[bytes, ...]:
    """Return the keys of the blocks that hold the parts of a state, or of a block's window."""
    return tuple(_digest(salt, b"part", key + _COUNT.pack(index)) for index in range(num_parts))


def tokens_digest(salt: bytes, token_ids: bytes) -> bytes:
    """Return the digest by which a span proves that its stored tokens are those asked for."""
    return _digest(salt, b"tokens", token_ids)


def _digest(salt: bytes, kind: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, key=salt, person=kind).digest()
