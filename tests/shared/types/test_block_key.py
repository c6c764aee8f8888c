"""Keys of blocks: equal exactly for equal salt, parent and tokens."""

import hashlib

from shared.types.block_key import (
    KEY_BYTES,
    SALT_BYTES,
    block_keys,
    part_keys,
    root_key,
    state_key,
)

SALT = bytes(range(SALT_BYTES))
TOKENS = (bytes(64), bytes(range(64)), b"")


def test_a_key_is_the_specified_digest():
    """Of the parent and the tokens, with the salt; computed per block."""
    key = block_keys(SALT)
    parent = root_key(SALT, "layout")
    for tokens in TOKENS:
        digest = hashlib.blake2b(
            parent + tokens, digest_size=KEY_BYTES, key=SALT, person=b"block"
        ).digest()
        parent = key(parent, tokens)
        assert parent == digest


def test_another_salt_parent_or_token_gives_another_key():
    """Equal ones give the same key, whatever was computed in between."""
    key = block_keys(SALT)
    parent = root_key(SALT, "layout")
    keys = [
        key(parent, TOKENS[0]),
        key(parent, TOKENS[1]),
        key(root_key(SALT, "other"), TOKENS[0]),
        block_keys(bytes(SALT_BYTES))(parent, TOKENS[0]),
    ]
    assert len(set(keys)) == len(keys)
    assert key(parent, TOKENS[0]) == keys[0]


def test_states_and_their_parts_have_their_own_keys():
    """By tenant, by the tokens before them, and by nothing else."""
    parent, tokens = b"p" * 16, b"\1\0\0\0"
    keys = [
        state_key(SALT, parent, tokens),
        state_key(SALT, parent, tokens * 2),
        state_key(SALT, b"q" * 16, tokens),
        state_key(b"o" * 32, parent, tokens),
        block_keys(SALT)(parent, tokens),
    ]
    parts = [key for one in keys for key in part_keys(SALT, one, 3)]
    assert len({*keys, *parts}) == 5 + 15
