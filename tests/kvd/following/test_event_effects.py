"""The effect of each event: a push, a drop, a fetch, or nothing."""

import pytest

from kvd.core.records import actions
from kvd.following.agenda import Agenda
from kvd.following.event_effects import EVENTS, apply_deletion, apply_event
from kvd.following.steps import Drop, Push
from kvd.following.wanted import Wanted
from kvd.session_files.target import unfinished_name
from shared.pb.kvd.v1 import kvd_pb2 as pb
from tests.kvd.following.sessions import A
from tests.synthetic_engine import key_of


def event_of(name, key=A, **fields):
    named = pb.SessionKey(tenant=key.tenant, model=key.model, session_id=key.session_id)
    return pb.Event(unix_s=5.0, name=name, session=named, fields=fields)


def work_after(*events, writes="all"):
    """Return the next work after these events."""
    agenda, wanted = Agenda(), Wanted()
    agenda.reconfigure(writes, 0.0)
    for event in events:
        apply_event(event, agenda, wanted, 0.0)
    return agenda.next(1e9), wanted.next(0.0)


STORED = event_of(actions.SESSION_STORED, num_tokens="4")
DROPPED = event_of(actions.SESSION_FLUSHED, why="flush")
NEAR = event_of(actions.SESSION_NEAR_EVICTION, num_tokens="4", superseded="0")


@pytest.mark.parametrize(
    ("events", "step"),
    [
        ([STORED], Push(A)),
        ([event_of(actions.SESSION_DISCARDED, num_tokens="4")], Push(A)),
        ([event_of(actions.SESSION_GRAFTED)], Push(A)),
        ([event_of(actions.SESSION_CUT, num_tokens="2", why="evicted")], None),
        ([STORED, event_of(actions.SESSION_CUT, num_tokens="2")], Push(A)),
        ([STORED, event_of(actions.SESSION_SUPERSEDED)], Push(A)),
        ([STORED, event_of(actions.SESSION_DROPPED, why="evicted")], None),
        ([STORED, event_of(actions.SESSION_EXPIRED, why="ttl")], None),
        ([STORED, DROPPED], Drop(A, 5.0, of_others=False)),
        ([event_of(actions.SESSION_FLUSHED, why="erased")], Drop(A, 5.0, of_others=False)),
        ([event_of(actions.SESSION_ENDED)], Drop(A, 5.0, of_others=True)),
        ([DROPPED, STORED], Push(A)),
        ([STORED, event_of(actions.SESSION_FLUSHED, why="replaced")], None),
        ([event_of(actions.SESSION_FLUSHED, why="imported")], None),
    ],
)
def test_effects_of_new_events(events, step):
    """Only sessions that a user or operator dropped are removed from the store."""
    assert work_after(*events) == (step, None)


@pytest.mark.parametrize(
    ("events", "step"),
    [
        ([STORED], None),
        ([STORED, NEAR], Push(A)),
        ([NEAR, STORED], None),
        ([NEAR, event_of(actions.SESSION_DISCARDED, num_tokens="4")], None),
        ([NEAR, event_of(actions.SESSION_CUT, num_tokens="2", why="evicted")], Push(A)),
        ([NEAR, event_of(actions.SESSION_DROPPED, why="evicted")], None),
        ([NEAR, event_of(actions.SESSION_EXPIRED, why="ttl")], None),
        ([NEAR, event_of(actions.SESSION_ENDED)], Drop(A, 5.0, of_others=True)),
    ],
)
def test_effects_of_events_with_pushes_near_eviction(events, step):
    """A session that is stored again is not near eviction any more."""
    assert work_after(*events, writes="evicted") == (step, None)


@pytest.mark.parametrize(
    ("superseded", "events", "num_evicted"),
    [
        ("0", [event_of(actions.SESSION_DROPPED, why="evicted")], 1),
        ("0", [event_of(actions.SESSION_CUT, num_tokens="2", why="evicted")] * 2, 1),
        ("0", [event_of(actions.SESSION_CUT, num_tokens="2", why="corrupt")], 0),
        ("0", [event_of(actions.SESSION_EXPIRED, why="ttl")], 0),
        ("1", [event_of(actions.SESSION_DROPPED, why="evicted")], 0),
    ],
)
def test_unpushed_evictions_are_counted(superseded, events, num_evicted):
    """Once, and only if something is lost."""
    agenda = Agenda()
    agenda.reconfigure("evicted", 0.0)
    near = event_of(actions.SESSION_NEAR_EVICTION, num_tokens="4", superseded=superseded)
    for event in (near, *events):
        apply_event(event, agenda, Wanted(), 0.0)
    assert agenda.num_evicted == num_evicted


def test_a_wanted_session_is_fetched():
    """It is not pushed."""
    assert work_after(event_of(actions.SESSION_WANTED, num_tokens="9")) == (None, A)


def test_a_session_being_imported_is_ignored():
    """It gets its own name when it is complete."""
    unfinished = key_of(unfinished_name())
    for name in EVENTS:
        assert work_after(event_of(name, unfinished, num_tokens="1", why="flush")) == (None, None)


@pytest.mark.parametrize(
    ("events", "step"),
    [
        ([STORED], None),
        ([DROPPED], Drop(A, 5.0, of_others=False)),
        ([DROPPED, STORED], None),
        ([STORED, event_of(actions.SESSION_ENDED)], Drop(A, 5.0, of_others=True)),
        ([event_of(actions.SESSION_DROPPED, why="evicted")], None),
    ],
)
def test_of_past_events_only_deletions_have_an_effect(events, step):
    """A listing shows all other changes."""
    agenda = Agenda()
    agenda.reconfigure("all", 0.0)
    for event in events:
        apply_deletion(event, agenda)
    assert agenda.next(1e9) == step
