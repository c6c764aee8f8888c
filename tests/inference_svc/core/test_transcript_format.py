"""The transcript's file format: it round-trips, torn tails are cut, damage is refused."""

import json
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.context import Context
from inference_svc.core.ranges import merge_ranges
from inference_svc.core.transcript_format import (
    Header,
    Transcript,
    TranscriptDamagedError,
    UnknownRecordError,
    decode_header,
    decode_transcript,
    encode_discard,
    encode_transcript,
    encode_turn,
)
from inference_svc.core.turn_record import CLIENT, Discard, Graft, TurnRecord, Usage
from shared.types.lineage import WHOLE, Lineage

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
def test_a_transcript_round_trips(num_turns, has_ended):
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


@pytest.mark.parametrize("number", [1, 2, 3])
def test_damage_before_the_last_line_is_refused(number):
    """A flipped bit in a recorded turn must not become a wrong history."""
    lines = encode_transcript(transcript(3)).splitlines(keepends=True)
    damaged = bytearray(lines[number - 1])
    damaged[30] ^= 1
    lines[number - 1] = bytes(damaged)
    with pytest.raises(TranscriptDamagedError, match=f"line {number} "):
        decode_transcript(b"".join(lines))


def test_damage_of_the_last_line_is_a_torn_tail():
    """It may have been written in part; the lines before it are valid."""
    lines = encode_transcript(transcript(3)).splitlines(keepends=True)
    good = b"".join(lines[:-1])
    read, good_bytes = decode_transcript(good + lines[-1].replace(b"r2", b"r9"))
    assert (read, good_bytes) == (transcript(2), len(good))


def test_tokens_that_were_never_fed_are_not_computed():
    """The history has all tokens."""
    session = Transcript(HEADER).with_turn(record(0), is_final=False)
    session = session.with_turn(record(1, (7,), uncomputed_tokens=0), is_final=True)
    assert session.token_ids == (1, 2, 3, 5, 6, 1, 2, 3, 7)
    assert session.context.computed_tokens == 9
    assert session.forked("s2", 1).context.computed_tokens == 4
    assert session.has_ended
    assert not session.forked("s2", 2).has_ended


def rewritten(line, change):
    """Rewrite a line as another release would."""
    fields = json.loads(line.partition(b" ")[2])
    change(fields)
    text = json.dumps(fields).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def with_usage(change):
    """Return a transcript whose turn has another version's usage."""
    header, turn = encode_transcript(transcript(1)).splitlines(keepends=True)
    return header + rewritten(turn, lambda fields: change(fields["turn"]["usage"]))


def test_records_of_older_versions_are_read():
    """Their missing counts are zero."""
    data = with_usage(lambda usage: [usage.pop(name) for name in ("preemptions", "stall_s")])
    read, good_bytes = decode_transcript(data)
    assert (read.turns[0].usage.preemptions, read.turns[0].usage.stall_s) == (0, 0.0)
    assert (read.turns[0].usage.history_tokens, good_bytes) == (3, len(data))


def test_records_of_newer_versions_are_read():
    """Unknown counts are ignored."""
    read, _ = decode_transcript(with_usage(lambda usage: usage.update(joules=3)))
    assert read.turns == (record(0),)


def test_unknown_fields_are_ignored():
    """In any record: the known ones give the written session."""
    written = transcript(2).with_discard(Discard(((0, 2),), 4, "client")).with_end()

    def extend(fields):
        (inner,) = fields.values()
        inner["since_2031"] = {"deep": [1]}

    lines = encode_transcript(written).splitlines(keepends=True)
    data = b"".join(rewritten(line, extend) for line in lines)
    assert data != encode_transcript(written)
    assert decode_transcript(data) == (written, len(data))
    assert decode_header(rewritten(lines[0], extend)) == HEADER


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (0, lambda fields: fields.update(header={"owner": "s1"})),
        (0, lambda fields: fields.update(preface={}) or fields.pop("header")),
        (1, lambda fields: fields.update(edit={}) or fields.pop("turn")),
        (1, lambda fields: fields["turn"].pop("output_ids")),
        (1, lambda fields: fields.update(turn=[1, 2])),
        (2, lambda fields: fields["turn"].update(usage=None)),
        (2, lambda fields: fields["turn"].update(top_logprobs=3)),
    ],
)
def test_incompatible_records_are_refused(number, change):
    """One of an unknown kind, or without a session's essentials, is named by its line."""
    lines = encode_transcript(transcript(2)).splitlines(keepends=True)
    lines[number] = rewritten(lines[number], change)
    with pytest.raises(UnknownRecordError, match=f"line {number + 1} .* another release"):
        decode_transcript(b"".join(lines))
    assert decode_header(lines[0]) == (HEADER if number else None)


