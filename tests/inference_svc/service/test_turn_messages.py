"""Decoding and encoding of the service's messages."""

import pytest

from inference_svc.core.chat import Message
from inference_svc.core.errors import (
    EmptyTurnError,
    InvalidCompressionError,
    InvalidDiscardError,
    InvalidSamplingError,
    InvalidTurnError,
)
from inference_svc.core.retention import MAX_RETENTION_S, NO_RETENTION, Retention
from inference_svc.core.submission import (
    ChatInput,
    ModelTraits,
    TextInput,
    TokenInput,
    TurnDefaults,
)
from inference_svc.core.transcript_format import Header, Transcript
from inference_svc.core.truncation import OverflowPolicy
from inference_svc.core.turn_record import (
    CLIENT,
    Accepted,
    AnswerToken,
    Discard,
    Finished,
    Graft,
    Started,
    Tokens,
    TurnRecord,
    Usage,
)
from inference_svc.service.submissions import fill_sampling
from inference_svc.service.turn_messages import (
    MAX_DISCARD_ITEMS,
    decode_discard,
    decode_submission,
    encode_event,
    encode_session,
)
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

KEY = SessionKey("default", "m", "s")
HELLO = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hello")])


DEFAULTS = TurnDefaults(64, OverflowPolicy("sinks", 0.25), "snapkv", 0.75, ModelTraits("ragged"))
CHANGES = {
    "frequency_penalty": 0.5,
    "presence_penalty": -0.25,
    "logit_bias": {5: -100.0, 300: 1.5},
    "stop_token_ids": (7, 8),
    "min_tokens": 3,
}
OTHER_CHANGES = {
    "frequency_penalty": 0.25,
    "presence_penalty": 0.0,
    "logit_bias": {5: -100.0, 300: 1.25},
    "stop_token_ids": (7,),
    "min_tokens": 4,
}
NAN, INFINITE = float("nan"), float("inf")


def decode(rpc_left_s=None, **fields):
    return decode_submission(pb.SubmitTurnRequest(**fields), KEY, DEFAULTS, rpc_left_s)


def test_the_default_sampling_is_greedy():
    """With the service's limit; only what the client set differs."""
    sampling = decode(text="Hi").sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.0, 1.0, 64)
    assert decode(text="Hi", sampling=pb.Sampling(seed=0)).sampling.seed == 0


def test_every_change_of_logits_reaches_the_turn():
    """Unchanged."""
    sampling = decode(text="Hi", sampling=pb.Sampling(**CHANGES)).sampling
    assert {name: getattr(sampling, name) for name in CHANGES} == CHANGES


@pytest.mark.parametrize("name", [*CHANGES])
def test_the_digest_covers_every_change_of_logits(name):
    """A repeat that changes one asks for another answer."""
    same, other = ({**CHANGES, name: value} for value in (CHANGES[name], OTHER_CHANGES[name]))
    first, again, changed, without = (
        decode(text="Hi", sampling=pb.Sampling(**values)).digest
        for values in (CHANGES, same, other, {k: v for k, v in CHANGES.items() if k != name})
    )
    assert first == again
    assert len({first, changed, without}) == 3


def test_the_order_of_biases_does_not_matter():
    """The digest is the same."""
    one, other = (dict.fromkeys(ids, 1.0) for ids in ((5, 300), (300, 5)))
    digests = [decode(text="Hi", sampling=pb.Sampling(logit_bias=b)).digest for b in (one, other)]
    assert digests[0] == digests[1]


def test_an_unset_seed_is_drawn():
    """Two turns without a seed do not draw the same tokens."""
    assert fill_sampling({}, DEFAULTS).seed != fill_sampling({}, DEFAULTS).seed


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "Hi"}, TextInput("Hi")),
        ({"chat": HELLO}, ChatInput((Message("user", "Hello"),))),
        ({"tokens": pb.TokenIds(ids=[1, 2])}, TokenInput((1, 2))),
    ],
)
def test_each_kind_of_input_is_decoded(fields, expected):
    """Text, chat messages or token ids."""
    assert decode(**fields).input == expected


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text": ""},
        {"chat": pb.ChatMessages()},
        {"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="user")])},
        {"tokens": pb.TokenIds()},
    ],
)
def test_an_empty_turn_is_refused(fields):
    """In whichever way it is empty."""
    with pytest.raises(EmptyTurnError):
        decode(**fields)


def test_invalid_sampling_is_refused_before_anything_runs():
    """With all problems in one error."""
    with pytest.raises(InvalidSamplingError, match=r"top_p 3.*max_tokens 0"):
        decode(text="Hi", sampling=pb.Sampling(top_p=3, max_tokens=0))


