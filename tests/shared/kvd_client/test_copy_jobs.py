"""Jobs and answers of a copier's channel."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kvd_client.copy_jobs import (
    MAX_JOB_BYTES,
    MAX_JOB_SLOTS,
    Answered,
    Job,
    Way,
    decode_answer,
    decode_job,
    encode_answer,
    encode_job,
)
from shared.process.packets import MalformedPacketError

SLOT_BYTES, NUM_SLOTS, RING_BYTES = 1000, 8, 4000
JOB = Job(Way.LOAD, 7, 0, 100, 900, [3, 0, 7])


@given(
    st.sampled_from(Way),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50),
)
def test_jobs_round_trip(way, job_id, offset, slot_ids):
    """What is encoded is decoded to the same job."""
    job = Job(way, job_id, offset, offset // 2, offset + 1, slot_ids)
    decoded = decode_job(encode_job(job))
    assert list(decoded.slot_ids) == slot_ids
    assert vars(decoded) | {"slot_ids": slot_ids} == vars(job)


def test_the_largest_job_fits_into_a_packet():
    assert len(encode_job(Job(Way.STORE, 1, 0, 0, 1, range(MAX_JOB_SLOTS)))) == MAX_JOB_BYTES


@given(st.binary(max_size=80) | st.binary(max_size=60).map(lambda end: encode_job(JOB)[:-1] + end))
def test_garbage_is_refused_or_a_checked_job(packet):
    """`check` validates every decoded job."""
    try:
        job = decode_job(packet)
    except MalformedPacketError:
        return
    assert job.way in Way
    assert len(job.slot_ids) > 0


@pytest.mark.parametrize(
    ("changed", "is_right"),
    [
        ({}, True),
        ({"ring_offset": RING_BYTES - 2700}, True),
        ({"ring_offset": RING_BYTES - 2699}, False),
        ({"slot_offset": 101}, False),
        ({"slot_offset": 2000}, False),
        ({"piece_bytes": 0}, False),
        ({"piece_bytes": 901}, False),
        ({"slot_ids": [0, 8]}, False),
    ],
)
def test_a_job_must_stay_within_slots_and_ring(changed, is_right):
    """To the byte."""
    job = Job(**vars(JOB) | changed)
    if is_right:
        job.check(SLOT_BYTES, NUM_SLOTS, RING_BYTES)
        return
    with pytest.raises(MalformedPacketError):
        job.check(SLOT_BYTES, NUM_SLOTS, RING_BYTES)


@pytest.mark.parametrize("answered", Answered)
def test_answers_round_trip(answered):
    assert decode_answer(encode_answer(answered, 12)) == (answered, 12)


@pytest.mark.parametrize("packet", [b"", b"\0" * 8, b"\3" + b"\0" * 8, b"\0" * 10])
def test_garbage_is_no_answer(packet):
    with pytest.raises(MalformedPacketError):
        decode_answer(packet)
