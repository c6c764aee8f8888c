"""Who waits for a session that is not stored, or not all of it, has it asked for; not too often."""

from math import inf

import pytest

from kvd.core.operations.growing import PACE_NS, Growth
from kvd.core.operations.wanting import ANSWER_NS, ASK_AGAIN_NS, MOST_PER_S, REST_NS
from kvd.core.records.actions import SESSION_WANTED, Emit, FetchEnded
from shared.types.lineage import WHOLE
from shared.types.queue_delta import QueueChange, QueuedRequest
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

RESULTS = ("fetched", "absent", "unanswered", "late", "partly")


def wanted(world, *requests, replaces=False):
    """Report requests that wait, as (key, history); returns the sessions asked for and lengths."""
    waiting = [QueuedRequest((0, 0.0, number), key, tokens) for number, (key, tokens) in requests]
    world.pump()
    world.events.clear()
    engines = world.engine.engines
    take = engines.replace_queue if replaces else engines.change_queue
    take(ENGINE_ID, QueueChange(waiting))
    world.pump()
    found = [e for e in world.events if isinstance(e, Emit) and e.name == SESSION_WANTED]
    return [(event.key, event.fields["num_tokens"]) for event in found]


@pytest.mark.parametrize("replaces", [True, False])
def test_what_waits_and_is_not_stored_is_asked_for(replaces):
    """What is known to have a history first; not what is here."""
    world = new_world(wants_sessions=True)
    store(world, A, ONES)
    other, first = B._replace(session_id="other"), B._replace(session_id="first")
    requests = [(1, (A, 4)), (2, (first, 0)), (3, (B, 40)), (4, (other, 9))]
    assert wanted(world, *requests, replaces=replaces) == [
        *((B, "40"), (other, "9"), (first, "0")),
    ]
    assert counter(world, "sessions_wanted") == 3


def test_nobody_asks_where_nobody_answers():
    """As the limits say; a reload lets it begin."""
    world = new_world()
    assert wanted(world, (1, (B, 4))) == []
    world.engine.set_limits(new_world(wants_sessions=True).engine._state.limits)
    assert wanted(world, (2, (B, 4))) == [(B, "4")]


def test_a_session_is_asked_for_again_after_a_while():
    """Not with each change of its turn's place."""
    world = new_world(wants_sessions=True)
    assert wanted(world, (1, (B, 4))) == [(B, "4")]
    assert wanted(world, (1, (B, 4))) == []
    world.now_ns += ASK_AGAIN_NS
    world.engine.advance(world.now_ns)
    assert wanted(world, (1, (B, 4))) == [(B, "4")]


def test_what_is_remembered_is_bounded(monkeypatch):
    """Who was asked for longest ago is forgotten, and may be asked for again."""
    monkeypatch.setattr("kvd.core.operations.wanting.MOST_REMEMBERED", 1)
    world = new_world(wants_sessions=True)
    assert wanted(world, (1, (A, 4)), (2, (B, 4))) == [(A, "4"), (B, "4")]
    assert wanted(world, (1, (A, 4)), (2, (B, 4))) == [(A, "4"), (B, "4")]


def test_a_flood_is_bounded():
    """So many a second; the others are asked for when they are reported again."""
    world = new_world(wants_sessions=True)
    keys = [B._replace(session_id=str(number)) for number in range(MOST_PER_S + 5)]
    requests = [(number, (key, 4)) for number, key in enumerate(keys)]
    assert len(wanted(world, *requests)) == MOST_PER_S
    world.now_ns += NS_PER_S
    world.engine.advance(world.now_ns)
    assert [key for key, _ in wanted(world, *requests)] == keys[MOST_PER_S:]


@pytest.mark.parametrize(
    ("history", "is_wanted"), [(8, False), (11, False), (12, True), (64, True), (0, False)]
)
def test_what_is_stored_in_part_is_asked_for(history, is_wanted):
    """If a block or more of the history is missing."""
    world = new_world(wants_sessions=True)
    store(world, A, ONES + TWOS)
    later(world, REST_NS)
    assert wanted(world, (1, (A, history))) == ([(A, str(history))] if is_wanted else [])
    if is_wanted:
        (event,) = (e for e in world.events if isinstance(e, Emit))
        assert event.fields == {"num_tokens": str(history), "stored_tokens": "8"}


