"""Waiting turns and loads request missing sessions from elsewhere, at a bounded rate."""

from math import inf

import pytest

from kvd.core.operations.growing import PACE_NS, Growth
from kvd.core.operations.wanting import ANSWER_NS, ASK_AGAIN_NS, MOST_PER_S, REST_NS
from kvd.core.records.actions import SESSION_WANTED, Emit, FetchEnded
from shared.types.lineage import WHOLE
from shared.types.queue_delta import QueuedRequest
from shared.types.units import NS_PER_S
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    THREES,
    TWOS,
    A,
    B,
    C,
    complete_store,
    counter,
    new_world,
    prepare_store,
    store,
)
from tests.property.cache_world import to_bytes
from tests.queue_changes import queue_change

RESULTS = ("fetched", "absent", "unanswered", "late", "partly")


def report_waiting(world, *requests, replaces=False):
    """Report waiting requests as (key, history); return the requested sessions with lengths."""
    waiting = [QueuedRequest((0, 0.0, number), key, tokens) for number, (key, tokens) in requests]
    world.pump()
    world.events.clear()
    engines = world.engine.engines
    take = engines.replace_queue if replaces else engines.change_queue
    take(ENGINE_ID, queue_change(waiting))
    world.pump()
    found = [e for e in world.events if isinstance(e, Emit) and e.name == SESSION_WANTED]
    return [(event.key, event.fields["num_tokens"]) for event in found]


@pytest.mark.parametrize("replaces", [True, False])
def test_a_session_that_waits_and_is_not_stored_is_requested(replaces):
    """Those with a known history first; not those that are stored."""
    world = new_world(wants_sessions=True)
    store(world, A, ONES)
    other, first = B._replace(session_id="other"), B._replace(session_id="first")
    requests = [(1, (A, 4)), (2, (first, 0)), (3, (B, 40)), (4, (other, 9))]
    assert report_waiting(world, *requests, replaces=replaces) == [
        *((B, "40"), (other, "9"), (first, "0")),
    ]
    assert counter(world, "sessions_wanted") == 3


def test_requests_can_be_switched_off():
    """The limits say so; a reload switches them on."""
    world = new_world()
    assert report_waiting(world, (1, (B, 4))) == []
    world.engine.set_limits(new_world(wants_sessions=True).engine._state.limits)
    assert report_waiting(world, (2, (B, 4))) == [(B, "4")]


def test_a_session_is_requested_again_after_a_while():
    """Not with each change of its turn's place."""
    world = new_world(wants_sessions=True)
    assert report_waiting(world, (1, (B, 4))) == [(B, "4")]
    assert report_waiting(world, (1, (B, 4))) == []
    world.now_ns += ASK_AGAIN_NS
    world.engine.advance(world.now_ns)
    assert report_waiting(world, (1, (B, 4))) == [(B, "4")]


def test_the_record_of_requests_is_bounded(monkeypatch):
    """The oldest request is forgotten, and may be repeated."""
    monkeypatch.setattr("kvd.core.operations.wanting.MOST_REMEMBERED", 1)
    world = new_world(wants_sessions=True)
    assert report_waiting(world, (1, (A, 4)), (2, (B, 4))) == [(A, "4"), (B, "4")]
    assert report_waiting(world, (1, (A, 4)), (2, (B, 4))) == [(A, "4"), (B, "4")]


def test_the_rate_of_requests_is_bounded():
    """The others are requested when they are reported again."""
    world = new_world(wants_sessions=True)
    keys = [B._replace(session_id=str(number)) for number in range(MOST_PER_S + 5)]
    requests = [(number, (key, 4)) for number, key in enumerate(keys)]
    assert len(report_waiting(world, *requests)) == MOST_PER_S
    world.now_ns += NS_PER_S
    world.engine.advance(world.now_ns)
    assert [key for key, _ in report_waiting(world, *requests)] == keys[MOST_PER_S:]


