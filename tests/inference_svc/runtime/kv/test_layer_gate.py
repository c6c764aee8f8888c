"""Gates: no thread passes a closed layer, and a failure reaches all threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inference_svc.runtime.kv.copy_stream import CopyStream
from inference_svc.runtime.kv.layer_gate import LayerGate, StepClock
from shared.types.errors import LoadFailedError

CPU = torch.device("cpu")
SOON = 20.0  # seconds that only a broken test takes


def test_open_layers_are_passed_without_the_lock():
    """Even while another thread holds the lock."""
    gate = LayerGate(3)
    gate.open(2)
    with gate._changed:  # an ordinary thread would block on it
        gate.wait(0, 0.0)
        gate.wait(1, 0.0)
    assert (gate.num_open, gate.waited_s) == (2, 0.0)


def test_a_closed_layer_times_out_and_may_open_later():
    """A timeout is the waiting thread's error, not the gate's."""
    gate = LayerGate(3)
    gate.open(1)
    with pytest.raises(LoadFailedError, match="layer 1"):
        gate.wait(1, 0.0)
    assert not gate.is_settled
    gate.open(2)
    gate.wait(1, 0.0)


def test_the_time_spent_blocked_is_counted():
    """Waits at closed layers and for the confirmation add up.

    Passing an open layer adds nothing.
    """
    gate = LayerGate(2)
    gate.open(1)
    for call in (lambda: gate.wait(1, 0.002), lambda: gate.wait_confirmed(0.002)):
        with pytest.raises(LoadFailedError):
            call()
    assert gate.waited_s >= 0.004
    waited_s = gate.waited_s
    gate.wait(0)
    assert gate.waited_s == waited_s


def test_layers_stay_open():
    """Opening fewer layers than before changes nothing; more than there are is a bug."""
    gate = LayerGate(3)
    gate.open(2)
    gate.open(1)
    gate.wait(1, 0.0)
    with pytest.raises(AssertionError, match="4 layers"):
        gate.open(4)


def test_a_failure_closes_every_layer():
    """Rows behind a failed gate may be garbage: open layers cannot be passed either."""
    gate, error = LayerGate(2), OSError("gone")
    gate.open(1)
    gate.fail(error)
    gate.open(2)
    for call in (lambda: gate.wait(0), lambda: gate.wait(1), gate.wait_confirmed):
        with pytest.raises(OSError, match="gone") as raised:
            call()
        assert raised.value is error
    assert (gate.is_settled, gate.num_open, gate.error) == (True, 0, error)


def test_the_first_result_is_final():
    """A confirmed gate cannot fail, a failed one cannot be confirmed."""
    confirmed, failed = LayerGate(1), LayerGate(1)
    confirmed.open(1)
    confirmed.confirm()
    confirmed.fail(OSError("late"))
    confirmed.wait(0, 0.0)
    confirmed.wait_confirmed(0.0)
    failed.open(1)
    failed.fail(OSError("first"))
    failed.fail(OSError("second"))
    failed.confirm()
    with pytest.raises(OSError, match="first"):
        failed.wait_confirmed()


def test_confirming_needs_all_layers():
    """Rows that are not there cannot be vouched for."""
    gate = LayerGate(2)
    gate.open(1)
    with pytest.raises(AssertionError, match="1 of 2"):
        gate.confirm()
    with pytest.raises(LoadFailedError, match="confirmation"):
        gate.wait_confirmed(0.0)


def test_waiting_threads_pass_in_step_with_the_opener():
    """A thread behind each layer sees what was written before that layer opened."""
    num_layers = 200
    gate, written = LayerGate(num_layers), [0] * num_layers

    def follow():
        seen = []
        for layer_index in range(num_layers):
            gate.wait(layer_index, SOON)
            seen.append(written[layer_index])
        gate.wait_confirmed(SOON)
        return seen

    with ThreadPoolExecutor(4) as threads:
        followers = [threads.submit(follow) for _ in range(4)]
        for layer_index in range(num_layers):
            written[layer_index] = layer_index + 1
            gate.open(layer_index + 1)
        gate.confirm()
        for follower in followers:
            assert follower.result(SOON) == [index + 1 for index in range(num_layers)]


def test_a_failure_wakes_waiting_threads():
    """At a layer and at the confirmation, before their timeouts."""
    gate = LayerGate(1)

    def wait(call):
        with pytest.raises(OSError, match="gone"):
            call()

    with ThreadPoolExecutor(2) as threads:
        calls = (lambda: gate.wait(0, 2 * SOON), lambda: gate.wait_confirmed(2 * SOON))
        waiting = [threads.submit(wait, call) for call in calls]
        while len(gate._changed._waiters) < 2:
            assert not any(done.done() for done in waiting)
        gate.fail(OSError("gone"))
        for done in waiting:
            done.result(SOON)


def test_a_clock_knows_when_each_layer_is_computed():
    """Layers opened together share a mark."""
    clock = StepClock(4, CPU)
    clock.on_enqueued(1)
    clock.on_enqueued(3)
    assert clock.num_open == 3
    assert clock.computed_mark(0) is not clock.computed_mark(1)
    assert clock.computed_mark(1) is clock.computed_mark(2)
    clock.on_enqueued(4)
    assert clock.computed_mark(2) is not clock.computed_mark(3)
    with CopyStream(CPU).copies(behind_computing=False):
        CopyStream(CPU).wait(clock.computed_mark(2))
