"""The transcript's file format: what was written is read, torn tails are cut, damage is refused."""

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.transcript_format import (
    Header,
    Transcript,
    TranscriptDamagedError,
    decode_transcript,
    encode_transcript,
    encode_turn,
)
from inference_svc.core.turn_record import TurnRecord, Usage

HEADER = Header("default", "model", "s1")


def record(turn, output_ids=(5, 6), uncomputed_tokens=1):
    return TurnRecord(
        turn=turn,
        request_id=f"r{turn}",
        request_digest="d",
        input_ids=(1, 2, 3),
        output_ids=tuple(output_ids),
        pieces=("é", "\n東\u2028"),
        logprobs=(-0.5, None),
        top_logprobs=(((5, -0.5), (9, -1.5)), ()),
        uncomputed_tokens=uncomputed_tokens,
        finish_reason="stop",
        usage=Usage(
            history_tokens=3, tier_tokens={"dram": 2}, recompute_reason="partial", stall_s=0.25
        ),
        created_unix_s=1.5,
    )


def transcript(num_turns, has_ended=False):
    return Transcript(HEADER, tuple(record(turn) for turn in range(num_turns)), has_ended)


@pytest.mark.parametrize("num_turns", [0, 1, 3])
@pytest.mark.parametrize("has_ended", [False, True])
def test_what_is_written_is_read(num_turns, has_ended):
    """A file decodes to the transcript that was encoded, with every field's type."""
    written = transcript(num_turns, has_ended)
    data = encode_transcript(written)
    assert decode_transcript(data) == (written, len(data))


@given(st.integers(0, 2000))
def test_a_torn_tail_leaves_the_turns_before_it(cut):
    """However a crash cuts the file, the complete lines before it are a transcript."""
    whole = encode_transcript(transcript(3))
    read, good_bytes = decode_transcript(whole[:cut])
    assert whole[:good_bytes].count(b"\n") == (0 if read is None else 1 + len(read.turns))
    assert good_bytes <= cut


def test_damage_before_the_last_line_is_refused():
    """A bit that flipped in a recorded turn must not become a wrong history."""
    data = bytearray(encode_transcript(transcript(3)))
    data[data.index(b"\n") + 30] ^= 1
    with pytest.raises(TranscriptDamagedError, match="line 2"):
        decode_transcript(bytes(data))


def test_tokens_and_computed_tokens():
    """History is all tokens; the ones the model was never fed are not computed."""
    session = Transcript(HEADER).with_turn(record(0), is_final=False)
    session = session.with_turn(record(1, (7,), uncomputed_tokens=0), is_final=True)
    assert session.token_ids == (1, 2, 3, 5, 6, 1, 2, 3, 7)
    assert session.computed_tokens == 9
    assert session.forked("s2", 1).computed_tokens == 4
    assert session.has_ended
    assert not session.forked("s2", 2).has_ended


def with_usage(change):
    """A transcript whose turn has another version's usage."""
    header, turn = encode_transcript(transcript(1)).splitlines(keepends=True)
    fields = json.loads(turn.partition(b" ")[2])
    change(fields["turn"]["usage"])
    text = json.dumps(fields).encode()
    return header + b"%08x %s\n" % (zlib.crc32(text), text)


def test_records_of_older_versions_are_read():
    """What they did not count is zero."""
    data = with_usage(lambda usage: [usage.pop(name) for name in ("preemptions", "stall_s")])
    read, good_bytes = decode_transcript(data)
    assert (read.turns[0].usage.preemptions, read.turns[0].usage.stall_s) == (0, 0.0)
    assert (read.turns[0].usage.history_tokens, good_bytes) == (3, len(data))


def test_records_of_newer_versions_are_read():
    """What only they count is left out."""
    read, _ = decode_transcript(with_usage(lambda usage: usage.update(joules=3)))
    assert read.turns == (record(0),)


def test_turns_are_appended_in_order():
    """A record with another index is a broken invariant."""
    with pytest.raises(AssertionError):
        Transcript(HEADER).with_turn(record(1), is_final=False)


def test_a_turn_is_one_line():
    """Line breaks inside texts are escaped."""
    assert encode_turn(record(0)).count(b"\n") == 1