def test_turns_are_appended_in_order():
    """A record with another index violates an invariant."""
    with pytest.raises(AssertionError):
        Transcript(HEADER).with_turn(record(1), is_final=False)


def test_a_turn_is_one_line():
    """Line breaks inside texts are escaped."""
    assert encode_turn(record(0)).count(b"\n") == 1


def test_discards_round_trip_in_their_places():
    """Within turns and between them, also before the first and after the last."""
    within = replace(
        record(1), discards=(Discard(((0, 2),)), Discard(((1, 3),), 4, "compression:x"))
    )
    session = transcript(1).with_discard(Discard(((1, 2),), 0, CLIENT))
    session = session.with_turn(within, is_final=False).with_discard(Discard(((0, 1),), 0, CLIENT))
    data = encode_transcript(session)
    assert decode_transcript(data) == (session, len(data))
    assert [turn for turn, _ in session.all_discards] == [1, 1, 1, 2]


def test_the_context_follows_from_turns_and_discards():
    """Tokens are added in order; each discard applies to the context of its time."""
    session = transcript(1)  # 1 2 3 5 6, the last one not computed
    session = session.with_discard(Discard(((1, 2), (4, 5)), 0, CLIENT))
    assert (session.context.token_ids, session.context.computed_tokens) == ((1, 3, 5), 3)
    mid = Discard(((0, 4),), after_tokens=4)  # of 3 5 1 2 3 5
    turn = replace(record(1), discards=(Discard(((0, 1),)), mid))
    session = session.with_turn(turn, is_final=False)
    assert (session.context.token_ids, session.context.computed_tokens) == ((3, 5, 6), 2)
    assert session.token_ids == (1, 2, 3, 5, 6, 1, 2, 3, 5, 6)


def test_the_system_message_is_known_while_it_exists():
    """It belongs to the turn that began the context, whole or in part."""
    session = Transcript(HEADER).with_turn(replace(record(0), system_tokens=2), is_final=False)
    assert session.context.system_tokens == 2
    part = session.with_discard(Discard(((1, 4),), 0, CLIENT))
    assert part.context.system_tokens == 1
    anew = session.with_discard(Discard(((0, 5),), 0, CLIENT))
    anew = anew.with_turn(replace(record(1), system_tokens=3), is_final=False)
    assert anew.context.system_tokens == 3


def test_answers_begin_no_message():
    """Nor does raw text; discarded tokens take their marks with them."""
    session = transcript(1).with_turn(replace(record(1), is_text=True), is_final=False)
    session = session.with_turn(record(2), is_final=False)
    session = session.with_discard(Discard(((1, 4),), 0, CLIENT))
    assert session.context.framed == b"\1" + b"\0" + b"\0" * 5 + b"\1" * 3 + b"\0" * 2


def test_a_fork_keeps_the_discards_up_to_its_turn():
    """Its context is the one that the replaced turn had."""
    session = transcript(1).with_discard(Discard(((0, 2),), 0, CLIENT))
    session = session.with_turn(record(1), is_final=False).with_discard(
        Discard(((0, 1),), 0, CLIENT)
    )
    assert session.forked("s2", 0).context.token_ids == ()
    assert session.forked("s2", 1).context.token_ids == (3, 5, 6)
    assert session.forked("s2", 2).context.token_ids == session.context.token_ids
    forked = session.forked("s2", 1)
    assert decode_transcript(encode_transcript(forked))[0] == forked


