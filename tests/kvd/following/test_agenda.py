"""What is pushed or dropped next, when, and after what; at random: nothing is forgotten."""

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


def pushed(agenda, key, now_s, num_tokens=100, **values):
    """Do the push that is next."""
    step = agenda.next(now_s)
    assert isinstance(step, Push)
    assert step.key == key
    agenda.on_pushed(info_of(key, num_tokens=num_tokens, **values), now_s)
    return step


def test_a_session_is_pushed_once_it_has_been_left_alone():
    """Counted from the last time it was stored, and once."""
    agenda = following()
    agenda.on_stored(A, 100.0, 50)
    assert agenda.wait_until_s() == 110.0
    agenda.on_stored(A, 105.0, 60)
    assert agenda.next(114.0) is None
    assert agenda.wait_until_s() == 115.0
    assert agenda.oldest_s() == 100.0
    pushed(agenda, A, 115.0)
    assert agenda.is_done
    assert agenda.next(1e9) is None
    assert (agenda.wait_until_s(), agenda.oldest_s()) == (None, None)


def test_one_that_is_never_left_alone_is_pushed_in_the_end():
    """Its conversation would otherwise be nowhere else for hours."""
    agenda = following()
    for seconds in range(int(MOST_QUIETS * QUIET_S)):
        assert agenda.next(float(seconds)) is None
        agenda.on_stored(A, float(seconds))
    pushed(agenda, A, MOST_QUIETS * QUIET_S)


def test_the_most_valuable_is_first():
    """Of those that are due, by tokens and how soon it may be back; the superseded are last."""
    agenda = following()
    agenda.on_stored(A, 0.0, 100)
    agenda.on_stored(B, 0.0, 300)
    agenda.on_stored(C, 0.0, 900)
    agenda.on_superseded(C)
    for key in (B, A, C):
        pushed(agenda, key, 50.0)


def test_what_is_stored_while_it_is_pushed_is_pushed_again():
    """What went may be less."""
    agenda = following()
    agenda.on_stored(A, 0.0)
    assert agenda.next(10.0) == Push(A)
    agenda.on_stored(A, 11.0)
    assert agenda.oldest_s() == 0.0
    agenda.on_pushed(info_of(A), 10.0)
    assert agenda.oldest_s() == 11.0
    pushed(agenda, A, 21.0)


@pytest.mark.parametrize("event", ["gone", "missing"])
def test_what_is_gone_is_not_pushed(event):
    """Be it known before the push or by it; evicted is not deleted: nothing is dropped."""
    agenda = following()
    agenda.on_stored(A, 0.0)
    if event == "gone":
        agenda.on_gone(A)
    else:
        assert agenda.next(10.0) == Push(A)
        agenda.on_missing()
    assert agenda.next(1e9) is None
    assert agenda.is_done


def test_a_deletion_comes_before_all_else():
    """It takes the push's place; whatever is written, for somebody wanted it to be nowhere."""
    for writes in ("none", "all"):
        agenda = following(writes)
        agenda.on_stored(B, 0.0, 1_000_000)
        agenda.on_stored(A, 0.0)
        agenda.on_deleted(A, 1e9, of_others=True)
        assert agenda.num_drops == 1
        assert agenda.next(10.0) == Drop(A, 1e9, of_others=True)
        agenda.on_dropped()
        assert agenda.next(10.0) == (Push(B) if writes == "all" else None)


def test_what_is_stored_after_it_was_deleted_lives():
    """Another life of it; what it was before is replaced by its push."""
    agenda = following()
    agenda.on_deleted(A, 1e9, of_others=False)
    agenda.on_stored(A, 0.0)
    pushed(agenda, A, 10.0)


def test_a_push_that_failed_is_tried_again_ever_later():
    """Unless the session is stored again: then it is another one."""
    agenda, now_s = following(), 10.0
    agenda.on_stored(A, 0.0)
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
        assert agenda.next(now_s) == Push(A)
        agenda.on_failed(now_s)
        assert agenda.next(now_s + pause_s - 1) is None
        now_s += pause_s
    agenda.on_stored(A, now_s)
    pushed(agenda, A, now_s + QUIET_S)


def test_what_was_not_done_is_to_be_done():
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


def test_a_fenced_session_is_left_alone_until_it_goes_on_here():
    """With more tokens than its owner has; that it is fenced is news once."""
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
    pushed(agenda, A, 70.0)
    agenda.on_stored(A, 80.0, 10)
    assert agenda.next(90.0) == Push(A)  # it is the owner again


def test_a_session_that_has_gone_on_here_before_it_was_known_to_be_fenced_is_taken_over():
    """Its owner has pushed less, since; not one that was only listed: nobody knows when it was."""
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


def test_a_listing_brings_what_was_not_heard_of():
    """What is known to be in the store as it is here needs no look; what has ended is dropped."""
    agenda = following()
    agenda.on_stored(A, 0.0)
    pushed(agenda, A, 10.0, num_tokens=100, idle_s=10.0)

    def list_at(now_s):
        used = ((A, 10.0, False), (B, 100.0, False), (C, 0.0, True))
        infos = [info_of(key, idle_s=now_s - used_s, ended=end) for key, used_s, end in used]
        agenda.on_listing(infos, now_s, 1e9)

    for _ in range(2):
        list_at(105.0)
    assert agenda.next(105.0) == Drop(C, 1e9, of_others=True)
    agenda.on_dropped()
    assert agenda.next(105.0) is None  # B was used lately
    assert agenda.oldest_s() is None  # it may be there
    pushed(agenda, B, 110.0)
    list_at(115.0)
    assert agenda.next(1e9) is None


