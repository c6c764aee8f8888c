"""The policy that knows the future."""

from kvd.core.eviction.policy import PolicyContext
from kvd.core.eviction.queue_window import QueueWindow
from kvd.core.records.tier import Tier
from kvd.plan.belady import BeladyPolicy
from shared.types.queue_delta import QueuedRequest
from shared.types.session_key import SessionKey
from tests.queue_changes import queue_change

A, B, C, D, E = (SessionKey("t", "m", name) for name in "ABCDE")


def policy_of(returns_ns: dict[SessionKey, int], *used: SessionKey) -> BeladyPolicy:
    queue = QueueWindow(lambda keys, unqueued: policy.on_queue(keys, unqueued, 0))
    policy = BeladyPolicy(PolicyContext(queue, lambda: 0), returns_ns)
    for key in used:
        policy.on_access(key, 0)
    queue.replace(
        1, queue_change(waiting=[QueuedRequest((0, 0.0, 1), D), QueuedRequest((0, 0.0, 2), E)]), 0
    )
    return policy


def test_sessions_without_a_return_go_first_and_waiting_ones_last():
    """Then the last to return; of waiting ones, the last in the queue."""
    policy = policy_of({A: 50, C: 70}, A, B, C, D, E)
    assert list(policy.victims(Tier.DRAM, 0)) == [B, C, A, E, D]
    assert list(policy.victims(Tier.SSD, 0, giving_way_to=A)) == [B, C]
    assert list(policy.victims(Tier.DRAM, 0, giving_way_to=E)) == [B, C, A]


def test_idle_sessions_on_ssd_are_read_ahead_in_order_of_return():
    """Not those in DRAM, not waiting ones, and not those that never return."""
    returns_ns = {A: 50, C: 40}
    policy = policy_of(returns_ns, A, B, C, D)
    assert list(policy.returning(0)) == []
    for key in (A, B, C, D):
        policy.on_evict(key, Tier.DRAM)
    assert list(policy.returning(0)) == [C, A]
    policy.on_insert(C, Tier.DRAM)
    assert list(policy.returning(0)) == [A]
    del returns_ns[A]
    policy.on_queue({A: None}, [A], 0)
    assert list(policy.returning(0)) == []
    policy.on_evict(C, Tier.DRAM)
    policy.on_remove(C)
    assert list(policy.returning(0)) == []
