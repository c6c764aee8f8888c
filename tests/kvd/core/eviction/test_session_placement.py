"""Session placement: how the queue reaches the policy, and how large the windows are."""

import pytest

from kvd.core.eviction.policies import POLICIES, LruPolicy
from kvd.core.eviction.session_placement import MEAN_SHARE, SessionPlacement
from kvd.core.records.tier import Tier
from shared.types.queue_delta import QueuedRequest, RunningRequest
from shared.types.session_key import SessionKey
from tests.queue_changes import queue_change

KEYS = [SessionKey("a", "m", name) for name in "abcdef"]
A, B, C, D, E, F = KEYS
ENGINE, OTHER = 1, 2
CAPACITY = 1000
WHOLE_QUEUE = [name for name in ("lookahead_queue", "predictive") if name in POLICIES]


class NotedPolicy(LruPolicy):
    """LRU that records reports of the queue."""

    def __init__(self, context) -> None:
        super().__init__(context)
        self.context = context
        self.noted = []

    def on_submit(self, key, now_ns) -> None:
        self.noted.append(("arrived", key, now_ns))

    def on_queue(self, keys, unqueued, now_ns) -> None:
        assert list(unqueued) == [key for key in keys if not self._queue.is_queued(key)]
        for key in keys:
            place, is_running = self._queue.place(key), self._queue.is_running(key)
            rank = None if place is None else place[2]
            self.noted.append(("engaged", key, rank, is_running, now_ns))

    def take(self):
        """Return the reports since the last call."""
        noted, self.noted = self.noted, []
        return noted


@pytest.fixture
def placement():
    return SessionPlacement(NotedPolicy, lambda: CAPACITY)


def placement_by(name, capacity=CAPACITY):
    return SessionPlacement(POLICIES[name], lambda: capacity)


def waiting(*keys, first_number=0):
    return [QueuedRequest((0, 0.0, number), key) for number, key in enumerate(keys, first_number)]


def touch_all(placement, *keys):
    for now_ns, key in enumerate(keys):
        placement.policy.on_access(key, now_ns)


# ------------------------------------------------------------------------------ the queue


def test_a_turn_arrives_when_it_begins_to_wait(placement):
    """Starting, or changing its place, is no second arrival."""
    placement.change_queue(ENGINE, queue_change(waiting(A)), 5)
    assert placement.policy.take() == [("arrived", A, 5), ("engaged", A, (0, 0.0, 0), False, 5)]
    placement.change_queue(ENGINE, queue_change([QueuedRequest((-1, 0.0, 0), A)]), 6)
    assert placement.policy.take() == [("engaged", A, (-1, 0.0, 0), False, 6)]
    placement.change_queue(ENGINE, queue_change(running=[RunningRequest(0, A)]), 7)
    assert placement.policy.take() == [("engaged", A, None, True, 7)]
    placement.change_queue(ENGINE, queue_change(left=[0]), 8)
    assert placement.policy.take() == [("engaged", A, None, False, 8)]
    placement.change_queue(ENGINE, queue_change(waiting(A, first_number=1)), 9)
    assert placement.policy.take()[0] == ("arrived", A, 9)


def test_a_turn_that_never_waits_arrives_as_it_starts(placement):
    """An idle engine's queue is never reported."""
    placement.change_queue(ENGINE, queue_change(running=[RunningRequest(0, A)]), 5)
    assert placement.policy.take() == [("arrived", A, 5), ("engaged", A, None, True, 5)]


def test_a_second_turn_of_a_running_session_has_a_place(placement):
    """The session both runs and waits, and is busy until both have ended."""
    placement.change_queue(ENGINE, queue_change(waiting(A), [RunningRequest(7, A)]), 0)
    assert placement.policy.take()[-1] == ("engaged", A, (0, 0.0, 0), True, 0)
    placement.change_queue(ENGINE, queue_change(left=[7]), 1)
    assert placement.is_busy(A)
    placement.change_queue(ENGINE, queue_change(left=[0]), 2)
    assert not placement.is_busy(A)


def test_an_unchanged_full_snapshot_is_no_arrival(placement):
    """kvd asked for it: nothing has happened."""
    placement.change_queue(ENGINE, queue_change(waiting(A, B), [RunningRequest(7, C)]), 0)
    placement.policy.take()
    placement.replace_queue(ENGINE, queue_change(waiting(A, B), [RunningRequest(7, C)]), 1)
    assert not [call for call in placement.policy.take() if call[0] == "arrived"]


def test_turns_of_a_new_engine_are_no_arrivals(placement):
    """They may have waited for long: their arrival times are unknown."""
    placement.replace_queue(ENGINE, queue_change(waiting(A, B), [RunningRequest(7, C)]), 0)
    assert not [call for call in placement.policy.take() if call[0] == "arrived"]
    more = queue_change(waiting(A, B, C), [RunningRequest(7, C)])
    placement.replace_queue(ENGINE, more, 1)
    assert [call[1] for call in placement.policy.take() if call[0] == "arrived"] == [C]