@pytest.mark.parametrize(("history", "is_wanted"), [(91, False), (92, True)])
def test_a_small_part_is_not_worth_fetching_all(history, is_wanted):
    """What is missing is computed, unless it is an eighth of the history."""
    world = new_world(num_slots=64, wants_sessions=True)
    store(world, A, [1] * 80)
    later(world, REST_NS)
    assert bool(wanted(world, (1, (A, history)))) == is_wanted


def test_what_is_being_stored_is_not_asked_for():
    """Neither by the queue, which hears of the next turn while this one's end is stored, nor by
    a load: what is missing is on its way."""
    world = answering_world()
    store(world, B, ONES)
    assert wanted(world, (1, (B, 12))) == [], "it was in use just now"
    later(world, REST_NS)
    answer = prepare_store(world, B, ONES + TWOS)
    later(world, REST_NS)
    assert wanted(world, (2, (B, 12))) == []
    assert not is_awaited(world, B, 12)
    complete_store(world, answer)
    assert wanted(world, (2, (B, 8))) == []
    later(world, REST_NS)
    assert wanted(world, (2, (B, 12))) == [(B, "12")]


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
    """Let time pass; returns what is due."""
    world.events.clear()
    world.now_ns += ns
    world.engine.advance(world.now_ns)
    world.engine.expire()
    world.pump()


def ended(world, key=B, history=4):
    """End a load's wait; returns what it counts as, and how often others are told."""
    before = {name: counter(world, f"fetch_waits_{name}") for name in RESULTS}
    world.events.clear()
    world.engine.wanting.wait_ended(key, history, world.now_ns)
    world.pump()
    [result] = [n for n in RESULTS if counter(world, f"fetch_waits_{n}") > before[n]]
    return result


def num_told(world):
    """How often loads that wait are told to ask again."""
    return world.events.count(FetchEnded())


def answering_world():
    """Somebody fetches sessions here: another one was not there."""
    world = new_world(wants_sessions=True)
    wanted(world, (1, (A, 4)))
    answer(world, A, coming=False)
    return world


def test_nobody_waits_until_somebody_answers():
    """What was asked for before is waited for then, too, if it comes."""
    world = new_world(wants_sessions=True)
    assert wanted(world, (1, (B, 4))) == [(B, "4")]
    assert not is_awaited(world)
    answer(world, coming=True)
    assert is_awaited(world)


def test_a_load_asks_for_what_nobody_has_asked_for():
    """The queue's report may come later; it does not ask again then."""
    world = answering_world()
    world.events.clear()
    assert is_awaited(world)
    assert [e.key for e in world.events if isinstance(e, Emit)] == [B]
    assert wanted(world, (2, (B, 4))) == []
    assert num_told(world) == 0


def test_a_load_waits_until_its_session_is_stored():
    """And is told; afterwards there is nothing to wait for."""
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
    assert ended(world) == "fetched"
    world.engine.sessions.flush(B, dry_run=False)
    world.events.clear()
    assert is_awaited(world), "it is asked for anew"
    assert [e.key for e in world.events if isinstance(e, Emit) and e.name == SESSION_WANTED] == [B]


def test_a_load_waits_for_the_rest_of_its_session():
    """Until all of the history is stored; when it has lost its end it is asked for anew."""
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
    assert ended(world, B, 8) == "fetched"
    world.engine._state.cut(world.engine._state.sessions[B], 1, "evicted")
    world.events.clear()
    assert is_awaited(world, B, 8)
    assert [e.key for e in world.events if isinstance(e, Emit) and e.name == SESSION_WANTED] == [B]


def test_what_comes_and_is_not_all_is_waited_for_no_longer():
    """There is no more of it there either: the load goes on, and it is not asked for at once."""
    world = answering_world()
    store(world, B, ONES)
    assert is_awaited(world, B, 16)
    answer(world, coming=True)
    world.events.clear()
    store(world, B, ONES + TWOS)
    assert num_told(world) == 1
    assert not is_awaited(world, B, 16)
    assert ended(world, B, 16) == "fetched"
    answer(world, coming=True)
    world.engine.sessions.flush(B, dry_run=False)
    assert not is_awaited(world, B, 16), "who has fetched it does not answer again"
    later(world, ASK_AGAIN_NS)
    assert is_awaited(world, B, 16)


