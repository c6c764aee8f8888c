"""Durations and names in messages of any client."""

import math
from itertools import accumulate

import pytest

from kvd.core.records.entries import TTL_NEVER_NS
from kvd.core.records.errors import InvalidRequestError
from kvd.core.records.records import LoadAnswer, StoreAnswer
from kvd.wire.messages import (
    MAX_DURATION_S,
    key_of,
    lineage_of,
    load_response,
    ns_of,
    store_response,
    ttl_ns_of,
)
from shared.kvd_client.messages import blocks_of, lineage_message, spans_of
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.granted_slots import LoadSpan, Lookup, StoreBlock
from shared.types.lineage import WHOLE
from shared.types.session_key import InvalidNameError


@pytest.mark.parametrize("duration_s", [math.nan, math.inf, -math.inf, 1e300, MAX_DURATION_S * 1.1])
def test_invalid_durations_are_refused(duration_s):
    """Neither the index nor an integer could store them."""
    with pytest.raises(InvalidRequestError):
        ns_of(duration_s)


def test_valid_ttls():
    """None is the default; the longest can be added to any time."""
    assert (ttl_ns_of(0), ttl_ns_of(-math.inf), ttl_ns_of(0.5)) == (None, TTL_NEVER_NS, 500_000_000)
    assert ttl_ns_of(MAX_DURATION_S) * 2 < 1 << 63
    with pytest.raises(InvalidRequestError):
        ttl_ns_of(math.nan)


@pytest.mark.parametrize("name", ["a\n", "", "\n", "é", "x" * 129, "-a"])
def test_invalid_names(name):
    """A line feed at the end is a character like others."""
    with pytest.raises(InvalidNameError):
        key_of(kvd_pb2.SessionKey(session_id=name))


@pytest.mark.parametrize("lineage", [None, WHOLE, WHOLE.after(bytes(16), [(1, 2)])])
def test_a_lineage_is_decoded_as_named(lineage):
    """Naming none differs from naming one without discards."""
    for request in (
        kvd_pb2.PrepareLoadRequest,
        kvd_pb2.PrepareStoreRequest,
        kvd_pb2.DiscardRequest,
    ):
        sent = request(lineage=lineage_message(lineage)).SerializeToString()
        assert lineage_of(request.FromString(sent)) == lineage


@pytest.mark.parametrize("num_spans", [0, 1, 3])
def test_the_spans_of_a_load_are_the_same_as_columns(num_spans):
    """Which are sent in place of them."""
    spans = tuple(LoadSpan(7 - n, n % 2, 4 + n, 0, 2**40 + n, "ssd") for n in range(num_spans))
    offsets = accumulate((span.num_tokens for span in spans), initial=9)
    spans = tuple(span._replace(token_offset=at) for span, at in zip(spans, offsets, strict=False))
    response = load_response(LoadAnswer(Lookup.HIT, 1, spans), has_columns=True)
    assert not response.spans
    assert spans_of(response.columns, 9) == spans
    assert not load_response(LoadAnswer(Lookup.HIT, 1, spans)).HasField("columns")


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_the_blocks_of_a_store_are_the_same_as_columns(num_blocks):
    """Also if stored ones lie between them."""
    blocks = tuple(StoreBlock(7 - n, 40 * n, 4 + n, 2**40 + n) for n in range(num_blocks))
    response = store_response(StoreAnswer(1, blocks), has_columns=True)
    assert not response.blocks
    assert blocks_of(response.columns) == blocks
    assert not store_response(StoreAnswer(1, blocks)).HasField("columns")


def test_a_tier_of_a_newer_kvd():
    """It has no name yet."""
    columns = kvd_pb2.LoadSpans(
        slot_ids=[1], starts=[0], num_tokens=[1], generations=[1], tiers=[kvd_pb2.TIER_HBM]
    )
    assert [span.tier for span in spans_of(columns, 0)] == ["unknown"]


def test_invalid_lineages():
    """Its digest has one length, or is empty."""
    with pytest.raises(InvalidRequestError, match="digest"):
        lineage_of(kvd_pb2.DiscardRequest(lineage=kvd_pb2.Lineage(digest=b"short")))
