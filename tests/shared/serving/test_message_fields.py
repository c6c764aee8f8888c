"""Records and their messages: equal names are copied, and no field is forgotten."""

from dataclasses import dataclass, make_dataclass
from enum import Enum
from importlib import import_module
from typing import NamedTuple

import pytest

from shared.pb.kvd.v1 import kvd_pb2
from shared.serving.message_fields import MessageFields

PAIRED = (
    "kvd.rpc.operator_messages",
    "kvd.wire.messages",
    "kvd.wire.selection",
    "shared.kvd_client.grants",
    "shared.kvd_client.messages",
)
PAIRS = {
    f"{module}.{name}": pair
    for module in PAIRED
    for name, pair in vars(import_module(module)).items()
    if isinstance(pair, MessageFields)
}


class Tier(Enum):
    DRAM = 1


@dataclass
class Stats:
    tier: object
    capacity_bytes: int
    is_degraded: bool
    reason: str
    num_blocks: int
    surplus_bytes: int = 0


def _pair(record=Stats, **changes):
    named = {
        "renamed": {"reason": "degraded_reason"},
        "given": ("used_bytes", "physical_bytes"),
    }
    return MessageFields(record, kvd_pb2.TierStats, **named | changes)


@pytest.mark.parametrize("tier", [Tier.DRAM, "dram"])
def test_equal_names_are_copied(tier):
    """Our own prefixes are dropped, enums are the message's."""
    stats = Stats(tier, 7, is_degraded=True, reason="full", num_blocks=3)
    message = _pair().encode(stats, used_bytes=5, physical_bytes=None)
    assert message == kvd_pb2.TierStats(
        tier=kvd_pb2.TIER_DRAM,
        capacity_bytes=7,
        used_bytes=5,
        num_blocks=3,
        degraded=True,
        degraded_reason="full",
    )
    assert _pair().decode(message, tier=tier) == stats


class Row(NamedTuple):
    capacity_bytes: int
    num_blocks: int
    is_degraded: bool
    surplus_bytes: int
    tier: str


def test_a_named_tuple_is_decoded_as_a_row():
    """Plain fields come first, computed ones behind them; names are still paired."""
    given = ("used_bytes", "degraded_reason", "physical_bytes")
    pair = _pair(Row, renamed={}, given=given)
    row = Row(7, 3, is_degraded=True, surplus_bytes=0, tier="dram")
    message = pair.encode(row, **dict.fromkeys(given))
    assert message.num_blocks == 3
    assert pair.decode_row(message, "dram") == pair.decode(message, tier="dram") == row


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"record": make_dataclass("Stats", [*Stats.__annotations__, "colour"])}, "colour"),
        ({"given": ("used_bytes",)}, "physical_bytes"),
        ({"given": ("used_bytes", "physical_bytes", "height")}, "height"),
        ({"left_out": ("width",)}, "width"),
        ({"renamed": {"reason": "why"}}, "reason"),
    ],
)
def test_a_field_without_a_counterpart_is_refused(changes, missing):
    """Before anything is encoded: a new field on one side is noticed at once."""
    with pytest.raises(TypeError, match=missing):
        _pair(**changes)


@pytest.mark.parametrize("given", [{}, {"used_bytes": 1}, {"tier": 1}])
def test_exactly_the_required_values_are_given(given):
    """Neither less nor more."""
    with pytest.raises(TypeError, match="physical_bytes"):
        _pair().encode(Stats(Tier.DRAM, 1, is_degraded=False, reason="", num_blocks=0), **given)


def test_an_unknown_enum_value():
    """It is no tier, and is not replaced."""
    with pytest.raises(KeyError):
        _pair().encode(Stats("tape", 1, False, "", 0), used_bytes=1, physical_bytes=1)


@pytest.mark.parametrize("name", PAIRS)
def test_every_pair_is_complete(name):
    """Each field of a record is in its message, or listed as omitted, and vice versa."""
    pair = PAIRS[name]
    sent = {target for _, target in pair._plain} | {target for _, target, _ in pair._enums}
    assert sent | pair._given == set(pair._message.DESCRIPTOR.fields_by_name)
    assert len(sent) == len(pair._plain) + len(pair._enums), "two fields of the record in one"