@pytest.mark.parametrize(
    ("history", "is_wanted"), [(8, False), (11, False), (12, True), (64, True), (0, False)]
)
def test_a_partly_stored_session_is_requested(history, is_wanted):
    """If a block or more of the history is missing."""
    world = new_world(wants_sessions=True)
    store(world, A, ONES + TWOS)
    later(world, REST_NS)
    assert report_waiting(world, (1, (A, history))) == ([(A, str(history))] if is_wanted else [])
    if is_wanted:
        (event,) = (e for e in world.events if isinstance(e, Emit))
        assert event.fields == {"num_tokens": str(history), "stored_tokens": "8"}


@pytest.mark.parametrize(("history", "is_wanted"), [(91, False), (92, True)])
def test_a_small_missing_part_is_not_requested(history, is_wanted):
    """It is computed, unless it is an eighth of the history."""
    world = new_world(num_slots=64, wants_sessions=True)
    store(world, A, [1] * 80)
    later(world, REST_NS)
    assert bool(report_waiting(world, (1, (A, history)))) == is_wanted


def test_a_session_that_is_being_stored_is_not_requested():
    """The missing part is on its way.

    Neither by the queue, which reports the next turn while this one's end is stored, nor by a load.
    """
    world = answering_world()
    store(world, B, ONES)
    assert report_waiting(world, (1, (B, 12))) == [], "it was in use just now"
    later(world, REST_NS)
    answer = prepare_store(world, B, ONES + TWOS)
    later(world, REST_NS)
    assert report_waiting(world, (2, (B, 12))) == []
    assert not is_awaited(world, B, 12)
    complete_store(world, answer)
    assert report_waiting(world, (2, (B, 8))) == []
    later(world, REST_NS)
    assert report_waiting(world, (2, (B, 12))) == [(B, "12")]


# ------------------------------------------------------------------------------------------ waits


def is_awaited(world, key=B, history=4, token_ns=inf):
    found = world.engine.wanting.is_awaited(key, history, token_ns)
    world.pump()
    return found


def answer(world, key=B, *, coming):
    world.events.clear()
    world.engine.wanting.on_answer(key, is_coming=coming)
    world.pump()


def later(world, ns):
    """Let time pass; return the actions that are due."""
    world.events.clear()
    world.now_ns += ns
    world.engine.advance(world.now_ns)
    world.engine.expire()
    world.pump()


def end_wait(world, key=B, history=4):
    """End a load's wait; return the counted result, and how often other loads are notified."""
    before = {name: counter(world, f"fetch_waits_{name}") for name in RESULTS}
    world.events.clear()
    world.engine.wanting.wait_ended(key, history, world.now_ns)
    world.pump()
    [result] = [n for n in RESULTS if counter(world, f"fetch_waits_{n}") > before[n]]
    return result


def num_told(world):
    """Return how often waiting loads are notified to ask again."""
    return world.events.count(FetchEnded())


def answering_world():
    """Make a world with a follower that answers: it has reported another session as missing."""
    world = new_world(wants_sessions=True)
    report_waiting(world, (1, (A, 4)))
    answer(world, A, coming=False)
    return world


def test_no_load_waits_before_a_follower_has_answered():
    """Then it waits for earlier requests too, if they come."""
    world = new_world(wants_sessions=True)
    assert report_waiting(world, (1, (B, 4))) == [(B, "4")]
    assert not is_awaited(world)
    answer(world, coming=True)
    assert is_awaited(world)


def test_a_load_requests_its_session_itself():
    """The queue's report may come later; it does not repeat the request."""
    world = answering_world()
    world.events.clear()
    assert is_awaited(world)
    assert [e.key for e in world.events if isinstance(e, Emit)] == [B]
    assert report_waiting(world, (2, (B, 4))) == []
    assert num_told(world) == 0


def test_a_load_waits_until_its_session_is_stored():
    """It is notified; afterwards there is nothing to wait for."""
    world = answering_world()
    assert is_awaited(world)
    answer(world, coming=True)
    later(world, ANSWER_NS)
    assert num_told(world) == 0
    assert is_awaited(world)
    world.events.clear()
    store(world, B, ONES)
    assert num_told(world) == 1
    assert not is_awaited(world)
    assert end_wait(world) == "fetched"
    world.engine.sessions.flush(B, dry_run=False)
    world.events.clear()
    assert is_awaited(world), "it is asked for anew"
    assert [e.key for e in world.events if isinstance(e, Emit) and e.name == SESSION_WANTED] == [B]


