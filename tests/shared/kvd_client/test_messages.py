"""Layouts on the wire."""

from dataclasses import replace

import pytest

from shared.kvd_client.messages import layout_message, layout_of
from shared.types.kv_layout import Component, InvalidLayoutError, KVLayout, Layer

LAYOUT = KVLayout(
    "ab" * 16,
    (
        Layer((Component("k", (2, 8), "float32", "r"), Component("v", (2, 8), "float32"))),
        Layer(()),
        Layer((Component("latent", (64,), "bfloat16"),)),
    ),
    block_tokens=32,
    tp_rank=1,
    tp_size=2,
)


def test_layouts_round_trip():
    """Several kinds of layers, shards and recipes are the same layout on the other side."""
    assert layout_of(layout_message(LAYOUT)) == LAYOUT
    windowed = replace(LAYOUT, layers=(replace(LAYOUT.layers[0], window=99), *LAYOUT.layers[1:]))
    assert layout_of(layout_message(windowed)) == windowed


def test_another_fingerprint_is_refused():
    """Two sides with different fingerprints would disagree about the places of bytes."""
    message = layout_message(LAYOUT)
    message.block_tokens = 64
    with pytest.raises(InvalidLayoutError, match="fingerprint"):
        layout_of(message)


def test_an_invalid_layout_is_refused():
    """The layout's own checks run on received ones."""
    message = layout_message(LAYOUT)
    del message.layers[:]
    with pytest.raises(InvalidLayoutError, match="0 layers"):
        layout_of(message)
