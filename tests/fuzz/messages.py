"""Requests made from their descriptors: valid, partly valid, and nonsense.

Engine ids, leases and tokens of the data socket are known only when a test runs. Marks, numbers
or texts that stand for them are drawn, and replaced by `resolve` just before a message is sent; so
an example is the same at each run.
"""

import math
import os
from collections.abc import Mapping

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from shared.kvd_client.messages import layout_message
from shared.kvd_client.queue_sender import snapshot_message
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.kv_layout import Component, KVLayout, Layer
from shared.types.queue_delta import (
    QueuedRequest,
    QueueUpdate,
    RunningRequest,
    running_digest,
    update_digest,
    waiting_digest,
)
from shared.types.session_key import SessionKey
from tests.queue_changes import queue_change
from tests.synthetic_engine import MODEL, encode, small_layout

LAYOUTS = (small_layout(), small_layout(3, "ab" * 16))
FIRST_MARK = 7_700_000_000  # marks are FIRST_MARK, FIRST_MARK + 1, …
NUM_MARKS = 8
TEXT_MARK = "mark-"
MAX_UINT32, MAX_UINT64 = (1 << 32) - 1, (1 << 64) - 1

_marks = st.integers(FIRST_MARK, FIRST_MARK + NUM_MARKS - 1)
_uint32 = st.sampled_from([0, 1, 2, 16, 17, 1 << 31, MAX_UINT32]) | st.integers(0, MAX_UINT32)
_uint64 = st.sampled_from([0, 1, 15, 16, 50, 1 << 40, 1 << 63, MAX_UINT64]) | st.integers(
    0, MAX_UINT64
)
_double = st.sampled_from(
    [0.0, -0.0, -1.0, 1e-9, 0.01, 3600.0, 1e9, 1e10, 1e300, -1e300, math.inf, -math.inf, math.nan]
) | st.floats(0, 0.05)
_text = st.sampled_from(
    [
        "",
        "default",
        "\x00",
        "a\n",
        "\u202e\u202d bidi",
        "ﷺ" * 200,
        "../../x",
        "😀",
        "%s{}",
        "x" * 5000,
    ]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_bytes = st.binary(max_size=40) | st.sampled_from([b"", b"\xff" * 7, b"\x00" * (1 << 20)])
_token_ids = st.one_of(
    st.tuples(st.integers(0, 3), st.sampled_from([50, 50, 33, 70, 0])).map(
        lambda drawn: encode(range(1000 * drawn[0], 1000 * drawn[0] + drawn[1]))
    ),
    _bytes,
)

# Their fingerprint is right, whatever they are.
_layouts = st.builds(
    KVLayout,
    model=_text | st.just(MODEL),
    layers=st.lists(
        st.lists(
            st.builds(
                Component,
                name=_text,
                shape=st.lists(st.sampled_from([1, 2, 8]) | _uint32, max_size=3).map(tuple),
                dtype=st.sampled_from(["float32", "bfloat16", "float16", "int3"]),
                rotary=_text,
            ),
            max_size=3,
        ).map(lambda components: Layer(tuple(components))),
        max_size=4,
    ).map(tuple),
    block_tokens=st.sampled_from([1, 3, 16]) | _uint32,
    position_mode=st.sampled_from(["decoupled", "naive", "none"]),
    tp_rank=st.sampled_from([0, 0, 1]),
    tp_size=st.sampled_from([1, 1, 2]) | _uint32,
).map(layout_message)

# Valid values, by field name.
_HINTS: Mapping[str, st.SearchStrategy] = {
    "engine_id": _marks,
    "lease_id": _marks,
    "held_leases": _marks,
    "data_token": st.integers(0, NUM_MARKS - 1).map(lambda number: f"{TEXT_MARK}{number}"),
    "instance": st.integers(0, NUM_MARKS - 1).map(lambda number: f"{TEXT_MARK}{number}"),
    "page_token": st.integers(0, NUM_MARKS - 1).map(lambda number: f"{TEXT_MARK}{number}")
    | st.sampled_from([f"{LAYOUTS[0].fingerprint} {token}" for token in ("", "1/2", "1/1/1/a/b/c")])
    | st.from_regex(
        rf"{LAYOUTS[0].fingerprint} \d{{1,19}}/\d{{1,19}}/\d{{1,19}}/a/b/c", fullmatch=True
    ),
    "tenant": st.sampled_from(["", "", "default", "other"]),
    "model": st.sampled_from(["", MODEL, LAYOUTS[1].model]),
    "session_id": st.sampled_from(["s0", "s0", "s1", "s2", "s3"]),
    "token_ids": _token_ids,
    "from_token": st.sampled_from([0, 0, 0, 1, 16, 32, 50]),
    "success": st.sampled_from([True, True, False]),
    "deadline_s": st.sampled_from([0.0, 0.0, 0.01, math.inf]),
    "start": st.integers(0, 70),
    "end": st.integers(0, 70),
    "ReopenLayoutRequest.layout": st.sampled_from(
        ["", *(layout.fingerprint[:8] for layout in LAYOUTS)]
    ),
    "layout": st.sampled_from([layout_message(layout) for layout in LAYOUTS]) | _layouts,
    "block_tokens": st.sampled_from([1, 16]),
    "dtype": st.sampled_from(["float32", "int3"]),
    "tp_size": st.just(1),
}


def requests_of(method: MethodDescriptor) -> st.SearchStrategy[Message]:
    """Draw requests of an RPC."""
    made = _messages(GetMessageClass(method.input_type))
    return st.one_of(made, _queues()) if method.name == "PushQueue" else made


@st.composite
def _queues(draw) -> kvd_pb2.QueueSnapshot:
    """Draw a valid queue snapshot: a whole queue, with its digest, or a change of one."""
    numbers = draw(st.lists(st.integers(0, 9), max_size=6, unique=True))
    keys = [SessionKey("default", "", draw(_HINTS["session_id"])) for _ in numbers]
    num_waiting = draw(st.integers(0, len(numbers)))
    jobs = list(zip(numbers, keys, strict=True))
    waiting = [
        QueuedRequest((draw(st.integers(-1, 1)), draw(st.sampled_from([0.0, 1.0])), number), key, 5)
        for number, key in jobs[:num_waiting]
    ]
    running = [RunningRequest(number, key) for number, key in jobs[num_waiting:]]
    base_sequence = draw(st.sampled_from([0, 0, 1, 2]))
    left = draw(st.lists(st.integers(10, 12), unique=True)) if base_sequence else []
    digests = [waiting_digest(job.rank, job.key) for job in waiting]
    digests += [running_digest(job.number, job.key) for job in running]
    change = queue_change(waiting, running, left, draw(st.sampled_from([0, 10**9])))
    sequence = base_sequence + draw(st.integers(1, 2))
    update = QueueUpdate(sequence, base_sequence, change, update_digest(0, added=sum(digests)))
    return snapshot_message(draw(_marks), update)


@st.composite
def _messages(draw, cls: type[Message], *, is_right: bool = False) -> Message:
    # Most are valid: a message with one wrong field seldom gets far.
    is_right = is_right or draw(st.sampled_from([True, True, True, False]))
    message = cls()
    for field in cls.DESCRIPTOR.fields:
        is_field_right = is_right or draw(st.booleans())
        if not is_right and draw(st.integers(0, 5)) == 0:
            continue  # omitted
        values = _values(field, is_right=is_field_right)
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(values, max_size=4)))
        elif field.message_type is None:
            setattr(message, field.name, draw(values))
        else:
            getattr(message, field.name).CopyFrom(draw(values))
    return message