def test_a_load_waits_for_the_rest_of_its_session():
    """Until all of the history is stored; when the session loses its end it is requested again."""
    world = answering_world()
    store(world, B, ONES)
    assert not is_awaited(world, B, 7)
    assert is_awaited(world, B, 8)
    answer(world, coming=True)
    assert is_awaited(world, B, 8)
    world.events.clear()
    store(world, B, ONES + TWOS)
    assert num_told(world) == 1
    assert not is_awaited(world, B, 8)
    assert end_wait(world, B, 8) == "fetched"
    world.engine._state.cut(world.engine._state.sessions[B], 1, "evicted")
    world.events.clear()
    assert is_awaited(world, B, 8)
    assert [e.key for e in world.events if isinstance(e, Emit) and e.name == SESSION_WANTED] == [B]


def test_an_incomplete_arrival_ends_the_wait():
    """There is no more of it elsewhere: the load continues, and it is not requested at once."""
    world = answering_world()
    store(world, B, ONES)
    assert is_awaited(world, B, 16)
    answer(world, coming=True)
    world.events.clear()
    store(world, B, ONES + TWOS)
    assert num_told(world) == 1
    assert not is_awaited(world, B, 16)
    assert end_wait(world, B, 16) == "fetched"
    answer(world, coming=True)
    world.engine.sessions.flush(B, dry_run=False)
    assert not is_awaited(world, B, 16), "who has fetched it does not answer again"
    later(world, ASK_AGAIN_NS)
    assert is_awaited(world, B, 16)


def test_a_session_that_is_not_longer_elsewhere_is_not_waited_for_again():
    """Less than the history is stored on purpose, or no more of it exists."""
    world = answering_world()
    store(world, B, ONES)
    assert is_awaited(world, B, 8)
    answer(world, coming=False)
    assert not is_awaited(world, B, 8)
    assert end_wait(world, B, 8) == "absent"
    later(world, ASK_AGAIN_NS - 1)
    assert not is_awaited(world, B, 8)


def test_a_session_that_continued_here_is_requested_after_it_left():
    """It began here and was searched in vain; then it moved away, and comes back longer."""
    world = answering_world()
    assert is_awaited(world, B, 0)
    answer(world, coming=False)
    assert end_wait(world, B, 0) == "absent"
    store(world, B, ONES)
    assert is_awaited(world, B, 8)
    answer(world, coming=False)
    assert end_wait(world, B, 8) == "absent"
    assert not is_awaited(world, B, 8), "nothing has changed since"


def test_a_session_that_continued_elsewhere_is_requested_again():
    """Conversations that move to and fro come back in seconds, longer each time."""
    world = answering_world()
    assert report_waiting(world, (1, (B, 8))) == [(B, "8")]
    answer(world, coming=True)
    store(world, B, ONES + TWOS)  # before a load waits for it; then its turn is stored
    later(world, REST_NS)
    assert report_waiting(world, (2, (B, 16))) == [(B, "16")]
    answer(world, coming=True)
    assert is_awaited(world, B, 16)
    assert report_waiting(world, (3, (B, 20))) == [], "nothing has come since"


def test_a_load_waits_no_longer_than_the_missing_part_is_worth():
    """Out of the time for all of its tokens, the part that a fetch may save."""
    world = answering_world()
    share = world.engine.wanting.missing_share
    assert share(B, 16, 0) == share(B, 16, 8) == 1
    store(world, B, ONES)
    assert (share(B, 16, 0), share(B, 16, 7)) == (0, 0)
    assert (share(B, 16, 8), share(B, 16, 12)) == (4 / 16, 8 / 16)


SOURCE = B._replace(session_id="import")
TOKENS = ONES + TWOS + THREES