@pytest.mark.parametrize("priority", [-100, 0, 100])
def test_priorities_are_decoded(priority):
    """Within their bounds they do not change; 0 is the default."""
    assert decode(text="Hi", priority=priority).priority == priority


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"priority": 101}, "priority 101"),
        ({"priority": -101}, "priority -101"),
        ({"deadline_s": -0.5}, "deadline_s -0.5"),
        ({"deadline_s": NAN}, "deadline_s nan"),
        ({"deadline_s": INFINITE}, "deadline_s inf"),
        ({"priority": 101, "deadline_s": -1.0}, "priority 101 and deadline_s -1.0"),
        ({"request_id": "x" * 257}, "request_id 'xxx"),
        ({"request_id": "a\nb"}, r"request_id 'a\nb'"),
    ],
)
def test_fields_out_of_range_are_refused(fields, said):
    """With all problems in one error, and what is accepted."""
    with pytest.raises(InvalidTurnError) as refused:
        decode(text="Hi", **fields)
    assert said in refused.value.message
    assert refused.value.reason == "invalid_input"
    for name in fields:
        assert name in refused.value.remedy
    assert len(str(refused.value)) < 200
    assert decode(text="Hi", request_id="é" * 256).request_id == "é" * 256


def test_a_prediction_is_decoded():
    """Any text; most turns have none."""
    assert decode(text="Hi", prediction="<|end|> Hello").prediction == "<|end|> Hello"
    assert decode(text="Hi").prediction == ""


def test_retentions_are_decoded():
    """Within their bounds they do not change; there is none by default."""
    assert decode(text="Hi").retention == NO_RETENTION
    given = pb.Retention(session_s=0.5, prefix_s=MAX_RETENTION_S)
    assert decode(text="Hi", retention=given).retention == Retention(0.5, MAX_RETENTION_S)
    for wrong in (-1.0, NAN, INFINITE, MAX_RETENTION_S + 1):
        for name in ("session_s", "prefix_s"):
            with pytest.raises(InvalidTurnError, match="retention") as refused:
                decode(text="Hi", retention=pb.Retention(**{name: wrong}))
            assert "0 for none" in refused.value.remedy


@pytest.mark.parametrize(
    ("deadline_s", "rpc_left_s", "expected_s"),
    [
        (0.0, None, None),
        (2.5, None, 2.5),
        (0.0, 3.0, 3.0),
        (2.5, 3.0, 2.5),
        (5.0, 3.0, 3.0),
        (5.0, 0.0, 0.0),
        (1e12, None, None),
        (1e12, 3.0, 3.0),
        (0.0, 1e300, None),
    ],
)
def test_the_earlier_deadline_applies(deadline_s, rpc_left_s, expected_s):
    """The turn's, or its RPC's, from the turn's arrival; a far one is none."""
    submission = decode(rpc_left_s, text="Hi", deadline_s=deadline_s)
    if expected_s is None:
        assert submission.deadline_ns is None
    else:
        assert submission.deadline_ns == submission.arrived_ns + int(expected_s * NS_PER_S)


def test_the_digest_covers_input_and_sampling_only():
    """A repeat may have another wait, deadline or expected turn, but no other input."""
    first = decode(text="Hi", request_id="r").digest
    assert first == decode(text="Hi", request_id="q", wait=True, expected_turn=2).digest
    assert first == decode(text="Hi", priority=3, deadline_s=1.0, rpc_left_s=2.0).digest
    assert first == decode(text="Hi", retention=pb.Retention(session_s=60)).digest
    assert first == decode(text="Hi", prediction="Hello").digest
    assert first != decode(text="Ho").digest
    assert first != decode(text="Hi", sampling=pb.Sampling(seed=1)).digest
    assert first != decode(text="Hi", final=True).digest


def test_events_are_encoded_field_by_field():
    """Clients read what the runtime publishes."""
    accepted = encode_event(Accepted("s", 3, "r", 2, is_replayed=True)).accepted
    assert (accepted.turn, accepted.queue_length, accepted.replayed) == (3, 2, True)
    started = encode_event(Started(10, 8, 0.5, 3)).started
    assert (started.reused_tokens, started.new_tokens) == (8, 3)
    token = AnswerToken(7, "é", -0.5, ((7, -0.5), (9, -1.5)))
    (encoded,) = encode_event(Tokens((token,))).tokens.tokens
    assert (encoded.text, encoded.logprob, encoded.top[1].token_id) == ("é", -0.5, 9)
    usage = Usage(
        history_tokens=10,
        tier_tokens={"ssd": 8},
        recompute_reason="partial",
        preemptions=2,
        stall_s=0.25,
        kept_tokens=5,
        healed_tokens=2,
    )
    finished = encode_event(Finished("stop", "é", usage, 4, "###")).finished
    assert dict(finished.usage.tier_tokens) == {"ssd": 8}
    assert (finished.turns, finished.usage.recompute_reason) == (4, "partial")
    assert finished.stop_string == "###"
    assert (finished.usage.preemptions, finished.usage.stall_s) == (2, 0.25)
    assert (finished.usage.kept_tokens, finished.usage.healed_tokens) == (5, 2)


def test_a_token_without_logprob_is_distinguished_from_zero():
    """Absent is not zero."""
    (encoded,) = encode_event(Tokens((AnswerToken(7, "a"),))).tokens.tokens
    assert not encoded.HasField("logprob")