def test_a_full_snapshot_removes_unnamed_turns(placement):
    """Whether they waited or ran."""
    placement.change_queue(ENGINE, queue_change(waiting(A, B), [RunningRequest(7, C)]), 0)
    placement.policy.take()
    placement.replace_queue(ENGINE, queue_change(waiting(A)), 1)
    engaged = {call[1]: call[2:4] for call in placement.policy.take() if call[0] == "engaged"}
    assert (engaged[B], engaged[C]) == ((None, False), (None, False))
    assert [placement.is_busy(key) for key in (A, B, C)] == [True, False, False]


def test_a_lost_engine_removes_its_own_turns_only(placement):
    """A session that waits at another one, too, still waits."""
    placement.change_queue(ENGINE, queue_change(waiting(A, B)), 0)
    placement.change_queue(OTHER, queue_change(waiting(B), [RunningRequest(7, C)]), 0)
    placement.policy.take()
    placement.forget_engine(ENGINE, 3)
    noted = placement.policy.take()
    assert ("engaged", A, None, False, 3) in noted
    assert [call[1] for call in noted if call[0] == "arrived"] == []
    assert [placement.is_busy(key) for key in (A, B, C)] == [False, True, True]
    assert len(placement.queue) == 1


def test_removing_an_engine_without_a_queue_changes_nothing(placement):
    """It attached and left."""
    placement.forget_engine(ENGINE, 0)
    assert placement.policy.take() == []


def test_waiting_sessions_are_read_until_settled_or_gone(placement):
    """The prefetch order follows the queue automatically."""
    placement.change_queue(ENGINE, queue_change(waiting(A, B)), 0)
    placement.prefetching.settle(A)
    assert placement.prefetching.pick(10, lambda *_: True) == B
    placement.change_queue(ENGINE, queue_change(running=[RunningRequest(1, B)]), 0)
    assert placement.prefetching.pick(10, lambda *_: True) is None


def test_a_running_session_is_released_once_its_engine_has_its_kv(placement):
    """Not when it starts: its load may just begin; and only while it runs."""
    placement.on_load(A)
    placement.change_queue(ENGINE, queue_change(running=[RunningRequest(0, A)]), 0)
    assert not placement.is_released(A), "what was loaded before was for something else"
    placement.on_load(A)
    assert placement.is_released(A)
    placement.change_queue(ENGINE, queue_change(left=[0]), 1)
    assert not placement.is_released(A)


def test_a_load_before_the_reported_start_counts(placement):
    """Changes of the queue arrive a little after the events that they report."""
    placement.change_queue(ENGINE, queue_change(waiting(A)), 0)
    placement.on_load(A)
    assert not placement.is_released(A)
    placement.change_queue(ENGINE, queue_change(running=[RunningRequest(0, A)]), 1)
    assert placement.is_released(A)


def test_the_next_turn_of_a_session_must_be_loaded_again(placement):
    """It waits while the previous one runs, or arrives when that one ends."""
    placement.change_queue(
        ENGINE, queue_change(waiting(A, first_number=1), [RunningRequest(0, A)]), 0
    )
    placement.on_load(A)
    placement.change_queue(ENGINE, queue_change(left=[0]), 1)
    placement.change_queue(ENGINE, queue_change(running=[RunningRequest(1, A)]), 2)
    assert not placement.is_released(A)
    placement.on_load(A)
    placement.change_queue(ENGINE, queue_change(waiting(A, first_number=2), left=[1]), 3)
    placement.change_queue(ENGINE, queue_change(running=[RunningRequest(2, A)]), 4)
    assert not placement.is_released(A)


def test_a_full_snapshot_releases_only_the_loaded_turn(placement):
    """The same turn stays released, another turn of the session is not."""
    placement.replace_queue(ENGINE, queue_change(running=[RunningRequest(0, A)]), 0)
    placement.on_load(A)
    placement.replace_queue(ENGINE, queue_change(running=[RunningRequest(0, A)]), 1)
    assert placement.is_released(A)
    placement.replace_queue(ENGINE, queue_change(running=[RunningRequest(1, A)]), 2)
    assert not placement.is_released(A)


def test_a_turn_that_arrives_as_the_previous_one_ends_counts(placement):
    """Both may be reported in one change."""
    placement.change_queue(ENGINE, queue_change(running=[RunningRequest(0, A)]), 0)
    placement.policy.take()
    placement.change_queue(ENGINE, queue_change(waiting(A, first_number=1), left=[0]), 1)
    assert placement.policy.take()[0] == ("arrived", A, 1)


