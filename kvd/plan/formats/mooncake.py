"""Raw Mooncake traces: requests with block hashes, grouped into likely sessions.

Pure, except that it reads the file. A trace has one JSON object per request: `timestamp`
(milliseconds), `input_length`, `output_length`, `hash_ids` (of each 512 tokens of the prompt,
chained: equal ids mean equal prompts up to there). The user is not recorded. One of two rules
groups requests, depending on the kind of traffic:

chain     chat, in which all requests begin with the same system prompt: a request continues the one
          whose full blocks are the longest prefix of its own, at least two, if it is longer by the
          answer (or equally long: the answer was requested again)
prefix    questions about each user's own document: requests with the same first full block are one
          session, whose history is the longest prefix shared with an earlier request

The share of requests with the same first block decides. Both rules are guesses, and biased: short
first turns cannot be linked, and turns before the trace are not seen, so sessions come out short.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from kvd.plan.formats.filling import Request, session_of
from kvd.plan.trace import (
    BadTraceError,
    Session,
    check_sorted,
    numbered_lines,
    parse_object,
    whole_number,
)

BLOCK_TOKENS = 512
SYSTEM_PROMPT_SHARE = 0.05  # a first block in more of the requests is a system prompt
LEAST_BLOCKS = 2  # that a continuation shares: the first may be the system prompt
# Because of templates and special tokens a prompt can be a little shorter than its history.
CLOSE_TOKENS, FAR_TOKENS = 16, 110
SAME_TOKENS, SIMILAR_TOKENS = 32, 64  # difference of two prompts for answers to the same turn
MOST_CANDIDATES = 64  # the latest requests with the same blocks that are considered
MS_PER_S = 1e3
MAX_TIMESTAMP = 1e14  # milliseconds; Unix time is far below


@dataclass(frozen=True, slots=True)
class HashedRequest(Request):
    """A line of the file; `blocks` are the ids of its full blocks."""

    blocks: tuple[int, ...] = ()


@dataclass(slots=True)
class _PartialSession:
    """A session so far: its requests, and the history tokens of each."""

    requests: list[HashedRequest] = field(default_factory=list)
    histories: list[int] = field(default_factory=list)


class _Link(NamedTuple):
    """A session that a request may continue. The best link is the greatest."""

    is_continuation: bool
    kept_tokens: int
    age: int  # the negative index: the earliest is preferred
    history_tokens: int
    found: _PartialSession


def read_mooncake(path: Path) -> tuple[list[Session], str]:
    """Return a file's sessions, in the order in which they begin, and how they were grouped.

    Raises:
        BadTraceError: the file cannot be read, or a line is no request.
    """
    requests: list[HashedRequest] = []
    for where, line in numbered_lines(path):
        fields = parse_object(where, line)
        request = _request(where, fields)
        before_s = requests[-1].at_s if requests else 0.0
        check_sorted(where, "timestamp", fields["timestamp"], request.at_s, before_s)
        requests.append(request)
    if not requests:
        raise BadTraceError(
            f"{path}: the trace contains no request", "give a trace that is not empty"
        )
    if has_system_prompt(requests):
        return sessions_by_chain(requests), "sessions inferred from continued prompts"
    return sessions_by_prefix(requests), "sessions inferred from equal first blocks"


def has_system_prompt(requests: Sequence[HashedRequest]) -> bool:
    """Return whether so many requests begin alike that it cannot be one user's document."""
    firsts = Counter(request.blocks[0] for request in requests if request.blocks)
    most = max(firsts.values(), default=0)
    return most > SYSTEM_PROMPT_SHARE * len(requests)


