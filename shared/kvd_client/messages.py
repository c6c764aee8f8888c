"""Messages that both sides of kvd's RPCs use: keys, lineages, layouts, granted slots, engines' ids.

Pure. The handshake of an attachment compares layouts (D12).
"""

import hashlib
from collections.abc import Sequence
from itertools import accumulate, repeat

from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.serving.message_fields import MessageFields
from shared.types.granted_slots import LoadSpan, StoreBlock
from shared.types.kv_layout import Component, InvalidLayoutError, KVLayout, Layer
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey

_COMPONENT = MessageFields(Component, pb.Component)
_LAYOUT = MessageFields(KVLayout, pb.KVLayout, given=("layers", "fingerprint"))
UNKNOWN = "unknown"
_TIERS = {pb.TIER_DRAM: "dram", pb.TIER_SSD: "ssd"}
_TIER_NUMBERS = {name: number for number, name in _TIERS.items()}
_ID_PERSON = b"kvd shown id"
_ID_BYTES = 8


def key_message(key: SessionKey) -> pb.SessionKey:
    """Encode a session's key."""
    return pb.SessionKey(tenant=key.tenant, model=key.model, session_id=key.session_id)


def lineage_message(lineage: Lineage | None) -> pb.Lineage | None:
    """Encode a lineage; the lineage without discards differs from None, which names none."""
    if lineage is None:
        return None
    return pb.Lineage(digest=lineage.digest, clean_tokens=lineage.clean_tokens)


def tier_of(number: pb.Tier) -> str:
    """Return a tier's name; UNKNOWN for one of a newer kvd."""
    return _TIERS.get(number, UNKNOWN)


def spans_message(spans: Sequence[LoadSpan]) -> pb.LoadSpans:
    """Encode spans that follow each other without gaps as columns."""
    if not spans:
        return pb.LoadSpans()
    slot_ids, starts, num_tokens, _, generations, tiers = zip(*spans, strict=True)
    return pb.LoadSpans(
        slot_ids=slot_ids,
        starts=starts,
        num_tokens=num_tokens,
        generations=generations,
        tiers=[_TIER_NUMBERS[tier] for tier in tiers],
    )


def spans_of(message: pb.LoadSpans, first_token: int) -> tuple[LoadSpan, ...]:
    """Decode spans; the first one begins at `first_token`.

    Raises:
        ValueError: the columns differ in length.
    """
    columns = message.slot_ids, message.starts, message.num_tokens, message.generations
    num_spans = len(message.tiers)
    if any(len(column) != num_spans for column in columns):
        raise ValueError(f"columns of {sorted({num_spans, *map(len, columns)})} spans")
    slot_ids, starts, num_tokens, generations = columns
    offsets = accumulate(num_tokens, initial=first_token)  # and the end of the last span
    tiers = map(_TIERS.get, message.tiers, repeat(UNKNOWN))
    rows = zip(slot_ids, starts, num_tokens, offsets, generations, tiers, strict=False)
    return tuple(map(LoadSpan._make, rows))


def blocks_message(blocks: Sequence[StoreBlock]) -> pb.StoreBlocks:
    """Encode the blocks of a store as columns."""
    if not blocks:
        return pb.StoreBlocks()
    slot_ids, token_offsets, num_tokens, generations = zip(*blocks, strict=True)
    return pb.StoreBlocks(
        slot_ids=slot_ids,
        token_offsets=token_offsets,
        num_tokens=num_tokens,
        generations=generations,
    )


def blocks_of(message: pb.StoreBlocks) -> tuple[StoreBlock, ...]:
    """Decode the blocks of a store.

    Raises:
        ValueError: the columns differ in length.
    """
    rows = zip(
        message.slot_ids,
        message.token_offsets,
        message.num_tokens,
        message.generations,
        strict=True,
    )
    return tuple(map(StoreBlock._make, rows))


def layout_message(layout: KVLayout) -> pb.KVLayout:
    """Encode a layout, fingerprint included."""
    layers = [
        pb.Layer(components=map(_COMPONENT.encode, layer.components), window=layer.window)
        for layer in layout.layers
    ]
    return _LAYOUT.encode(layout, layers=layers, fingerprint=layout.fingerprint)


def layout_of(message: pb.KVLayout) -> KVLayout:
    """Decode a layout and check it.

    Raises:
        InvalidLayoutError: the layout is invalid, or the sender computes another fingerprint from
            it: then the two would disagree about where the bytes lie.
    """
    layers = tuple(
        Layer(
            tuple(_COMPONENT.decode(c, shape=tuple(c.shape)) for c in layer.components),
            layer.window,
        )
        for layer in message.layers
    )
    layout = _LAYOUT.decode(message, layers=layers)
    layout.check()
    if message.fingerprint != layout.fingerprint:
        raise InvalidLayoutError(
            f"the layout's fingerprint is {layout.fingerprint}, but the message says "
            f"{message.fingerprint[:40]!r}",
            "check that kvd and the engine run the same release",
        )
    return layout


def shown_id(engine_id: int) -> int:
    """Return the public number of an engine, from which its id cannot be computed.

    The id itself works like a key: kvd takes a call that names it for that engine's. So only the
    engine and kvd know it. Logs, monitors and operators see this number, which is the same on both
    sides.
    """
    known = engine_id.to_bytes(_ID_BYTES, "little")
    digest = hashlib.blake2b(known, digest_size=_ID_BYTES, person=_ID_PERSON).digest()
    return int.from_bytes(digest, "little") >> 1