def _values(field: FieldDescriptor, *, is_right: bool) -> st.SearchStrategy:
    hint = _HINTS.get(f"{field.containing_type.name}.{field.name}", _HINTS.get(field.name))
    if is_right and hint is not None:
        return hint
    if field.message_type is not None:
        return _messages(GetMessageClass(field.message_type), is_right=is_right)
    return {
        FieldDescriptor.TYPE_UINT32: _uint32,
        FieldDescriptor.TYPE_UINT64: _uint64,
        FieldDescriptor.TYPE_FIXED64: _uint64,
        FieldDescriptor.TYPE_SINT32: st.integers(-(1 << 31), (1 << 31) - 1),
        FieldDescriptor.TYPE_DOUBLE: _double,
        FieldDescriptor.TYPE_BOOL: st.booleans(),
        FieldDescriptor.TYPE_ENUM: st.integers(-1, 5) | _uint32.map(lambda drawn: drawn >> 1),
        FieldDescriptor.TYPE_STRING: _text,
        FieldDescriptor.TYPE_BYTES: _bytes,
    }[field.type]


def resolve(message: Message, known: Mapping[str, list]) -> None:
    """Replace marks by known values of their fields, in the whole message."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                resolve(part, known)
        elif field.name == "pid" and value == os.getpid():
            setattr(message, field.name, 0)  # kvd would kill it, as requested
        elif field.is_repeated:
            values = [_replace_known(field, item, known) for item in value]
            del value[:]
            value.extend(values)
        else:
            setattr(message, field.name, _replace_known(field, value, known))


def _replace_known(field: FieldDescriptor, value, known: Mapping[str, list]):
    values = known.get(field.name, [])
    if isinstance(value, str) and value.startswith(TEXT_MARK):
        number = int(value.removeprefix(TEXT_MARK) or 0)
    elif isinstance(value, int) and 0 <= value - FIRST_MARK < NUM_MARKS:
        number = value - FIRST_MARK
    else:
        return value
    return values[number % len(values)] if values else value
