"""Spans and places as bytes: encoding round-trips, and damage costs only the later spans."""

from hypothesis import given
from hypothesis import strategies as st

from kvd.core.records.entries import (
    FULL,
    PLAIN_SPAN_BYTES,
    BlockRecord,
    Span,
    pack_full,
    pack_places,
    pack_spans,
    plain_span,
    unpack_places,
    unpack_spans,
)

KEYS = st.binary(min_size=16, max_size=16)
COUNTS = st.integers(1, 1 << 20)
PLAIN_SPANS = st.builds(plain_span, KEYS, COUNTS)
OTHER_SPANS = st.builds(Span, KEYS, st.integers(0, 1 << 20), COUNTS, KEYS.filter(any), KEYS)
PARTS = st.builds(Span, KEYS, COUNTS, st.just(0), KEYS.filter(any), KEYS)  # of states


@given(st.lists(PLAIN_SPANS | OTHER_SPANS | PARTS))
def test_spans_round_trip(spans):
    """Plain or not, in any mixture."""
    assert unpack_spans(pack_spans(spans)) == spans


@given(st.lists(PLAIN_SPANS))
def test_plain_spans_are_short(spans):
    """A row of an ordinary session has its keys and little more."""
    assert len(pack_spans(spans)) == 1 + PLAIN_SPAN_BYTES * len(spans)


@given(st.lists(PLAIN_SPANS | OTHER_SPANS, min_size=1), st.data())
def test_a_cut_row_gives_the_spans_before_the_cut(spans, data):
    """A prefix, whatever is missing."""
    packed = pack_spans(spans)
    some = unpack_spans(packed[: data.draw(st.integers(0, len(packed) - 1))])
    assert some == spans[: len(some)]
    assert len(some) < len(spans)


@given(st.binary(max_size=200))
def test_any_bytes_can_be_decoded(packed):
    """Garbage gives plausible spans, or none; never an error."""
    for span in unpack_spans(packed):
        assert span.num_tokens > 0
        assert span.tokens_digest or (span.start, span.chain) == (0, span.block_key)


def test_an_impossible_span_ends_the_list():
    """A span has tokens; a plain one starts its block, and its chain continues from its key."""
    good = plain_span(b"k" * 16, 4)
    for bad in (
        plain_span(b"k" * 16, 0),
        Span(b"k" * 16, 1, 4, b"", b"k" * 16),
        Span(b"k" * 16, 0, 4, b"", b"c" * 16),
    ):
        packed = bytes((FULL,)) + pack_full([good, bad, good])
        assert unpack_spans(packed) == [good]
    assert unpack_spans(bytes(1 + PLAIN_SPAN_BYTES)) == []


@given(st.lists(st.builds(BlockRecord, KEYS, st.integers(0, 1 << 60), COUNTS)))
def test_places_round_trip(records):
    """Extent numbers have 64 bits."""
    assert list(unpack_places(pack_places(records))) == records
