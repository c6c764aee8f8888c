"""Reports of kvd's failures, and rates learned from loads."""

import time

from structlog.testing import capture_logs

from inference_svc.core.counters import Counters
from inference_svc.core.rates.rates import LoadPolicy
from inference_svc.runtime.store.kvd_loads import KvdCalls
from inference_svc.runtime.store.session_store import LoadRequest
from shared.types.errors import UnavailableError
from tests.inference_svc.runtime.store.failing_peer import KEY, save_scene
from tests.synthetic_engine import small_layout


def test_a_failure_is_logged_once_until_a_call_succeeds():
    """Each is counted, one of another kind is logged too; an internal error has its traceback."""
    counters = Counters()
    calls = KvdCalls(small_layout(), counters)
    away, ours = UnavailableError("kvd is away", "start it"), RuntimeError("a mistake")
    with capture_logs() as logs:
        for error in (away, away, ours, ours):
            calls.record_failure("load", error)
        calls.record_success()
        calls.record_success()
        assert calls.record_failure("discard", away) == away.reason
    logged = [(line["event"], line.get("reason"), line.get("exc_info")) for line in logs]
    assert logged == [
        ("session_store_failed", away.reason, None),
        ("session_store_failed", "copy_failed", ours),
        ("session_store_works_again", None, None),
        ("session_store_failed", away.reason, None),
    ]
    assert counters.snapshot()["load_errors"] == 4


async def test_loads_are_timed_by_their_slowest_tier(model, copy_threads):
    """From their beginning to their end."""
    scene = await save_scene(model, copy_threads)
    for tier, dram_tokens in (("dram", 1000), ("ssd", 20)):
        assert scene.rates.loads.seconds(tier, 39) is None
        scene.peer.dram_tokens = dram_tokens
        began_s = time.monotonic()
        for _ in range(3):
            await scene.load()
        found_s = scene.rates.loads.seconds(tier, 39)
        assert found_s is not None
        assert 0 < found_s <= time.monotonic() - began_s


async def test_a_load_that_was_delayed_says_nothing_about_its_tier(model, copy_threads):
    """Most of its time was spent by other work."""
    scene = await save_scene(model, copy_threads)
    for _ in range(3):
        _, kv, error = await scene.load(pauses=True)
        assert (kv.num_tokens, error) == (39, None)
    assert scene.rates.loads.seconds("dram", 39) is None


def test_an_arena_is_mapped_once():
    """Until there is another one, as after a restart of kvd."""
    calls = KvdCalls(small_layout(), Counters(), lambda arena, _layout: [arena])
    first, second = object(), object()
    view = calls.as_tensors(first)
    assert view == [first]
    assert calls.as_tensors(first) is view
    assert calls.as_tensors(second) == [second]


async def test_an_empty_history_is_not_requested(model, copy_threads):
    """A prompt of one token has no history."""
    scene = await save_scene(model, copy_threads)
    scene.peer.lineages.clear()
    request = LoadRequest(KEY, b"", scene.pool.new_kv(64), LoadPolicy.ALWAYS)
    begun = await scene.store.loads.begin(request)
    assert (begun.end_token, begun.grant) == (0, None)
    assert not scene.peer.lineages, "nobody was asked"


async def test_a_load_shows_that_kvd_works_again(model, copy_threads):
    """It is logged once."""
    scene = await save_scene(model, copy_threads, fail_at="prepare_load")
    with capture_logs() as lines:
        await scene.load()
        scene.peer.fail_at = ""
        await scene.load()
        await scene.load()
    assert [(line["event"], line.get("what")) for line in lines] == [
        ("session_store_failed", "load"),
        ("session_store_works_again", None),
    ]