def test_a_turns_overflow_and_compression_override_the_settings():
    """Each set field separately."""
    plain = decode(text="Hi")
    assert plain.overflow == DEFAULTS.overflow
    assert (plain.compression.name, plain.compression.keep_ratio) == ("snapkv", 0.75)
    given = decode(
        text="Hi",
        overflow=pb.Overflow(sink_tokens=0, split_frames=True),
        compression=pb.Compression(policy="h2o"),
    )
    assert given.overflow == OverflowPolicy("sinks", 0.25, 0, split_frames=True)
    assert (given.compression.name, given.compression.keep_ratio) == ("h2o", 0.75)
    assert decode(text="Hi", compression=pb.Compression(policy="none")).compression is None


@pytest.mark.parametrize(
    ("fields", "error", "word"),
    [
        ({"overflow": pb.Overflow(policy="most")}, InvalidTurnError, "most"),
        ({"overflow": pb.Overflow(ratio=0.0)}, InvalidTurnError, "ratio 0"),
        ({"overflow": pb.Overflow(ratio=NAN)}, InvalidTurnError, "nan"),
        ({"overflow": pb.Overflow(sink_tokens=1 << 20)}, InvalidTurnError, "sink_tokens"),
        ({"compression": pb.Compression(policy="zip")}, InvalidCompressionError, "zip"),
        ({"compression": pb.Compression(keep_ratio=2.0)}, InvalidCompressionError, "2"),
    ],
)
def test_invalid_policies_are_refused(fields, error, word):
    """The message names the value."""
    with pytest.raises(error, match=word):
        decode(text="Hi", **fields)


def test_a_session_shows_its_discards_and_grafts():
    """Counts always; tokens, discards and grafts only with its turns."""
    lost = (Discard(((0, 1),), after_tokens=3),)
    graft = Graft(1, 2, "other", 7, 3, Lineage(b"x" * 16, 1))
    turn = TurnRecord(
        *(0, "r", "d", (1, 2, 3), (4,), ("",), (), (), 1, "stop", Usage(), 0.0),
        discards=lost,
        grafts=(graft,),
    )
    session = Transcript(Header("default", "m", "s"), (turn,))
    session = session.with_discard(Discard(((0, 1),), 0, CLIENT))
    brief = encode_session(session, is_busy=False, with_turns=False)
    assert (brief.num_tokens, brief.context_tokens, brief.dropped_tokens) == (4, 2, 2)
    assert not brief.context_ids
    full = encode_session(session, is_busy=False, with_turns=True)
    assert list(full.context_ids) == [3, 4]
    (shown,) = full.turn_records[0].grafts
    assert (shown.seam, shown.num_tokens, shown.session_id) == (1, 2, "other")
    assert (shown.source_start, shown.healed_tokens) == (7, 3)
    assert [(d.turn, d.after_tokens, d.reason) for d in full.discards] == [
        (0, 3, "overflow"),
        (1, 0, "client"),
    ]


def test_a_discard_has_ranges_and_positions():
    """And the client's expectation; what it omits is not checked."""
    request = pb.DiscardRequest(
        ranges=[pb.TokenRange(start=3, end=5)], positions=[7], expected_context_tokens=0
    )
    ranges, expected = decode_discard(request)
    assert ranges == [(3, 5), (7, 8)]
    assert (expected.num_turns, expected.context_tokens) == (None, 0)


def test_a_discard_of_very_many_positions_is_refused():
    """Before they are expanded."""
    most = pb.DiscardRequest(positions=range(MAX_DISCARD_ITEMS))
    assert len(decode_discard(most)[0]) == MAX_DISCARD_ITEMS
    most.ranges.add(start=1, end=2)
    with pytest.raises(InvalidDiscardError) as refused:
        decode_discard(most)
    assert "send ranges" in refused.value.remedy


def test_template_arguments_of_a_chat():
    """Arguments, the answer's beginning, and names in messages: only turns with them."""
    asked = pb.ChatMessage(role="user", content="Hello", name="Ann")
    chat = pb.ChatMessages(messages=[asked], template_arguments='{"style": [1]}', beginning="Well")
    told = decode(chat=chat)
    assert told.input == ChatInput(
        (Message("user", "Hello", name="Ann"),), arguments={"style": [1]}, beginning="Well"
    )
    plain = decode(chat=HELLO)
    assert (plain.input.arguments, plain.input.beginning) == ({}, "")
    assert plain.digest != told.digest


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        ({"template_arguments": "[]"}, "not an object"),
        ({"template_arguments": '{"tools": []}'}, "the service itself sets"),
        ({"template_arguments": '{"x": NaN}'}, "not JSON"),
        ({"template_arguments": '{"x": "' + "y" * 16384 + '"}'}, "too long"),
        (
            {"messages": [pb.ChatMessage(role="user", content="a", name="b\n")]},
            "not a valid name of a message's author",
        ),
    ],
)
def test_invalid_template_arguments(chat, said):
    """As over HTTP."""
    given = {"messages": HELLO.messages, **chat}
    with pytest.raises(InvalidTurnError, match=said):
        decode(chat=pb.ChatMessages(**given))