def test_what_is_not_longer_there_is_not_waited_for_again():
    """Less than the history is stored on purpose, or of it no more is anywhere."""
    world = answering_world()
    store(world, B, ONES)
    assert is_awaited(world, B, 8)
    answer(world, coming=False)
    assert not is_awaited(world, B, 8)
    assert ended(world, B, 8) == "absent"
    later(world, ASK_AGAIN_NS - 1)
    assert not is_awaited(world, B, 8)


def test_what_was_nowhere_is_asked_for_when_it_was_here_and_has_gone_on():
    """It began here, where it was looked for in vain; then it went away, and comes back longer."""
    world = answering_world()
    assert is_awaited(world, B, 0)
    answer(world, coming=False)
    assert ended(world, B, 0) == "absent"
    store(world, B, ONES)
    assert is_awaited(world, B, 8)
    answer(world, coming=False)
    assert ended(world, B, 8) == "absent"
    assert not is_awaited(world, B, 8), "nothing has changed since"


def test_what_has_come_is_asked_for_when_it_has_gone_on_elsewhere():
    """Conversations that go to and fro come back in seconds, longer each time."""
    world = answering_world()
    assert wanted(world, (1, (B, 8))) == [(B, "8")]
    answer(world, coming=True)
    store(world, B, ONES + TWOS)  # before a load waits for it; then its turn is stored
    later(world, REST_NS)
    assert wanted(world, (2, (B, 16))) == [(B, "16")]
    answer(world, coming=True)
    assert is_awaited(world, B, 16)
    assert wanted(world, (3, (B, 20))) == [], "nothing has come since"


def test_a_load_waits_as_long_as_what_is_missing_is_worth():
    """Of the time for all of its tokens the part that a fetch may bring."""
    world = answering_world()
    share = world.engine.wanting.missing_share
    assert share(B, 16, 0) == share(B, 16, 8) == 1
    store(world, B, ONES)
    assert (share(B, 16, 0), share(B, 16, 7)) == (0, 0)
    assert (share(B, 16, 8), share(B, 16, 12)) == (4 / 16, 8 / 16)


SOURCE = B._replace(session_id="import")
TOKENS = ONES + TWOS + THREES


class Coming:
    """An import of session B, which a load waits for: it has what has come."""

    def __init__(self, world, there=0):
        self.world, self.growth = world, Growth(B, SOURCE, WHOLE, there)

    def comes(self, num_tokens):
        """Returns how often who waits was told."""
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
def test_what_grows_is_waited_for_until_the_history_is_there(there):
    """Each step is told; the turn needs no more than its history, and does not wait for the end."""
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
    assert ended(world, B, 10) == "fetched"


def test_what_grows_is_waited_for_to_its_end():
    """Though that is less than the history: no more is there."""
    world = answering_world()
    assert is_awaited(world, B, 20)
    answer(world, coming=True)
    coming = Coming(world)
    coming.comes(4)
    coming.comes(8)
    assert is_awaited(world, B, 20)
    assert coming.end(is_whole=True) == 1
    assert not is_awaited(world, B, 20)
    assert ended(world, B, 20) == "fetched"


@pytest.mark.parametrize("told_first", [True, False])
def test_what_grows_and_ends_early_has_come_in_part(told_first):
    """Whether kvd or whoever fetches says so first; it is not asked for again at once."""
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
    assert ended(world, B, 12) == "partly"
    coming.end()
    answer(world, coming=False)
    assert not is_awaited(world, B, 12)
    later(world, ASK_AGAIN_NS)
    assert is_awaited(world, B, 12)


def test_when_time_is_up_what_has_come_has_come():
    """The turn computes the rest, and waits no more; it may come for others all the same."""
    world = answering_world()
    assert is_awaited(world, B, 12)
    answer(world, coming=True)
    coming = Coming(world)
    coming.comes(4)
    assert ended(world, B, 12) == "partly"
    assert not is_awaited(world, B, 12)
    answer(world, coming=True)
    assert not is_awaited(world, B, 12)


def test_what_comes_more_slowly_than_it_is_computed_is_not_waited_for():
    """By the pace since the first of it has come, once that says anything."""
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
    assert ended(world, B, 40) == "partly"


