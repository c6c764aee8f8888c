"""The engine's time: prefills one after another, decodes on a clock that prefills stop."""

from kvd.plan.gpu import Gpu, Prefill


def test_a_prefill_stalls_the_decodes_before_it():
    """A decode ends later by the whole prefill that came in between."""
    gpu = Gpu()
    gpu.add(Prefill(1, prefill_ns=10, decode_ns=100), now_ns=0)
    assert gpu.next_ns() == 10
    assert gpu.end_prefill(9) is None
    assert gpu.end_prefill(10) == 1
    assert gpu.next_ns() == 110
    gpu.add(Prefill(2, prefill_ns=30, decode_ns=20), now_ns=50)
    assert gpu.next_ns() == 80
    assert gpu.end_decode(80) is None
    assert gpu.end_prefill(80) == 2
    assert gpu.next_ns() == 100  # the second one's, which is shorter
    assert gpu.end_decode(100) == 2
    assert gpu.next_ns() == 140
    assert gpu.end_decode(140) == 1
    assert gpu.next_ns() is None
    assert (gpu.busy_ns, gpu.prefill_ns) == (140, 40)


def test_prefills_run_in_order_of_arrival():
    """The second begins when the first ends, and time without work is not busy."""
    gpu = Gpu()
    gpu.add(Prefill(1, prefill_ns=10, decode_ns=5), now_ns=100)
    gpu.add(Prefill(2, prefill_ns=10, decode_ns=5), now_ns=105)
    assert gpu.end_prefill(110) == 1
    assert gpu.end_prefill(110) is None
    assert gpu.next_ns() == 120
    assert gpu.end_prefill(120) == 2
    assert gpu.end_decode(125) == 1
    assert gpu.end_decode(125) == 2
    gpu.add(Prefill(3, prefill_ns=0, decode_ns=0), now_ns=1000)
    assert gpu.end_prefill(1000) == 3
    assert gpu.end_decode(1000) == 3
    assert (gpu.busy_ns, gpu.prefill_ns) == (25, 20)


def test_the_backlog_is_the_wait_of_a_prefill_queued_now():
    """The rest of the running one, and all queued ones; decodes delay none."""
    gpu = Gpu()
    assert (gpu.num_turns, gpu.backlog_ns(0)) == (0, 0)
    gpu.add(Prefill(1, prefill_ns=10, decode_ns=50), now_ns=0)
    gpu.add(Prefill(2, prefill_ns=30, decode_ns=50), now_ns=0)
    assert (gpu.num_turns, gpu.backlog_ns(4)) == (2, 36)
    assert gpu.end_prefill(10) == 1
    assert (gpu.num_turns, gpu.backlog_ns(10)) == (2, 30)
    assert gpu.end_prefill(40) == 2
    assert (gpu.num_turns, gpu.backlog_ns(40)) == (2, 0)
    assert gpu.end_decode(90) == 1
    assert gpu.num_turns == 1
