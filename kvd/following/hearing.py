"""What kvd's events mean for the agenda, and for what is wanted. Pure."""

from kvd.core.operations.erasing import WHY as ERASED
from kvd.core.operations.sessions import FLUSH
from kvd.core.records import actions
from kvd.following.agenda import Agenda
from kvd.following.wanted import Wanted
from kvd.session_files.target import is_unfinished
from kvd.wire.messages import key_of
from shared.pb.kvd.v1 import kvd_pb2 as pb

EVENTS = (
    *(actions.SESSION_STORED, actions.SESSION_CUT, actions.SESSION_DISCARDED),
    *(actions.SESSION_GRAFTED, actions.SESSION_DROPPED, actions.SESSION_EXPIRED),
    *(actions.SESSION_FLUSHED, actions.SESSION_ENDED, actions.SESSION_SUPERSEDED),
    *(actions.SESSION_WANTED, actions.SESSION_NEAR_EVICTION),
)
DELIBERATE = frozenset({FLUSH, ERASED})  # why sessions are flushed that are to go everywhere


def hear(event: pb.Event, agenda: Agenda, wanted: Wanted, now_s: float) -> None:
    """Take an event that has just happened."""
    key, told = key_of(event.session), event.fields.get("num_tokens")
    num_tokens = None if told is None else int(told)
    if is_unfinished(key.session_id):
        return
    evicted = event.fields.get("why") == actions.EVICTED
    match event.name:
        case actions.SESSION_STORED:
            agenda.stored(key, now_s, num_tokens)
        case actions.SESSION_DISCARDED | actions.SESSION_GRAFTED:
            agenda.stored(key, now_s)
        case actions.SESSION_CUT:
            agenda.cut(key, num_tokens or 0, evicted=evicted)
        case actions.SESSION_DROPPED | actions.SESSION_EXPIRED:
            agenda.gone(key, evicted=evicted)
        case actions.SESSION_NEAR_EVICTION:
            is_over = event.fields.get("superseded") == "1"
            agenda.near_eviction(key, now_s, num_tokens or 0, is_over=is_over)
        case actions.SESSION_SUPERSEDED:
            agenda.superseded(key)
        case actions.SESSION_WANTED:
            wanted.add(key, now_s)
        case _:
            hear_deletion(event, agenda)


def hear_deletion(event: pb.Event, agenda: Agenda) -> None:
    """Take of an event only what a listing does not tell: that a session was dropped deliberately.

    Events of the past, which nobody heard of when they happened, are taken so, oldest first.
    """
    key = key_of(event.session)
    if is_unfinished(key.session_id):
        return
    match event.name:
        case actions.SESSION_STORED:
            agenda.lives(key)
        case actions.SESSION_ENDED:
            agenda.deleted(key, event.unix_s, of_others=True)
        case actions.SESSION_FLUSHED if event.fields.get("why") in DELIBERATE:
            agenda.deleted(key, event.unix_s, of_others=False)
        case actions.SESSION_FLUSHED:
            agenda.gone(key)
