"""Requests to the HTTP API that clients might send: valid ones, and mutations of them.

Ids of responses and conversations are known only when a request is sent: until then marks stand for
them, in path, query and body.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlencode

from hypothesis import strategies as st

from inference_svc.http_api.serving import ROUTES
from tests.fuzz.json_values import NAMES, anything
from tests.fuzz.right_bodies import MODEL, VALID

FEW_TOKENS = 8  # of an answer: tests do not wait for long ones
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n")
MAX_WAY = 8  # to a place in a body that is changed
NUM_MARKS = 3
KINDS = {"chat": "chatcmpl-", "response": "resp_", "conversation": "conv_", "item": "msg_"}
_MARK = re.compile(rb"MARK_([a-z]+)_(\d)")
_HOLE = re.compile(r"\{(\w+)(?::[^}]*)?\}")


@dataclass(frozen=True)
class Request:
    """A request; path and query are encoded, an empty query is none."""

    method: str
    path: str
    query: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None

    def naming(self, known: Mapping[str, Sequence[str]]) -> "Request":
        """Replace the request's marks by known ids."""

        def resolved(found: re.Match[bytes]) -> bytes:
            ids = known.get(found[1].decode(), ())
            return ids[int(found[2]) % len(ids)].encode() if ids else found[0]

        path, query, body = (
            _MARK.sub(resolved, part)
            for part in (self.path.encode(), self.query.encode(), self.body or b"")
        )
        sent = None if self.body is None else body
        return replace(self, path=path.decode(), query=query.decode(), body=sent)


def own_marks(path: str) -> list[str]:
    """Return marks for the holes of a route's path, in order."""
    _, _, product, *_ = [*path.split("/"), ""]
    of_product = {"chat": "chat", "responses": "response", "conversations": "conversation"}
    by_hole = {"id": of_product.get(product, ""), "item": "item"}
    kinds = [by_hole.get(hole, "") for hole in _HOLE.findall(path)]
    return [f"MARK_{kind}_0" if kind else MODEL for kind in kinds]


def right_request(method: str, path: str) -> Request:
    """Return a valid request of a route."""
    body = json.dumps(VALID[path][0]).encode() if method == "POST" else None
    return Request(method, fill_path(path, own_marks(path)), body=body)


def fill_path(path: str, values: Sequence[str]) -> str:
    """Return a route's path with values in its holes."""
    given = iter(values)
    return _HOLE.sub(lambda _: next(given), path)


# ----------------------------------------------------------------------------- what is wrong

RAW = {'"RAW_FLOAT"': "1e999", '"RAW_LONG"': "7" * 5000, '"RAW_NAN"': "NaN", '"RAW_ZERO"': "-0.0"}
marks = st.sampled_from([f"MARK_{kind}_{n}" for kind in KINDS for n in range(NUM_MARKS)])


def _nest(depth: int) -> Any:
    """Nest a list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


odd = st.sampled_from(
    [
        *(10**400, -(10**400), 2**63, 2**31, 2**31 - 1, -1, 0, 1.5, 1e308, -0.0),
        *(_nest(70), _nest(400), {"a": _nest(90)}, [], {}, "", "\ud800", "\0", "a" * 5000),
        *(name.strip('"') for name in RAW),
        *("<|end|>", "../../etc/passwd", "é" * 300, "%s%n", "\u202e\u0000\uffff"),
    ]
)
wrong = anything | odd | marks
seldom = st.sampled_from([False] * 7 + [True])


def _places(value: Any, found: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return every place in a value, as a path."""
    steps = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in steps:
        yield (*found, key)
        if isinstance(inner, dict | list) and len(found) < MAX_WAY:
            yield from _places(inner, (*found, key))


@st.composite
def draw_mutated(draw: st.DrawFn, valid: Sequence[dict[str, Any]]) -> Any:
    """Return a valid body with a few possibly invalid changes."""
    body = deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        places = list(_places(body))
        how = draw(st.sampled_from(["replace", "remove", "add", "wrap", "repeat"]))
        if how == "add" or not places:
            body[draw(st.sampled_from(NAMES))] = deepcopy(draw(wrong))
            continue
        *way, last = draw(st.sampled_from(places))
        holder = body
        for key in way:
            holder = holder[key]
        if how == "remove":
            del holder[last]
        elif how == "wrap":
            holder[last] = [holder[last]]
        elif how == "repeat" and isinstance(holder, list):
            holder.extend(deepcopy(holder) * 20)
        else:
            holder[last] = deepcopy(draw(wrong))
    return body


