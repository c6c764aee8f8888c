"""What is pushed or dropped next, when, and in which order; random histories forget nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.following.agenda import FIRST_PAUSE_S, MOST_QUIETS, Agenda
from kvd.following.steps import Drop, Push
from shared.pb.kvd.v1 import kvd_pb2 as pb
from tests.fuzz.amounts import few
from tests.kvd.following.sessions import A, B, C, info_of

QUIET_S = 10.0


def following(writes="all"):
    agenda = Agenda()
    agenda.reconfigure(writes, QUIET_S)
    return agenda


def do_next_push(agenda, key, now_s, num_tokens=100, **values):
    """Do the next push."""
    step = agenda.next(now_s)
    assert isinstance(step, Push)
    assert step.key == key
    agenda.on_pushed(info_of(key, num_tokens=num_tokens, **values), now_s)
    return step


def test_an_idle_session_is_pushed():
    """Once, some time after it was last stored."""
    agenda = following()
    agenda.on_stored(A, 100.0, 50)
    assert agenda.wait_until_s() == 110.0
    agenda.on_stored(A, 105.0, 60)
    assert agenda.next(114.0) is None
    assert agenda.wait_until_s() == 115.0
    assert agenda.oldest_s() == 100.0
    do_next_push(agenda, A, 115.0)
    assert agenda.is_done
    assert agenda.next(1e9) is None
    assert (agenda.wait_until_s(), agenda.oldest_s()) == (None, None)


def test_a_session_that_is_never_idle_is_pushed_in_the_end():
    """Otherwise its conversation would exist nowhere else for hours."""
    agenda = following()
    for seconds in range(int(MOST_QUIETS * QUIET_S)):
        assert agenda.next(float(seconds)) is None
        agenda.on_stored(A, float(seconds))
    do_next_push(agenda, A, MOST_QUIETS * QUIET_S)


def test_the_most_valuable_session_is_pushed_first():
    """Of those due, by tokens and expected return; superseded ones come last."""
    agenda = following()
    agenda.on_stored(A, 0.0, 100)
    agenda.on_stored(B, 0.0, 300)
    agenda.on_stored(C, 0.0, 900)
    agenda.on_superseded(C)
    for key in (B, A, C):
        do_next_push(agenda, key, 50.0)


def test_a_session_stored_during_its_push_is_pushed_again():
    """The push may have sent less."""
    agenda = following()
    agenda.on_stored(A, 0.0)
    assert agenda.next(10.0) == Push(A)
    agenda.on_stored(A, 11.0)
    assert agenda.oldest_s() == 0.0
    agenda.on_pushed(info_of(A), 10.0)
    assert agenda.oldest_s() == 11.0
    do_next_push(agenda, A, 21.0)


@pytest.mark.parametrize("event", ["gone", "missing"])
def test_a_dropped_session_is_not_pushed(event):
    """It may be gone before the push or during it; eviction is no deletion: the store keeps it."""
    agenda = following()
    agenda.on_stored(A, 0.0)
    if event == "gone":
        agenda.on_gone(A)
    else:
        assert agenda.next(10.0) == Push(A)
        agenda.on_missing()
    assert agenda.next(1e9) is None
    assert agenda.is_done


def test_a_deletion_comes_first():
    """It replaces the push, in every mode: the user wanted the session deleted everywhere."""
    for writes in ("none", "all"):
        agenda = following(writes)
        agenda.on_stored(B, 0.0, 1_000_000)
        agenda.on_stored(A, 0.0)
        agenda.on_deleted(A, 1e9, of_others=True)
        assert agenda.num_drops == 1
        assert agenda.next(10.0) == Drop(A, 1e9, of_others=True)
        agenda.on_dropped()
        assert agenda.next(10.0) == (Push(B) if writes == "all" else None)


def test_a_session_stored_after_its_deletion_is_pushed():
    """It is a new session; its push replaces the old one."""
    agenda = following()
    agenda.on_deleted(A, 1e9, of_others=False)
    agenda.on_stored(A, 0.0)
    do_next_push(agenda, A, 10.0)


def test_a_failed_push_is_retried_with_growing_pauses():
    """Unless the session is stored again, which starts over."""
    agenda, now_s = following(), 10.0
    agenda.on_stored(A, 0.0)
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
        assert agenda.next(now_s) == Push(A)
        agenda.on_failed(now_s)
        assert agenda.next(now_s + pause_s - 1) is None
        now_s += pause_s
    agenda.on_stored(A, now_s)
    do_next_push(agenda, A, now_s + QUIET_S)


def test_postponed_work_is_done_later():
    """It waits no longer for that."""
    agenda = following()
    agenda.on_stored(A, 0.0)
    agenda.on_deleted(B, 1e9, of_others=False)
    for _ in range(2):
        assert agenda.next(10.0) == Drop(B, 1e9, of_others=False)
        agenda.on_postponed()
    assert agenda.next(10.0) == Drop(B, 1e9, of_others=False)
    agenda.on_dropped()
    for _ in range(2):
        assert agenda.next(10.0) == Push(A)
        agenda.on_postponed()
    agenda.on_deleted(A, 1e9, of_others=False)
    assert agenda.next(10.0) == Drop(A, 1e9, of_others=False)


def test_a_fenced_session_is_not_pushed_until_it_continues_here():
    """With more tokens than its owner has; the fencing is reported once."""
    agenda = following()
    agenda.on_stored(A, 0.0, 100)
    assert agenda.next(10.0) == Push(A)
    assert agenda.on_fenced(owners_tokens=150)
    agenda.on_stored(A, 20.0, 120)
    assert agenda.next(30.0) is None
    agenda.on_stored(A, 40.0, 200)
    assert agenda.next(50.0) == Push(A, takes=True)
    assert not agenda.on_fenced(owners_tokens=250)
    agenda.on_stored(A, 60.0, 300)
    do_next_push(agenda, A, 70.0)
    agenda.on_stored(A, 80.0, 10)
    assert agenda.next(90.0) == Push(A)  # this server owns it again


def test_a_session_that_continued_here_before_it_was_fenced_is_taken_over():
    """Its owner has pushed less since; a session that was only listed has no known time."""
    agenda = following()
    agenda.on_stored(A, 0.0, 100)
    assert agenda.next(10.0) == Push(A)
    assert agenda.on_fenced(owners_tokens=60)
    assert agenda.next(10.0) == Push(A, takes=True)
    assert not agenda.on_fenced(owners_tokens=80)
    assert agenda.next(20.0) is None, "it is somebody else's all the same"
    agenda.on_listing([info_of(B, num_tokens=100, idle_s=50.0)], 100.0, 1e9)
    assert agenda.next(100.0) == Push(B)
    assert agenda.on_fenced(owners_tokens=60)
    assert agenda.next(200.0) is None


def test_a_listing_adds_sessions_that_were_missed():
    """Sessions known to be in the store unchanged are skipped; ended ones are dropped."""
    agenda = following()
    agenda.on_stored(A, 0.0)
    do_next_push(agenda, A, 10.0, num_tokens=100, idle_s=10.0)

    def list_at(now_s):
        used = ((A, 10.0, False), (B, 100.0, False), (C, 0.0, True))
        infos = [info_of(key, idle_s=now_s - used_s, ended=end) for key, used_s, end in used]
        agenda.on_listing(infos, now_s, 1e9)

    for _ in range(2):
        list_at(105.0)
    assert agenda.next(105.0) == Drop(C, 1e9, of_others=True)
    agenda.on_dropped()
    assert agenda.next(105.0) is None  # B was used recently
    assert agenda.oldest_s() is None  # the store may have it
    do_next_push(agenda, B, 110.0)
    list_at(115.0)
    assert agenda.next(1e9) is None


@pytest.mark.parametrize("change", [{"ttl_s": 5.0}, {"pin": pb.PIN_SOFT}, {"idle_s": 1.0}])
def test_a_listing_finds_changed_sessions(change):
    """Another TTL, pin, or use is checked, and so is everything in another store."""
    agenda = following()
    agenda.on_stored(A, 0.0)
    do_next_push(agenda, A, 10.0)
    agenda.on_listing([info_of(A, **{"idle_s": 1000.0, **change})], 200.0, 1e9)
    assert agenda.num_unpushed == 1
    do_next_push(agenda, A, 300.0, **change)
    agenda.forget_store()
    agenda.on_listing([info_of(A, **{"idle_s": 1000.0, **change})], 400.0, 1e9)
    do_next_push(agenda, A, 410.0)


def test_a_fetched_session_is_not_pushed():
    """kvd reports that it was stored, but the store has it."""
    agenda = following()
    agenda.on_stored(A, 0.0)
    agenda.on_pulled(info_of(A), 100, 0.0)
    agenda.on_listing([info_of(A, idle_s=50.0)], 50.0, 1e9)
    assert agenda.is_done


def test_a_turn_right_after_a_fetch_is_pushed():
    """Its end is reported before that of the pull."""
    agenda = following()
    agenda.on_stored(A, 0.0, 60)
    agenda.on_stored(A, 1.0, 120)
    agenda.on_pulled(info_of(A, 120), 100, 0.0)
    assert agenda.next(1e9) == Push(A)


def test_at_the_end_nothing_is_delayed():
    """Sessions that are not idle yet, and failed ones after their pause."""
    agenda = following()
    agenda.on_stored(A, 0.0)
    agenda.on_stored(B, 9.0)
    agenda.drain()
    agenda.on_listing([info_of(C, idle_s=0.0)], 9.0, 1e9)
    for _ in range(3):
        step = agenda.next(9.0)
        agenda.on_pushed(info_of(step.key), 9.0)
    assert agenda.is_done


@pytest.mark.parametrize("writes", ["none", "drain"])
def test_unpushed_modes_remember_nothing(writes):
    """With "none", or "drain" before the end; a reload removes waiting work."""
    agenda = following()
    agenda.on_stored(A, 0.0)
    agenda.reconfigure(writes, QUIET_S)
    agenda.on_stored(B, 0.0)
    assert agenda.next(1e9) is None
    assert agenda.is_done
    agenda.drain()
    agenda.on_listing([info_of(A)], 0.0, 1e9)
    assert agenda.next(0.0) == (Push(A) if writes == "drain" else None)


def near(agenda, key, now_s=0.0, *, is_superseded=False):
    agenda.on_near_eviction(key, now_s, 100, is_superseded=is_superseded)


def test_sessions_near_eviction_are_pushed_at_once():
    """In order of eviction, superseded ones last; all others at the end."""
    agenda = following("evicted")
    for key in (A, B, C):
        agenda.on_stored(key, 0.0, 100)
    assert agenda.wait_until_s() is None
    near(agenda, C, is_superseded=True)
    near(agenda, B, 1.0)
    assert agenda.oldest_s() == 0.0
    do_next_push(agenda, B, 1.0)
    do_next_push(agenda, C, 1.0)
    assert agenda.is_done
    agenda.drain()
    agenda.on_listing([info_of(key, idle_s=1.0) for key in (A, B, C)], 1.0, 1e9)
    do_next_push(agenda, A, 1.0)
    assert agenda.is_done


def test_a_session_used_again_waits_until_it_is_near_eviction_again():
    """It will have grown then; failed pushes are retried."""
    agenda = following("evicted")
    near(agenda, A)
    agenda.on_stored(A, 1.0, 200)
    assert agenda.next(1e9) is None
    near(agenda, A, 2.0)
    assert agenda.next(2.0) == Push(A)
    agenda.on_failed(2.0)
    assert agenda.next(2.0) is None
    do_next_push(agenda, A, 2.0 + FIRST_PAUSE_S)


def test_a_listing_shows_sessions_near_eviction():
    """The event was missed; sessions in the store are known."""
    agenda = following("evicted")
    near(agenda, B)
    do_next_push(agenda, B, 0.0)
    agenda.on_listing(
        [
            info_of(A, idle_s=9.0, near_eviction=True),
            info_of(B, idle_s=9.0, near_eviction=True),
            info_of(C, idle_s=9.0),
        ],
        0.0,
        1e9,
    )
    do_next_push(agenda, A, 0.0)
    assert agenda.is_done


def test_a_reload_removes_sessions_not_near_eviction():
    """The next listing shows which are; other settings remove nothing."""
    agenda = following("all")
    agenda.on_stored(A, 0.0)
    agenda.reconfigure("evicted", QUIET_S)
    assert agenda.is_done
    near(agenda, B)
    agenda.reconfigure("evicted", 2 * QUIET_S)
    do_next_push(agenda, B, 0.0)


@pytest.mark.parametrize("writes", ["none", "drain", "all"])
def test_other_modes_ignore_evictions(writes):
    """kvd may have been reloaded before the follower was."""
    agenda = following(writes)
    near(agenda, A)
    assert agenda.is_done


class World:
    """kvd's sessions (tokens, when stored), the store's copies of them, and an agenda.

    `near`: sessions near eviction, as far as kvd has reported them.
    """

    def __init__(self, writes="all") -> None:
        self.agenda, self.now_s = following(writes), 0.0
        self.here, self.there, self.fenced, self.near = {}, {}, set(), set()

    def stored(self, key, num):
        self.here[key] = (num, self.now_s)
        self.near.discard(key)
        self.agenda.on_stored(key, self.now_s, num)

    def nears(self, key, _):
        if key in self.here and key not in self.near:
            self.near.add(key)
            self.agenda.on_near_eviction(key, self.now_s, self.here[key][0], is_superseded=False)

    def gone(self, key, _):
        self.here.pop(key, None)
        self.near.discard(key)
        self.fenced.discard(key)
        self.agenda.on_gone(key)

    def deleted(self, key, _):
        self.here.pop(key, None)
        self.near.discard(key)
        self.fenced.discard(key)
        self.agenda.on_deleted(key, 1e9, of_others=False)

    def listed(self, *_):
        infos = [
            info_of(key, num_tokens=num, idle_s=self.now_s - at_s, near_eviction=key in self.near)
            for key, (num, at_s) in self.here.items()
        ]
        self.agenda.on_listing(infos, self.now_s, 1e9)

    def later(self, _, num):
        self.now_s += num

    def works(self, _, num):
        self.step(num)

    def fails(self, _, num):
        self.step(num, "fails")

    def is_postponed(self, _, num):
        self.step(num, "is_postponed")

    def is_fenced(self, _, num):
        self.step(num, "is_fenced")

    def step(self, num, result="") -> bool:
        """Do the next item, if there is one; it ends with success."""
        step, agenda = self.agenda.next(self.now_s), self.agenda
        if step is None:
            return False
        if result == "is_postponed":
            agenda.on_postponed()
        elif isinstance(step, Drop):
            self.there.pop(step.key, None)
            agenda.on_dropped()
        elif step.key not in self.here:
            agenda.on_missing()
        elif result == "fails":
            agenda.on_failed(self.now_s)
        elif result == "is_fenced" and not step.takes:
            self.fenced.add(step.key)
            agenda.on_fenced(num)
        else:
            self.fenced.discard(step.key)
            self.there[step.key] = self.here[step.key]
            num_tokens = self.here[step.key][0]
            agenda.on_pushed(info_of(step.key, num_tokens=num_tokens), self.now_s)
        return True

    def work(self) -> None:
        """Do everything until nothing is left, whenever it would be due."""
        for _ in range(100):
            if not self.step(0) and self.agenda.is_done:
                break
            self.now_s = max(self.now_s, self.agenda.wait_until_s() or 0.0)
        assert self.agenda.is_done

    def are_there(self, keys) -> bool:
        """Return whether the store has the present state of these sessions, but for fenced ones."""
        return all(self.there.get(key) == self.here[key] or key in self.fenced for key in keys)


EVENTS = st.tuples(
    st.sampled_from(
        [
            *(World.stored, World.gone, World.deleted, World.listed, World.later),
            *(World.works, World.fails, World.is_postponed, World.is_fenced, World.nears),
        ]
    ),
    st.sampled_from([A, B, C]),
    st.integers(1, 40),
)


@few(150)
@given(st.lists(EVENTS, max_size=60))
def test_no_session_is_forgotten_or_pushed_twice(events):
    """After any history the store has what is stored, but for fenced sessions."""
    world = World()
    for event, key, num in events:
        event(world, key, num)
        assert world.agenda.num_unpushed <= 3
    world.agenda.drain()
    world.work()
    assert world.are_there(world.here)


@few(150)
@given(st.lists(EVENTS, max_size=60))
def test_sessions_near_eviction_are_pushed_in_time(events):
    """After any history; and at the end the others are, too."""
    world = World("evicted")
    for event, key, num in events:
        event(world, key, num)
        assert world.agenda.num_unpushed <= 3
    world.work()
    assert world.are_there(world.near)
    world.agenda.drain()
    world.listed()
    world.work()
    assert world.are_there(world.here)
