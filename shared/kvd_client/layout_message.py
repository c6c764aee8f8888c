"""KVLayout to and from its protobuf message: what the handshake compares (D12). Pure."""

from shared.pb.kvd.v1 import kvd_pb2
from shared.types.kv_layout import Component, InvalidLayoutError, KVLayout, Layer


def layout_message(layout: KVLayout) -> kvd_pb2.KVLayout:
    """Encode, fingerprint included."""
    return kvd_pb2.KVLayout(
        model=layout.model,
        layers=[
            kvd_pb2.Layer(
                components=[
                    kvd_pb2.Component(name=c.name, shape=c.shape, dtype=c.dtype, rotary=c.rotary)
                    for c in layer.components
                ]
            )
            for layer in layout.layers
        ],
        block_tokens=layout.block_tokens,
        position_mode=layout.position_mode,
        tp_rank=layout.tp_rank,
        tp_size=layout.tp_size,
        fingerprint=layout.fingerprint,
    )


def layout_of(message: kvd_pb2.KVLayout) -> KVLayout:
    """Decode and check.

    Raises:
        InvalidLayoutError: if the layout cannot be, or the sender computes another fingerprint from
            it: the two would disagree about where the bytes lie.
    """
    layout = KVLayout(
        model=message.model,
        layers=tuple(
            Layer(
                tuple(
                    Component(c.name, tuple(c.shape), c.dtype, c.rotary) for c in layer.components
                )
            )
            for layer in message.layers
        ),
        block_tokens=message.block_tokens,
        position_mode=message.position_mode,
        tp_rank=message.tp_rank,
        tp_size=message.tp_size,
    )
    layout.check()
    if message.fingerprint != layout.fingerprint:
        raise InvalidLayoutError(
            f"the layout's fingerprint is {layout.fingerprint}, not {message.fingerprint[:40]!r}",
            "run the same release on both sides",
        )
    return layout
