"""Cache misses of conversations: why one that was answered before was not found again. Pure.

Clients of the HTTP APIs send whole conversations. A conversation that repeats all answers word for
word continues their session. One that does not gets a session of its own, or a fork, and is
computed again from the first difference on. The session that it *resembles* is found by the answers
in it, each together with the messages before it. The cause of the miss follows from comparing what
both say at the first difference.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from inference_svc.core.chat import ASSISTANT, SYSTEM


class MissCause(StrEnum):
    """Causes, as users see them; `CAUSE_TEXTS` describes them."""

    TEMPLATE_ARGUMENTS = "template_arguments_changed"
    TOOLS_REORDERED = "tools_reordered"
    TOOLS_CHANGED = "tools_changed"
    DATE = "date_changed"
    SYSTEM = "system_changed"
    REASONING = "reasoning_dropped"
    ANSWER = "answer_edited"
    MESSAGE = "message_edited"
    GONE = "session_gone"
    UNKNOWN = "history_unknown"


CAUSE_TEXTS: Mapping[str, str] = {
    MissCause.TEMPLATE_ARGUMENTS: "other arguments of the chat template write it differently",
    MissCause.TOOLS_REORDERED: "the same tools are offered in another order",
    MissCause.TOOLS_CHANGED: "other tools are offered",
    MissCause.DATE: "a date or time differs",
    MissCause.SYSTEM: "the system message differs",
    MissCause.REASONING: "what the model thought is left out of an earlier answer",
    MissCause.ANSWER: "an earlier answer differs",
    MissCause.MESSAGE: "an earlier message differs",
    MissCause.GONE: "the session was deleted, by a client or for lack of room",
    MissCause.UNKNOWN: "it has answers that this service does not know",
}

# Why history was computed again although the conversation is the same: `Usage.recompute_reason`.
RECOMPUTE_TEXTS: Mapping[str, str] = {
    "evicted": "its KV had been evicted from all tiers, to make room for other sessions",
    "expired": "the TTL of its KV had passed",
    "flushed": "an operator had flushed its KV",
    "discarded": "its tokens had been discarded: by an overflow, a compression, or a client",
    "corrupt": "its KV was damaged, and was discarded",
    "unknown_session": "kvd does not know that it ever had this KV",
    "not_stored": "its KV had not been stored yet, or not at all",
    "not_fetched": "the rest of its KV did not arrive from the remote store in time",
    "partial": "only a part of its KV was stored",
    "tokens_differ": "KV of other tokens is stored",
    "deadline": "its KV could not be read in the time that a load may take",
    "kvd_unavailable": "kvd was not available",
    "recompute_cheaper": "recomputing took less time than loading",
    "mode_recompute": "this service does not store KV of this model",
    "load_policy_never": "loads are switched off",
}


def describe_cause(cause: str) -> str:
    """Describe a cause, or a reason to recompute, for users; an unknown one is returned."""
    return {**CAUSE_TEXTS, **RECOMPUTE_TEXTS}.get(cause, cause)


@dataclass(frozen=True)
class Resembled:
    """The session that a conversation was likely meant to continue.

    Attributes:
        session_id: a session that gave some of its answers; "" if there is none.
        turns: number of the session's turns up to the last of these answers.
        was_known: whether there was such a session.
        first_message: number of the client's messages that precede the turn's input.
        is_named: whether a client gave the session its name.
    """

    session_id: str = ""
    turns: int = 0
    was_known: bool = False
    first_message: int = 0
    is_named: bool = False


@dataclass(frozen=True)
class Wording:
    """One of two conversations to be compared.

    Attributes:
        tools_digest: digest of the tools that it describes; "": none.
        arguments: the chat template's arguments, as recorded.
        opening: its text before the first message that is not a system message.
        following: its text from the difference on, as much as is needed to see the difference.
    """

    tools_digest: str
    arguments: str
    opening: str
    following: str


def cause_of(
    old: Wording,
    new: Wording,
    common: str,
    role: str,
    *,
    in_opening: bool,
    thoughts: Sequence[str],
) -> MissCause:
    """Find the cause that made a conversation differ from the one that it resembles.

    Args:
        old: the conversation that it resembles.
        new: the conversation itself.
        common: the text right before the difference.
        role: role of the message that differs; "" if it is not known.
        in_opening: whether the difference is before the first message that is not a system message.
        thoughts: texts that begin a model's thoughts.
    """
    if old.arguments != new.arguments:
        return MissCause.TEMPLATE_ARGUMENTS
    if old.tools_digest != new.tools_digest and old.tools_digest and new.tools_digest:
        same = Counter(old.opening) == Counter(new.opening)
        return MissCause.TOOLS_REORDERED if same else MissCause.TOOLS_CHANGED
    if old.tools_digest != new.tools_digest and in_opening:
        return MissCause.TOOLS_CHANGED
    if differ_in_time(common, old.following, new.following):
        return MissCause.DATE
    if in_opening or role == SYSTEM:
        return MissCause.SYSTEM
    begun = tuple(thoughts)
    if begun and old.following.lstrip().startswith(begun):
        is_dropped = not new.following.lstrip().startswith(begun)
        return MissCause.REASONING if is_dropped else MissCause.ANSWER
    return MissCause.ANSWER if role == ASSISTANT else MissCause.MESSAGE


_DAYS = (
    "mon(?:day)?|tue(?:s|sday)?|wed(?:nesday)?|thu(?:rs|rsday)?|fri(?:day)?|sat(?:urday)?"
    "|sun(?:day)?"
)
_MONTHS = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    "|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?"
)
_RUN = re.compile(  # a run of characters and words that dates and times consist of
    rf"(?:\b(?:{_DAYS}|{_MONTHS}|am|pm|utc|gmt)\b|\d+(?:st|nd|rd|th|T|Z|am|pm)?|[-:/.,+ \t])+",
    re.IGNORECASE,
)
_TIME = re.compile(  # makes a run a date or a time, not just a number
    rf"\d{{4}}-\d|\d:\d\d|\d[/.]\d+[/.]\d|\b1\d{{9}}\b|\b(?:{_DAYS}|{_MONTHS})\b.*\d|\d.*\b(?:{_MONTHS})\b",
    re.IGNORECASE,
)
_LEAST_ALIKE = 4  # characters behind a date that have to be the same in both texts


def differ_in_time(common: str, old: str, new: str) -> bool:
    """Return whether two texts differ in a date or a time, and continue with the same text.

    Args:
        common: the text before both: a date may begin in it.
        old: one text, from the difference on.
        new: the other one.
    """
    remainders = []
    for text in (common + old, common + new):
        runs = (run for run in _RUN.finditer(text) if run.start() <= len(common) < run.end())
        run = next(runs, None)
        if run is None or not _TIME.search(run.group()):
            return False
        remainders.append(text[run.end() :])
    least = min(_LEAST_ALIKE, *map(len, remainders))
    return remainders[0][:least] == remainders[1][:least]


def message_index(starts: Sequence[int], token_index: int, num_messages: int) -> int | None:
    """Return the index of the client's message that contains a token of a prompt.

    Args:
        starts: token positions where the prompt's messages begin, ascending; the last is the
            answer's.
        token_index: position of the token.
        num_messages: number of messages the client sent; a template may write one before them.

    Returns:
        None if the template does not write each message as one.
    """
    num_before = len(starts) - 1 - num_messages
    if num_before not in (0, 1):
        return None
    return max(0, sum(start <= token_index for start in starts) - 1 - num_before)