def bound_length(body: Any) -> Any:
    """Return the same body with a bounded length of the answer."""
    if not isinstance(body, dict):
        return body
    return {
        name: value % FEW_TOKENS + 1
        if name in LENGTHS and type(value) is int and FEW_TOKENS < value < 2**31
        else value
        for name, value in body.items()
    }


def _encode_body(body: Any, *, is_escaped: bool) -> bytes:
    text = json.dumps(body, ensure_ascii=is_escaped)
    for name, raw in RAW.items():
        text = text.replace(name, raw)
    return text.encode(errors="surrogatepass")


@st.composite
def spoilt(draw: st.DrawFn, written: bytes) -> bytes:
    """Return the bytes of a body, perhaps corrupted."""
    at = draw(st.integers(0, len(written)))
    junk = draw(
        st.sampled_from([b"\xff", b"\xc3", b"\0", b"\xed\xa0\x80", b"\\u", b'"', b"}", b","])
    )
    return draw(
        st.sampled_from(
            [
                written[:at],
                written[:at] + junk + written[at:],
                b"\xef\xbb\xbf" + written,
                written.decode(errors="replace").encode("utf-16"),
                b'{"model": 1, ' + written[1:],
                written + written,
                b"[" * at + written,
                b'{"a":' * 3000,
                b"",
            ]
        )
    )


@st.composite
def bytes_of(draw: st.DrawFn, path: str) -> bytes:
    """Return the bytes of a body for a route."""
    right = draw_mutated(VALID.get(path, ({},)))
    body = bound_length(draw(wrong if draw(seldom) else right))
    written = _encode_body(body, is_escaped=draw(st.booleans()))
    return draw(spoilt(written)) if draw(seldom) else written


values = st.one_of(
    st.sampled_from(
        [
            *("0", "1", "2", "20", "100", "101", "-1", "1e3", "+1", "007", "9" * 30, "1_0"),
            *("asc", "desc", "true", "false", "True", "", "null", "\u0661", "é\u202e", "\0"),
            *(MODEL, "message.output_text.logprobs", "a" * 3000, "\ud800"),
        ]
    ),
    marks,
    st.text(max_size=6),
)
names = st.sampled_from(
    [
        *("limit", "order", "after", "starting_after", "stream", "include", "include[]", "model"),
        *("metadata[a]", "metadata[]", "metadata[a", "beta", "include_obfuscation", "before", "\0"),
    ]
)
queries = st.lists(st.tuples(names, values), max_size=3).map(
    lambda given: urlencode(given, errors="surrogatepass")
)
ids = st.one_of(
    marks,
    st.text(max_size=8).map(lambda text: quote(text, safe="")),
    st.sampled_from(
        ["%ff%00", "..", "%2e%2e%2fetc", "resp_%ff", "conv_", "resp_", "a" * 4000, "%F0%9F%9A%80"]
    ),
)
headers = st.lists(
    st.sampled_from(
        [
            ("anthropic-version", "2023-06-01"),
            ("anthropic-beta", "a,b"),
            ("Idempotency-Key", "again"),
            ("OpenAI-Project", "globex"),
            ("X-Session-Id", "ses_1"),
            ("X-Parent-Session-Id", "ses_0"),
            ("X-Dynamo-Session-Final", "true"),
            ("Origin", "https://chat.example:8443"),
            ("Access-Control-Request-Method", "POST"),
            ("Accept", "text/event-stream"),
            ("Content-Encoding", "gzip"),
            ("X-Http-Method-Override", "DELETE"),
        ]
    ),
    max_size=2,
    unique=True,
).map(tuple)
kinds = st.sampled_from(
    [
        *("", "text/plain", "application/json; charset=utf-16", "multipart/form-data; boundary=a"),
        *("application/x-www-form-urlencoded", "a", "application/json; charset=nothing"),
    ]
)
methods = st.sampled_from(["GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"])


@st.composite
def requests_of(draw: st.DrawFn, method: str, path: str) -> Request:
    """Draw requests of one route, sometimes with another method."""
    given = [draw(ids) if draw(seldom) else own for own in own_marks(path)]
    used = draw(methods) if draw(seldom) else method
    has_body = method == "POST" or draw(seldom)
    kind = draw(kinds) if draw(seldom) else "application/json"
    return Request(
        used,
        fill_path(path, given),
        draw(queries) if method == "GET" or draw(seldom) else "",
        (*(draw(headers) if draw(seldom) else ()), *((("Content-Type", kind),) if kind else ())),
        draw(bytes_of(path)) if has_body else None,
    )


any_request = st.sampled_from([(method, path) for method, path, _ in ROUTES]).flatmap(
    lambda route: requests_of(*route)
)
scenes = st.lists(st.lists(any_request, min_size=1, max_size=3), min_size=1, max_size=4)