def sessions_by_chain(requests: Sequence[HashedRequest]) -> list[Session]:
    """Group requests that continue one another: rule "chain" of the module docstring."""
    ends: defaultdict[int, deque[tuple[int, HashedRequest, _PartialSession]]] = defaultdict(
        lambda: deque(maxlen=MOST_CANDIDATES)
    )
    sessions: list[_PartialSession] = []
    for index, request in enumerate(requests):
        link = _best_link(request, ends)
        if link is None:
            found, history_tokens = _PartialSession(), 0
            sessions.append(found)
        else:
            found, history_tokens = link.found, link.history_tokens
        found.requests.append(request)
        found.histories.append(history_tokens)
        if len(request.blocks) >= LEAST_BLOCKS:
            ends[request.blocks[-1]].append((index, request, found))
    return [_session(found) for found in sessions]


def sessions_by_prefix(requests: Sequence[HashedRequest]) -> list[Session]:
    """Group requests by their first block; a prompt of less than a block is a session itself."""
    sessions: dict[int, _PartialSession] = {}
    for index, request in enumerate(requests):
        name = request.blocks[0] if request.blocks else -1 - index
        found = sessions.setdefault(name, _PartialSession())
        shared = max((_num_shared(request, before) for before in found.requests), default=0)
        found.requests.append(request)
        found.histories.append(min(shared * BLOCK_TOKENS, request.input_tokens - 1))
    return [_session(found) for found in sessions.values()]


def _best_link(
    request: HashedRequest,
    ends: defaultdict[int, deque[tuple[int, HashedRequest, _PartialSession]]],
) -> _Link | None:
    """Return the session that a request continues: by prefix, then continuation, then length.

    As ids are chained, the last full block of an earlier request identifies all of its blocks.
    """
    for num_blocks in range(len(request.blocks), LEAST_BLOCKS - 1, -1):
        block = request.blocks[num_blocks - 1]
        links = [
            link
            for index, before, found in ends.get(block, ())
            if (link := _link(request, index, before, found)) is not None
        ]
        if links:
            return max(links, key=lambda link: link[:3])
    return None


def _link(
    request: HashedRequest, index: int, before: HashedRequest, found: _PartialSession
) -> _Link | None:
    growth = request.input_tokens - before.input_tokens
    missing = before.kept_tokens - request.input_tokens
    if missing <= CLOSE_TOKENS or (abs(growth) > SAME_TOKENS and missing <= FAR_TOKENS):
        history_tokens = min(before.kept_tokens, request.input_tokens - 1)
        return _Link(True, before.kept_tokens, -index, history_tokens, found)
    if abs(growth) <= SIMILAR_TOKENS:
        return _Link(False, 0, -index, len(before.blocks) * BLOCK_TOKENS, found)
    return None


def _num_shared(request: HashedRequest, before: HashedRequest) -> int:
    pairs = zip(request.blocks, before.blocks, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _session(found: _PartialSession) -> Session:
    return session_of(found.requests, found.histories)


def _request(where: str, fields: dict[str, Any]) -> HashedRequest:
    at_s = _timestamp_s(where, fields)
    input_tokens = whole_number(where, fields, "input_length")
    output_tokens = whole_number(where, fields, "output_length")
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise BadTraceError(
            f"{where}: hash_ids is not a list of numbers", "give the trace as it was published"
        )
    if not input_tokens:
        raise BadTraceError(f"{where}: input_length is 0", "leave out requests without a prompt")
    num_blocks = input_tokens // BLOCK_TOKENS
    if len(ids) < num_blocks:
        raise BadTraceError(
            f"{where}: there are {len(ids)} hash_ids for {input_tokens} tokens",
            f"give one for each {BLOCK_TOKENS} tokens",
        )
    return HashedRequest(at_s, input_tokens, output_tokens, blocks=tuple(ids[:num_blocks]))


def _timestamp_s(where: str, fields: dict[str, Any]) -> float:
    value = fields.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadTraceError(f"{where}: timestamp is not a number", "give milliseconds, from 0 on")
    if not 0 <= value <= MAX_TIMESTAMP:
        raise BadTraceError(
            f"{where}: timestamp is not a valid time", "give milliseconds, from 0 on"
        )
    return value / MS_PER_S