# ------------------------------------------------------------------------------------------ windows


def test_the_window_is_a_number_of_sessions_of_mean_size(placement):
    """L_pw = C_mem / S_kv; without sessions there is no mean, and no window."""
    assert placement.window(CAPACITY) == 0
    placement.observe_size(100)
    placement.observe_size(300)
    assert placement.window(CAPACITY) == 5
    assert placement.window(199) == 0


def test_the_first_sizes_have_equal_weight(placement):
    """The mean is exact until there are many."""
    sizes = [3, 50, 700, 20, 1]
    for size in sizes:
        placement.observe_size(size)
    assert placement.window(10**9) == int(10**9 / (sum(sizes) / len(sizes)))


def test_old_sizes_fade_from_the_mean(placement):
    """Sessions that have grown do not keep their small sizes in it."""
    for size in [1] * 1000 + [100] * int(10 / MEAN_SHARE):
        placement.observe_size(size)
    assert placement.window(10_000) == 100


def test_the_eviction_window_is_of_both_tiers_as_they_are_now():
    """L_ew = (C_mem + C_disk) / S_kv; a tier that shrinks makes it smaller."""
    capacity = [CAPACITY]
    placement = SessionPlacement(NotedPolicy, lambda: capacity[0])
    placement.observe_size(100)
    window = placement.policy.context.eviction_window
    assert window() == 10
    capacity[0] = 450
    assert window() == 4


# --------------------------------------------------------------------------------------- end to end


@pytest.mark.parametrize("name", WHOLE_QUEUE)
def test_idle_sessions_go_before_the_queue_tail_first(name):
    """Idle sessions first, then the queue from its end."""
    placement = placement_by(name)
    touch_all(placement, *KEYS)
    placement.change_queue(ENGINE, queue_change(waiting(A, C, B)), 10)
    order = list(placement.policy.victims(Tier.SSD, 11))
    assert (sorted(order[:3]), order[3:]) == ([D, E, F], [B, C, A])


@pytest.mark.parametrize("name", WHOLE_QUEUE)
def test_two_engines_form_one_queue(name):
    """Sessions that start sooner go later, whichever engine they wait for."""
    placement = placement_by(name)
    touch_all(placement, *KEYS)
    placement.change_queue(ENGINE, queue_change(waiting(A, B), interval_ns=100), 10)
    placement.change_queue(OTHER, queue_change(waiting(C, D), interval_ns=70), 10)
    order = list(placement.policy.victims(Tier.SSD, 11))
    assert (sorted(order[:2]), order[2:]) == ([E, F], [B, D, A, C])


@pytest.mark.parametrize("name", WHOLE_QUEUE)
def test_sessions_of_a_lost_engine_are_idle_again(name):
    """No stale place is left: they give way to waiting sessions."""
    placement = placement_by(name)
    touch_all(placement, *KEYS)
    placement.change_queue(ENGINE, queue_change(waiting(A, B), [RunningRequest(7, C)]), 10)
    placement.change_queue(OTHER, queue_change(waiting(D)), 10)
    placement.forget_engine(ENGINE, 11)
    assert sorted(placement.policy.victims(Tier.DRAM, 12, giving_way_to=D)) == [A, B, C, E, F]


@pytest.mark.parametrize("name", [name for name in ("fifo", "lru") if name in POLICIES])
def test_some_policies_ignore_the_queue(name):
    """They are the baselines for looking ahead."""
    placement = placement_by(name)
    touch_all(placement, *KEYS)
    placement.change_queue(ENGINE, queue_change(waiting(A, C, B)), 10)
    assert list(placement.policy.victims(Tier.SSD, 11)) == KEYS


@pytest.mark.parametrize("name", WHOLE_QUEUE)
def test_no_session_gives_way_to_one_needed_later(name):
    """Only idle sessions and later ones do; the one itself need not be in the tier."""
    placement = placement_by(name)
    touch_all(placement, *KEYS[:5])
    placement.change_queue(ENGINE, queue_change(waiting(A, F, B)), 10)
    before_f = list(placement.policy.victims(Tier.DRAM, 11, giving_way_to=F))
    assert (sorted(before_f[:3]), before_f[3:]) == ([C, D, E], [B])
    assert sorted(placement.policy.victims(Tier.DRAM, 11, giving_way_to=B)) == [C, D, E]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_an_ended_session_goes_first(name):
    """Until it is used again, whatever else is known of it."""
    placement = placement_by(name)
    touch_all(placement, *KEYS)
    placement.policy.on_end(E)
    for tier in Tier:
        assert next(placement.policy.victims(tier, 10)) == E
    placement.policy.on_access(E, 11)
    for tier in Tier:
        assert next(placement.policy.victims(tier, 12)) != E