@pytest.mark.parametrize("bad", [((0, 6),), ((2, 2),), ((3, 1),)])
def test_a_discard_of_missing_tokens_is_damage(bad):
    """The session is refused rather than continued with a wrong context."""
    data = encode_transcript(transcript(1)) + encode_discard(Discard(bad, 0, CLIENT))
    with pytest.raises(TranscriptDamagedError):
        decode_transcript(data)


@st.composite
def draw_discarded_turns(draw):
    """Make a transcript with discards anywhere, and its context by a simple method."""
    session, context = Transcript(HEADER), []
    for index in range(draw(st.integers(0, 4))):
        if context and draw(st.booleans()):
            found = draw(some_ranges(len(context)))
            session = session.with_discard(Discard(found, 0, CLIENT))
            context = drop_ranges(context, found)
        input_ids = [100 * index + at for at in range(draw(st.integers(1, 5)))]
        output_ids = [100 * index + 50 + at for at in range(draw(st.integers(1, 5)))]
        cuts = []
        for at, token in enumerate([*input_ids, *output_ids]):
            if context and draw(st.integers(0, 5)) == 0:
                cuts.append(Discard(draw(some_ranges(len(context))), at))
                context = drop_ranges(context, cuts[-1].ranges)
            context = [*context, token]
        turn = replace(record(index, output_ids), input_ids=tuple(input_ids), discards=tuple(cuts))
        session = session.with_turn(turn, is_final=False)
    return session, context


def drop_ranges(context, ranges):
    gone = {at for start, end in ranges for at in range(start, end)}
    return [token for at, token in enumerate(context) if at not in gone]


def some_ranges(num_tokens):
    positions = st.sets(st.integers(0, num_tokens - 1), min_size=1)
    return positions.map(lambda found: merge_ranges([(at, at + 1) for at in found], num_tokens))


@given(draw_discarded_turns())
def test_replaying_gives_the_original_context(lived):
    """With any discards; also from the file, lineage and marks included."""
    session, context = lived
    assert list(session.context.token_ids) == context
    read, _ = decode_transcript(encode_transcript(session))
    assert read.cached_context is None
    assert read.context == session.context


def test_adding_a_turn_needs_no_replay(monkeypatch):
    """Only transcripts that are read, or forked, are replayed."""
    monkeypatch.setattr("inference_svc.core.transcript_format.replay", None)
    session = transcript(0)
    session = replace(session, cached_context=Context())
    session = session.with_turn(record(0), is_final=False)
    session = session.with_discard(Discard(((0, 2),), 0, CLIENT))
    session = session.with_turn(record(1), is_final=False)
    assert session.context.token_ids == (3, 5, 6, 1, 2, 3, 5, 6)


def test_a_lineage_that_does_not_follow_from_tokens_is_recorded():
    """Replay restores it, and continues from it; otherwise it follows from the tokens."""
    recorded = Lineage(b"x" * 16, 1)
    plain, naming = (
        replace(record(0), discards=(Discard(((1, 2),), 4, lineage=lineage),))
        for lineage in (None, recorded)
    )
    session = Transcript(HEADER).with_turn(naming, is_final=False)
    assert session.context.lineage == recorded
    data = encode_transcript(session)
    read, _ = decode_transcript(data)
    assert (read, read.context) == (session, session.context)
    other = Transcript(HEADER).with_turn(plain, is_final=False)
    assert other.context.lineage not in (recorded, WHOLE)
    later = Discard(((0, 1),), 0, CLIENT)
    assert read.with_discard(later).context.lineage != other.with_discard(later).context.lineage


