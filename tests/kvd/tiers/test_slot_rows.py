"""Checksums of slots: of used bytes only, slice by slice."""

import struct

import pytest
import xxhash

from kvd.tiers.slot_rows import BlockHasher
from shared.types.block_key import TOKEN_BYTES
from tests.kvd.tiers.disk import LAYOUT, random_slot

HASHER = BlockHasher(LAYOUT)


def _used_bytes_of(slot, layer_index, num_tokens):
    """Return the used bytes of a slice, component after component."""
    parts = []
    for index, component in enumerate(LAYOUT.layers[layer_index].components):
        start = LAYOUT.component_offset(layer_index, index)
        parts.append(bytes(slot[start : start + component.token_bytes * num_tokens]))
    return b"".join(parts)


@pytest.mark.parametrize("num_tokens", range(1, LAYOUT.block_tokens + 1))
def test_checksums_are_of_the_used_bytes(num_tokens):
    """Layer by layer xxh3_64 of the components' first rows, little-endian."""
    slot = random_slot()
    expected = [
        xxhash.xxh3_64_intdigest(_used_bytes_of(slot, layer, num_tokens))
        for layer in range(len(LAYOUT.layers))
    ]
    checksums = HASHER.checksums(slot, num_tokens)
    assert checksums == struct.pack(f"<{len(expected)}Q", *expected)
    assert HASHER.matches(slot, num_tokens, checksums)


@pytest.mark.parametrize("num_tokens", [1, 7, 16])
def test_exactly_the_used_bytes_count(num_tokens):
    """A flipped bit is found where rows are used, and nowhere else."""
    slot = random_slot()
    checksums = HASHER.checksums(slot, num_tokens)
    used = set()
    for layer_index, layer in enumerate(LAYOUT.layers):
        for index, component in enumerate(layer.components):
            start = LAYOUT.component_offset(layer_index, index)
            used.update(range(start, start + component.token_bytes * num_tokens))
    for position in range(0, LAYOUT.block_bytes, 61):
        slot[position] ^= 1
        assert HASHER.matches(slot, num_tokens, checksums) is (position not in used)
        slot[position] ^= 1


def test_a_range_of_layers_is_compared():
    """A range limits what is compared."""
    slot = random_slot()
    checksums = HASHER.checksums(slot, 16)
    slot[LAYOUT.slice_offsets[3]] ^= 1
    assert HASHER.matches(slot, 16, checksums, range(3))
    assert HASHER.matches(slot, 16, checksums, range(0))
    assert not HASHER.matches(slot, 16, checksums, range(3, 4))


@pytest.mark.parametrize("checksums", [b"", b"x" * TOKEN_BYTES, bytes(8 * 5)])
def test_checksums_of_another_length_never_match(checksums):
    """Not hashed yet, or of another layout."""
    assert not HASHER.matches(random_slot(), 16, checksums)
