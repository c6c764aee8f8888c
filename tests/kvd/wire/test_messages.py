"""Durations and names in messages of any client."""

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


def test_invalid_lineages():
    """Its digest has one length, or is empty."""
    with pytest.raises(InvalidRequestError, match="digest"):
        lineage_of(kvd_pb2.DiscardRequest(lineage=kvd_pb2.Lineage(digest=b"short")))
