"""Durations and names, as anybody may send them."""

import math

import pytest

from kvd.core.records.entries import TTL_NEVER_NS
from kvd.core.records.errors import InvalidRequestError
from kvd.wire.messages import MAX_DURATION_S, key_of, lineage_of, ns_of, ttl_ns_of
from shared.kvd_client.messages import lineage_message
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.lineage import WHOLE
from shared.types.session_key import InvalidNameError


@pytest.mark.parametrize("duration_s", [math.nan, math.inf, -math.inf, 1e300, MAX_DURATION_S * 1.1])
def test_what_is_no_duration_is_refused(duration_s):
    """Neither the index nor an integer could hold it."""
    with pytest.raises(InvalidRequestError):
        ns_of(duration_s)


def test_ttls():
    """None is the default; the longest can be added to any instant."""
    assert (ttl_ns_of(0), ttl_ns_of(-math.inf), ttl_ns_of(0.5)) == (None, TTL_NEVER_NS, 500_000_000)
    assert ttl_ns_of(MAX_DURATION_S) * 2 < 1 << 63
    with pytest.raises(InvalidRequestError):
        ttl_ns_of(math.nan)


@pytest.mark.parametrize("name", ["a\n", "", "\n", "é", "x" * 129, "-a"])
def test_names_that_can_not_be(name):
    """A line end at the end is a character like others."""
    with pytest.raises(InvalidNameError):
        key_of(kvd_pb2.SessionKey(session_id=name))


@pytest.mark.parametrize("lineage", [None, WHOLE, WHOLE.after(bytes(16), [(1, 2)])])
def test_a_lineage_arrives_as_it_was_named(lineage):
    """That none is named is not that nothing was discarded."""
    for request in (
        kvd_pb2.PrepareLoadRequest,
        kvd_pb2.PrepareStoreRequest,
        kvd_pb2.DiscardRequest,
    ):
        sent = request(lineage=lineage_message(lineage)).SerializeToString()
        assert lineage_of(request.FromString(sent)) == lineage


def test_a_lineage_that_can_not_be():
    """Its digest has one length, or none."""
    with pytest.raises(InvalidRequestError, match="digest"):
        lineage_of(kvd_pb2.DiscardRequest(lineage=kvd_pb2.Lineage(digest=b"short")))