def test_what_grows_is_not_asked_for_again():
    """However long it takes; one that waits for more of it than the first did asks once."""
    world = answering_world()
    assert is_awaited(world, B, 4)
    answer(world, coming=True)
    coming = Coming(world)
    coming.comes(4)
    later(world, 2 * ASK_AGAIN_NS)
    assert wanted(world, (1, (B, 12))) == []
    assert not is_awaited(world, B, 4)
    assert ended(world, B, 4) == "fetched"
    world.events.clear()
    for _ in range(2):
        assert is_awaited(world, B, 12)
    assert [e.key for e in world.events if isinstance(e, Emit) and e.name == SESSION_WANTED] == [B]
    answer(world, coming=True)
    assert is_awaited(world, B, 12)


@pytest.mark.parametrize("is_coming", [True, False])
def test_what_does_not_come_is_not_waited_for_again(is_coming):
    """Within ASK_AGAIN_NS, be it that it was said to come before."""
    world = answering_world()
    assert is_awaited(world)
    if is_coming:
        answer(world, coming=True)
    answer(world, coming=False)
    assert num_told(world) == 1
    assert not is_awaited(world)
    assert ended(world) == "absent"
    later(world, ASK_AGAIN_NS - 1)
    assert not is_awaited(world)
    later(world, 1)
    assert is_awaited(world)


def test_who_does_not_answer_is_not_waited_for():
    """One ask without an answer ends its wait, and that for others, until somebody answers."""
    world = answering_world()
    later(world, 1)
    assert is_awaited(world)
    later(world, ANSWER_NS - 1)
    assert is_awaited(world, C)
    assert world.engine.next_deadline_ns() == world.now_ns + 1
    later(world, 1)
    assert num_told(world) == 2
    assert (is_awaited(world), is_awaited(world, C)) == (False, False)
    assert (ended(world), ended(world, C)) == ("unanswered", "unanswered")
    assert not is_awaited(world, B._replace(session_id="other"))
    answer(world, A, coming=False)
    assert (is_awaited(world), is_awaited(world, C)) == (False, True)
    answer(world, B, coming=True)  # late, but it comes
    assert is_awaited(world)


def test_one_look_that_takes_long_ends_no_other_wait():
    """Somebody answers: others were answered since it was asked for."""
    world = answering_world()
    assert is_awaited(world)
    later(world, 1)
    assert is_awaited(world, C)
    answer(world, C, coming=True)
    later(world, ANSWER_NS - 1)
    assert num_told(world) == 1
    assert (is_awaited(world), is_awaited(world, C)) == (False, True)
    assert ended(world) == "unanswered"


def test_what_came_too_late_is_not_waited_for_again():
    """The turn has computed it; an answer to that ask changes nothing."""
    world = answering_world()
    assert is_awaited(world)
    assert ended(world) == "late"
    assert num_told(world) == 1
    answer(world, coming=True)
    assert not is_awaited(world)


def test_nobody_waits_where_nothing_is_asked_for():
    """The settings may say so while it runs; what is stored is not waited for either."""
    world = answering_world()
    assert is_awaited(world)
    world.engine.set_limits(new_world().engine._state.limits)
    assert not is_awaited(world)
    assert not is_awaited(world, C)
    world = answering_world()
    store(world, B, ONES)
    assert not is_awaited(world)


def test_who_is_forgotten_is_not_waited_for(monkeypatch):
    """An answer may name a session that nobody asked for: somebody answers, that is all."""
    monkeypatch.setattr("kvd.core.operations.wanting.MOST_REMEMBERED", 1)
    world = new_world(wants_sessions=True)
    answer(world, C, coming=True)
    assert is_awaited(world, A)
    world.events.clear()
    assert is_awaited(world, B)
    assert num_told(world) == 1
    assert ended(world, A) == "unanswered"
    later(world, ANSWER_NS)
    assert not is_awaited(world, B)


def test_a_flood_is_not_waited_for():
    """What is not asked for cannot come."""
    world = answering_world()
    requests = [(n, (B._replace(session_id=str(n)), 4)) for n in range(MOST_PER_S)]
    wanted(world, *requests)
    assert not is_awaited(world, C)
    assert ended(world, C) == "unanswered"
    assert world.engine.inspection.histograms.fetch_wait_s.total.count == 1