class Coming:
    """An import of session B for which a load waits: the session grows with its parts."""

    def __init__(self, world, there=0):
        self.world, self.growth = world, Growth(B, SOURCE, WHOLE, there)

    def comes(self, num_tokens):
        """Let a part arrive; return how often the waiting load was notified."""
        store(self.world, SOURCE, TOKENS[:num_tokens])
        self.world.events.clear()
        assert self.world.engine.growing.grow(self.growth, to_bytes(TOKENS))
        self.world.pump()
        return num_told(self.world)

    def end(self, *, is_whole=False):
        self.world.events.clear()
        self.world.engine.growing.end(self.growth, is_whole=is_whole)
        self.world.pump()
        return num_told(self.world)


@pytest.mark.parametrize("there", [0, 4])
def test_a_growing_session_is_waited_for_until_it_has_the_history(there):
    """Each step notifies the load, which does not wait for tokens beyond its history."""
    world = answering_world()
    if there:
        store(world, B, TOKENS[:there])
    assert is_awaited(world, B, 10)
    answer(world, coming=True)
    coming = Coming(world, there)
    assert coming.comes(there + 4) == 1
    assert (is_awaited(world, B, 10), is_awaited(world, B, 13)) == (there == 0, True)
    assert coming.comes(12) == 1
    assert not is_awaited(world, B, 10)
    assert end_wait(world, B, 10) == "fetched"


def test_a_growing_session_is_waited_for_to_its_end():
    """Though it is shorter than the history: there is no more."""
    world = answering_world()
    assert is_awaited(world, B, 20)
    answer(world, coming=True)
    coming = Coming(world)
    coming.comes(4)
    coming.comes(8)
    assert is_awaited(world, B, 20)
    assert coming.end(is_whole=True) == 1
    assert not is_awaited(world, B, 20)
    assert end_wait(world, B, 20) == "fetched"


@pytest.mark.parametrize("told_first", [True, False])
def test_a_growing_session_that_ends_early_has_arrived_in_part(told_first):
    """Either kvd or the follower reports it first; it is not requested at once."""
    world = answering_world()
    assert is_awaited(world, B, 12)
    answer(world, coming=True)
    coming = Coming(world)
    coming.comes(4)
    assert is_awaited(world, B, 12)
    if told_first:
        answer(world, coming=False)
        assert num_told(world) == 1
    else:
        assert coming.end() == 1
    assert not is_awaited(world, B, 12)
    assert end_wait(world, B, 12) == "partly"
    coming.end()
    answer(world, coming=False)
    assert not is_awaited(world, B, 12)
    later(world, ASK_AGAIN_NS)
    assert is_awaited(world, B, 12)


def test_when_time_is_up_the_arrived_part_counts():
    """The turn computes the rest, and waits no more; the import may go on for others."""
    world = answering_world()
    assert is_awaited(world, B, 12)
    answer(world, coming=True)
    coming = Coming(world)
    coming.comes(4)
    assert end_wait(world, B, 12) == "partly"
    assert not is_awaited(world, B, 12)
    answer(world, coming=True)
    assert not is_awaited(world, B, 12)


def test_an_import_slower_than_computing_is_not_waited_for():
    """By its rate since the first part, once that is meaningful."""
    world = answering_world()
    assert is_awaited(world, B, 40, token_ns=1)
    answer(world, coming=True)
    coming = Coming(world)
    coming.comes(4)
    later(world, PACE_NS)
    assert is_awaited(world, B, 40, token_ns=1), "one step is no pace"
    coming.comes(8)
    assert is_awaited(world, B, 40, token_ns=PACE_NS / 4)
    assert not is_awaited(world, B, 40, token_ns=PACE_NS / 4 - 1)
    assert end_wait(world, B, 40) == "partly"


