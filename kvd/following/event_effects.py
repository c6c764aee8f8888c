"""Effects of kvd's events on the follower's agenda and wanted sessions. Pure."""

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
# Reasons of flushes that also remove the session from the store; others only free this server.
DELIBERATE = frozenset({FLUSH, ERASED})


def apply_event(event: pb.Event, agenda: Agenda, wanted: Wanted, now_s: float) -> None:
    """Update the agenda and the wanted sessions after an event that has just happened."""
    key, reported = key_of(event.session), event.fields.get("num_tokens")
    num_tokens = None if reported is None else int(reported)
    if is_unfinished(key.session_id):
        return
    evicted = event.fields.get("why") == actions.EVICTED
    match event.name:
        case actions.SESSION_STORED:
            agenda.on_stored(key, now_s, num_tokens)
        case actions.SESSION_DISCARDED | actions.SESSION_GRAFTED:
            agenda.on_stored(key, now_s)
        case actions.SESSION_CUT:
            agenda.on_cut(key, num_tokens or 0, evicted=evicted)
        case actions.SESSION_DROPPED | actions.SESSION_EXPIRED:
            agenda.on_gone(key, evicted=evicted)
        case actions.SESSION_NEAR_EVICTION:
            is_superseded = event.fields.get("superseded") == "1"
            agenda.on_near_eviction(key, now_s, num_tokens or 0, is_superseded=is_superseded)
        case actions.SESSION_SUPERSEDED:
            agenda.on_superseded(key)
        case actions.SESSION_WANTED:
            wanted.add(key, now_s)
        case _:
            apply_deletion(event, agenda)


def apply_deletion(event: pb.Event, agenda: Agenda) -> None:
    """Update the agenda after an event, as far as a listing of sessions would not show it.

    That is: whether a session was deleted deliberately. Past events that the follower missed are
    applied this way, oldest first; a listing then shows the rest.
    """
    key = key_of(event.session)
    if is_unfinished(key.session_id):
        return
    match event.name:
        case actions.SESSION_STORED:
            agenda.cancel_drop(key)
        case actions.SESSION_ENDED:
            agenda.on_deleted(key, event.unix_s, of_others=True)
        case actions.SESSION_FLUSHED if event.fields.get("why") in DELIBERATE:
            agenda.on_deleted(key, event.unix_s, of_others=False)
        case actions.SESSION_FLUSHED:
            agenda.on_gone(key)