def test_grafts_are_recorded_with_their_lineage():
    """Replay continues from the last one; a discard during the answer comes after it."""
    first, last = Lineage(b"x" * 16, 1), Lineage(b"y" * 16, 1)
    grafts = (Graft(1, 1, "other", 7, 2, first), Graft(2, 1, "other", 9, 0, last))
    session = Transcript(HEADER).with_turn(replace(record(0), grafts=grafts), is_final=False)
    assert session.context.lineage == last
    read, _ = decode_transcript(encode_transcript(session))
    assert (read, read.context) == (session, session.context)
    assert read.forked("f", 1).context.lineage == last
    cut = replace(record(0), grafts=grafts, discards=(Discard(((1, 2),), 4),))
    after = Transcript(HEADER).with_turn(cut, is_final=False).context
    assert after.lineage == last.after(as_bytes((1, 2, 3)), ((1, 2),))


def test_a_release_before_grafts_treats_the_context_as_whole():
    """It finds nothing of it behind the first seam, and recomputes it."""
    graft = Graft(1, 1, "other", 7, 0, Lineage(b"x" * 16, 1))
    session = Transcript(HEADER).with_turn(replace(record(0), grafts=(graft,)), is_final=False)
    lines = encode_transcript(session).splitlines(keepends=True)
    older = [lines[0], rewritten(lines[1], lambda fields: fields["turn"].pop("grafts"))]
    read, _ = decode_transcript(b"".join(older))
    assert read.context == replace(session.context, lineage=WHOLE)


def as_bytes(token_ids):
    return b"".join(token.to_bytes(4, "little") for token in token_ids)


def test_a_context_knows_whether_it_ends_with_an_answer():
    """Until all of the answer is dropped; an empty one counts, too."""
    session = transcript(1)  # 1 2 3, answered 5 6
    assert session.context.ends_with_answer
    for ranges, is_answer in [
        (((0, 1),), True),
        (((4, 5),), True),
        (((2, 4),), True),
        (((3, 5),), False),
        (((1, 5),), False),
    ]:
        cut = session.with_discard(Discard(ranges, 0, CLIENT))
        assert cut.context.ends_with_answer == is_answer
        read, _ = decode_transcript(encode_transcript(cut))
        assert read.context == cut.context
        assert cut.with_turn(record(1), is_final=False).context.answer_tokens == 2
    empty = Transcript(HEADER).with_turn(record(0, ()), is_final=False)
    assert empty.context.ends_with_answer
    assert not empty.with_discard(Discard(((1, 3),), 0, CLIENT)).context.ends_with_answer
    assert not Transcript(HEADER).context.ends_with_answer


def test_a_session_has_its_template_arguments():
    """Those of its first turn; none before it, and none from an older release."""
    assert transcript(0).template_arguments is None
    assert transcript(2).template_arguments == ""
    told = replace(record(0), template_arguments='{"style":1}')
    kept, _ = decode_transcript(encode_transcript(Transcript(HEADER, (told, record(1)))))
    assert kept.template_arguments == '{"style":1}'
    line = json.loads(encode_turn(record(0)).partition(b" ")[2])
    del line["turn"]["template_arguments"]
    text = json.dumps(line).encode()
    data = encode_transcript(transcript(0)) + b"%08x %s\n" % (zlib.crc32(text), text)
    old, _ = decode_transcript(data)
    assert old.template_arguments == ""


def test_turns_of_an_older_release_have_no_digests():
    """Those of this one are read as written."""
    told = replace(record(1), said="5a1d", history="5a1e")
    session = Transcript(HEADER, (record(0), told))
    assert session.history == "5a1e"
    assert decode_transcript(encode_transcript(session))[0] == session
    lines = encode_transcript(session).splitlines(keepends=True)
    for name in ("said", "history"):
        lines[2] = rewritten(lines[2], lambda fields, name=name: fields["turn"].pop(name))
    old, _ = decode_transcript(b"".join(lines))
    assert old == replace(session, turns=(record(0), record(1)))


def test_histories_belong_to_the_session_that_had_the_turns():
    """Not to its forks."""
    session = Transcript(HEADER, tuple(replace(record(n), history=f"{n}") for n in range(2)))
    forked = session.forked("fork", 2)
    assert forked.turns == (record(0), record(1))
    assert (session.history, forked.history, session.forked("fork", 0).history) == ("1", "", "")