def test_a_growing_session_is_not_requested_again():
    """However long it takes; a load that needs more than the first one requests it once."""
    world = answering_world()
    assert is_awaited(world, B, 4)
    answer(world, coming=True)
    coming = Coming(world)
    coming.comes(4)
    later(world, 2 * ASK_AGAIN_NS)
    assert report_waiting(world, (1, (B, 12))) == []
    assert not is_awaited(world, B, 4)
    assert end_wait(world, B, 4) == "fetched"
    world.events.clear()
    for _ in range(2):
        assert is_awaited(world, B, 12)
    assert [e.key for e in world.events if isinstance(e, Emit) and e.name == SESSION_WANTED] == [B]
    answer(world, coming=True)
    assert is_awaited(world, B, 12)


@pytest.mark.parametrize("is_coming", [True, False])
def test_a_session_that_does_not_come_is_not_waited_for_again(is_coming):
    """Within ASK_AGAIN_NS, even if it was announced before."""
    world = answering_world()
    assert is_awaited(world)
    if is_coming:
        answer(world, coming=True)
    answer(world, coming=False)
    assert num_told(world) == 1
    assert not is_awaited(world)
    assert end_wait(world) == "absent"
    later(world, ASK_AGAIN_NS - 1)
    assert not is_awaited(world)
    later(world, 1)
    assert is_awaited(world)


def test_an_unanswering_follower_is_not_waited_for():
    """One unanswered request ends all waits until the follower answers."""
    world = answering_world()
    later(world, 1)
    assert is_awaited(world)
    later(world, ANSWER_NS - 1)
    assert is_awaited(world, C)
    assert world.engine.next_deadline_ns() == world.now_ns + 1
    later(world, 1)
    assert num_told(world) == 2
    assert (is_awaited(world), is_awaited(world, C)) == (False, False)
    assert (end_wait(world), end_wait(world, C)) == ("unanswered", "unanswered")
    assert not is_awaited(world, B._replace(session_id="other"))
    answer(world, A, coming=False)
    assert (is_awaited(world), is_awaited(world, C)) == (False, True)
    answer(world, B, coming=True)  # late, but it comes
    assert is_awaited(world)


def test_one_slow_answer_ends_no_other_wait():
    """The follower works: it has answered others since the request."""
    world = answering_world()
    assert is_awaited(world)
    later(world, 1)
    assert is_awaited(world, C)
    answer(world, C, coming=True)
    later(world, ANSWER_NS - 1)
    assert num_told(world) == 1
    assert (is_awaited(world), is_awaited(world, C)) == (False, True)
    assert end_wait(world) == "unanswered"


def test_a_session_that_came_too_late_is_not_waited_for_again():
    """The turn has computed it; an answer to that request changes nothing."""
    world = answering_world()
    assert is_awaited(world)
    assert end_wait(world) == "late"
    assert num_told(world) == 1
    answer(world, coming=True)
    assert not is_awaited(world)


def test_without_requests_no_load_waits():
    """The settings may switch requests off; stored sessions are not waited for either."""
    world = answering_world()
    assert is_awaited(world)
    world.engine.set_limits(new_world().engine._state.limits)
    assert not is_awaited(world)
    assert not is_awaited(world, C)
    world = answering_world()
    store(world, B, ONES)
    assert not is_awaited(world)


def test_a_forgotten_request_is_not_waited_for(monkeypatch):
    """An answer may name a session without a request: it only shows that the follower works."""
    monkeypatch.setattr("kvd.core.operations.wanting.MOST_REMEMBERED", 1)
    world = new_world(wants_sessions=True)
    answer(world, C, coming=True)
    assert is_awaited(world, A)
    world.events.clear()
    assert is_awaited(world, B)
    assert num_told(world) == 1
    assert end_wait(world, A) == "unanswered"
    later(world, ANSWER_NS)
    assert not is_awaited(world, B)


def test_requests_beyond_the_rate_are_not_waited_for():
    """A session that is not requested cannot come."""
    world = answering_world()
    requests = [(n, (B._replace(session_id=str(n)), 4)) for n in range(MOST_PER_S)]
    report_waiting(world, *requests)
    assert not is_awaited(world, C)
    assert end_wait(world, C) == "unanswered"
    assert world.engine.inspection.histograms.fetch_wait_s.total.count == 1
