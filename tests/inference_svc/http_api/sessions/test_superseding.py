"""Which sessions others take the place of: those that were left, and that nobody named."""

from dataclasses import replace

import pytest

from inference_svc.core.misses import Resembled
from inference_svc.core.transcript_format import Header, Transcript
from inference_svc.core.turn_record import TurnRecord, Usage
from inference_svc.http_api.sessions.lookup import Route
from inference_svc.http_api.sessions.superseding import supersedes
from tests.inference_svc.http_api.sessions.test_routing import turn

RESEMBLED = Resembled("old", 2, was_known=True)
ROUTE = Route("new", 0, 0, b"history", resembles=RESEMBLED)


def session(num_turns=2, *, is_ended=False):
    """A session of some turns."""
    made = Transcript(Header("acme", "model", "old"))
    for number in range(num_turns):
        ids = (number,)
        record = TurnRecord(
            number, f"r-{number}", "d", ids, ids, ("x",), (), (), 1, "stop", Usage(), 1.0
        )
        made = made.with_turn(record, is_final=is_ended and number == num_turns - 1)
    return made


def test_the_session_that_was_left_where_the_other_begins():
    """An edit, a compaction, or what a model thought left out: its newest answer is there."""
    assert supersedes(turn(), ROUTE, RESEMBLED, session())


@pytest.mark.parametrize("num_turns", [1, 3])
def test_a_session_that_has_gone_on_is_a_branch_of_its_own(num_turns):
    """Somebody went back to an earlier answer; or the turn of another client came in between."""
    assert not supersedes(turn(), ROUTE, RESEMBLED, session(num_turns))


def test_a_session_that_a_client_named_is_one_that_it_comes_back_to():
    named = replace(RESEMBLED, is_named=True)
    assert not supersedes(turn(), ROUTE, named, session())


def test_a_sub_agent_takes_nobodys_place():
    """Its agent goes on beside it."""
    assert not supersedes(turn(is_subagent=True), ROUTE, RESEMBLED, session())


def test_a_conversation_that_goes_on_in_its_session_supersedes_nothing():
    """Nor is anything to be said of one that has ended."""
    assert not supersedes(turn(), replace(ROUTE, session_id="old"), RESEMBLED, session())
    assert not supersedes(turn(), ROUTE, RESEMBLED, session(is_ended=True))