@pytest.mark.parametrize("change", [{"ttl_s": 5.0}, {"pin": pb.PIN_SOFT}, {"idle_s": 1.0}])
def test_a_listing_finds_what_has_changed(change):
    """Another TTL, pin, or use is looked at, and so is everything in another store."""
    agenda = following()
    agenda.on_stored(A, 0.0)
    pushed(agenda, A, 10.0)
    agenda.on_listing([info_of(A, **{"idle_s": 1000.0, **change})], 200.0, 1e9)
    assert agenda.num_unpushed == 1
    pushed(agenda, A, 300.0, **change)
    agenda.forget_store()
    agenda.on_listing([info_of(A, **{"idle_s": 1000.0, **change})], 400.0, 1e9)
    pushed(agenda, A, 410.0)


def test_what_was_fetched_is_there():
    """It need not be pushed, though kvd tells that it was stored."""
    agenda = following()
    agenda.on_stored(A, 0.0)
    agenda.on_pulled(info_of(A), 100, 0.0)
    agenda.on_listing([info_of(A, idle_s=50.0)], 50.0, 1e9)
    assert agenda.is_done


def test_what_a_turn_adds_at_once_to_what_is_fetched_is_pushed():
    """Its end is heard of before that of the pull."""
    agenda = following()
    agenda.on_stored(A, 0.0, 60)
    agenda.on_stored(A, 1.0, 120)
    agenda.on_pulled(info_of(A, 120), 100, 0.0)
    assert agenda.next(1e9) == Push(A)


def test_at_the_end_nothing_is_held_back():
    """What is not left alone yet, and what failed before, once its pause is over."""
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
def test_what_is_not_written_is_not_remembered(writes):
    """Nothing, or only at the end; a reload takes what waits away."""
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


def test_what_is_near_eviction_is_pushed_at_once():
    """In the order in which it goes, what another session goes on in the place of last; the rest at
    the end."""
    agenda = following("evicted")
    for key in (A, B, C):
        agenda.on_stored(key, 0.0, 100)
    assert agenda.wait_until_s() is None
    near(agenda, C, is_superseded=True)
    near(agenda, B, 1.0)
    assert agenda.oldest_s() == 0.0
    pushed(agenda, B, 1.0)
    pushed(agenda, C, 1.0)
    assert agenda.is_done
    agenda.drain()
    agenda.on_listing([info_of(key, idle_s=1.0) for key in (A, B, C)], 1.0, 1e9)
    pushed(agenda, A, 1.0)
    assert agenda.is_done


def test_what_is_used_again_waits_until_it_is_near_again():
    """What is stored of it then is more; what failed is tried again."""
    agenda = following("evicted")
    near(agenda, A)
    agenda.on_stored(A, 1.0, 200)
    assert agenda.next(1e9) is None
    near(agenda, A, 2.0)
    assert agenda.next(2.0) == Push(A)
    agenda.on_failed(2.0)
    assert agenda.next(2.0) is None
    pushed(agenda, A, 2.0 + FIRST_PAUSE_S)


def test_a_listing_says_what_is_near_eviction():
    """It was said when nobody heard it; what is there is known to be."""
    agenda = following("evicted")
    near(agenda, B)
    pushed(agenda, B, 0.0)
    agenda.on_listing(
        [
            info_of(A, idle_s=9.0, near_eviction=True),
            info_of(B, idle_s=9.0, near_eviction=True),
            info_of(C, idle_s=9.0),
        ],
        0.0,
        1e9,
    )
    pushed(agenda, A, 0.0)
    assert agenda.is_done


def test_a_reload_takes_away_what_is_not_near_eviction():
    """The listing that follows says what is; other settings take nothing away."""
    agenda = following("all")
    agenda.on_stored(A, 0.0)
    agenda.reconfigure("evicted", QUIET_S)
    assert agenda.is_done
    near(agenda, B)
    agenda.reconfigure("evicted", 2 * QUIET_S)
    pushed(agenda, B, 0.0)


@pytest.mark.parametrize("writes", ["none", "drain", "all"])
def test_who_pushes_otherwise_does_not_heed_evictions(writes):
    """kvd may have been told before the follower was."""
    agenda = following(writes)
    near(agenda, A)
    assert agenda.is_done


class World:
    """What kvd has (tokens, when stored), what the store was last given of it, and an agenda.

    `near`: sessions that are near eviction, as far as kvd has said so.
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
        """Do what is next, if there is anything; it ends so."""
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
        """Do all that there is to do, until nothing is left whenever that would be."""
        for _ in range(100):
            if not self.step(0) and self.agenda.is_done:
                break
            self.now_s = max(self.now_s, self.agenda.wait_until_s() or 0.0)
        assert self.agenda.is_done

    def are_there(self, keys) -> bool:
        """Whether the store has what is here of these sessions, but for what is fenced."""
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
def test_nothing_is_forgotten_and_nothing_done_twice(events):
    """Whatever happens, in the end what is stored is there, but for what is fenced."""
    world = World()
    for event, key, num in events:
        event(world, key, num)
        assert world.agenda.num_unpushed <= 3
    world.agenda.drain()
    world.work()
    assert world.are_there(world.here)


@few(150)
@given(st.lists(EVENTS, max_size=60))
def test_what_is_near_eviction_is_there_in_time(events):
    """Whatever happens; and at the end the rest is, too."""
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
