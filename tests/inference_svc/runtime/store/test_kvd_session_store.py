"""The session store's saves, discards and ends with a failing peer: counted, and released."""

import asyncio

import pytest
import torch
from structlog.testing import capture_logs

from inference_svc.core.rates.rates import LoadPolicy
from inference_svc.core.retention import Retention
from inference_svc.runtime.engine.engine_request import as_token_bytes
from inference_svc.runtime.kv.copy_stream import CopyStream
from inference_svc.runtime.kv.layer_gate import StepClock, StepNotDoneError
from inference_svc.runtime.store.kvd_session_store import _in_groups
from inference_svc.runtime.store.session_store import LoadRequest
from shared.types.lineage import WHOLE
from shared.types.queue_feed import QueueFeed
from tests.inference_svc.runtime.store.failing_peer import KEY, PROMPT, Scene, save_scene

CPU = torch.device("cpu")


@pytest.mark.parametrize("fail_at", ["prepare_store", "complete_store", "slot"])
async def test_a_failed_save_is_counted_and_released(model, copy_threads, fail_at):
    """The turn is answered already; the next one recomputes."""
    scene = Scene(model, copy_threads, fail_at=fail_at)
    assert await scene.save() is None
    assert scene.counters.snapshot()["save_errors"] == 1
    assert not scene.peer.open_leases
    scene.peer.fail_at = ""
    assert (await scene.load())[0].end_token == 0


@pytest.mark.parametrize("fail_at", ["", "complete_store"])
async def test_a_cancelled_save_ends_as_cancelled(model, copy_threads, fail_at):
    """Even if kvd is gone, too: otherwise the service would not stop."""
    scene = Scene(model, copy_threads, fail_at=fail_at)
    _, buffer = scene.computed()
    clock = StepClock(len(model[1].layers), CPU)
    tokens = as_token_bytes(PROMPT)
    save = asyncio.create_task(scene.store.save(KEY, tokens, 0, buffer, clock))
    await asyncio.to_thread(clock_is_awaited, clock)
    save.cancel()
    clock.fail(StepNotDoneError("the step failed"))
    with pytest.raises(asyncio.CancelledError):
        await save
    assert not scene.peer.open_leases


async def test_a_save_of_a_failed_step_stores_nothing_and_is_no_error(model, copy_threads):
    """Its rows will be computed again."""
    scene = Scene(model, copy_threads)
    _, buffer = scene.computed()
    clock = StepClock(len(model[1].layers), CPU)
    clock.on_enqueued(clock.num_layers)
    save = asyncio.create_task(scene.store.save(KEY, as_token_bytes(PROMPT), 0, buffer, clock))
    await asyncio.to_thread(clock_is_awaited, clock)
    clock.fail(StepNotDoneError("the step failed"))
    assert await save is None
    assert not scene.peer.stored
    assert not scene.peer.open_leases
    assert scene.counters.snapshot()["save_errors"] == 0


async def test_a_save_holds_the_rows_it_copies(model, copy_threads):
    """They are lent again once the save has ended, whoever has freed them meanwhile."""
    scene = Scene(model, copy_threads)
    _, buffer = scene.computed()
    before = scene.pool.num_free
    clock = StepClock(len(model[1].layers), CPU)
    tokens = as_token_bytes(PROMPT[:16])
    save = asyncio.create_task(scene.store.save(KEY, tokens, 0, buffer, clock))
    await asyncio.to_thread(clock_is_awaited, clock)
    scene.pool.release(buffer)
    assert scene.pool.num_free == before
    clock.on_enqueued(clock.num_layers)
    clock.confirm()
    assert await save == ""
    assert scene.pool.num_free == before + 64


def clock_is_awaited(clock):
    """Return when a thread is blocked at a gate."""
    while not clock._changed._waiters:
        pass


@pytest.mark.parametrize("fail_at", ["", "discard"])
async def test_kv_of_a_deleted_session_is_dropped(model, copy_threads, fail_at):
    """Kvd is told of its end, even later, and even if other servers have some of it."""
    scene = await save_scene(model, copy_threads, fail_at=fail_at)
    await scene.store.forget(KEY, as_token_bytes(PROMPT))
    assert scene.peer.ended == [KEY]
    assert bool(scene.peer.stored) == bool(fail_at)
    await scene.store.forget(KEY, b"")  # a session without turns has none


async def test_an_end_that_does_not_reach_kvd_costs_nothing(model, copy_threads):
    """The client reports it later; no turn waits for that."""
    scene = Scene(model, copy_threads, fail_at="end_session")
    with capture_logs() as lines:
        await scene.store.end_session(KEY)
    assert scene.peer.ended == [KEY]
    assert [(line["event"], line["what"]) for line in lines] == [
        ("session_store_failed", "end_session")
    ]


async def test_retention_is_requested_for_whole_blocks(model, copy_threads):
    """A prefix has its own name, which follows from its tokens."""
    scene = Scene(model, copy_threads)
    block_tokens = scene.store._calibration.layout.block_tokens
    tokens = as_token_bytes(range(2 * block_tokens + 1))
    for retention, prefix in (
        (Retention(60, 3600), tokens),
        (Retention(0, 3600), tokens[:-4]),
        (Retention(0, 3600), tokens[: 4 * block_tokens]),
        (Retention(0, 3600), tokens[: 4 * block_tokens - 4]),
        (Retention(60), tokens),
    ):
        await scene.store.retain(KEY, retention, prefix)
    wishes = [(retain_s, len(shared) // 4) for _, retain_s, shared in scene.peer.retained]
    two = 2 * block_tokens
    assert wishes == [(60, 0), (3600, two), (3600, two), (3600, block_tokens), (60, 0)]
    session, first, again, shorter, _ = [name for name, *_ in scene.peer.retained]
    assert session == KEY.session_id
    assert first == again != shorter
    assert first.startswith("prefix-")


async def test_a_retention_that_does_not_reach_kvd_costs_nothing(model, copy_threads):
    """It is lost, and logged once."""
    scene = Scene(model, copy_threads, fail_at="retain_session")
    with capture_logs() as lines:
        for _ in range(2):
            await scene.store.retain(KEY, Retention(60, 60), b"")
    assert [(line["event"], line["what"]) for line in lines] == [("session_store_failed", "retain")]


async def test_expected_tools_are_reported_and_counted(model, copy_threads):
    """Or lost, and counted: kvd is too old, or absent; that is logged once."""
    scene = Scene(model, copy_threads)
    await scene.store.expect(KEY, ("bash",), superseded=False)
    await scene.store.expect(KEY, (), superseded=True)
    assert scene.peer.expected == [(KEY, ("bash",), False), (KEY, (), True)]
    scene.peer.is_old = True
    await scene.store.expect(KEY, ("bash",), superseded=False)
    scene.peer.fail_at = "expect_session"
    with capture_logs() as lines:
        for _ in range(2):
            await scene.store.expect(KEY, ("bash",), superseded=False)
    assert [(line["event"], line["what"]) for line in lines] == [("session_store_failed", "expect")]
    counts = scene.counters.snapshot()
    assert (counts["expectations"], counts["expectations_lost"]) == (2, 3)


async def test_trouble_is_logged_once_until_it_ends(model, copy_threads):
    """Each kind of it, with the first call; then that kvd works again."""
    scene = Scene(model, copy_threads, fail_at="discard")
    token_ids = as_token_bytes(PROMPT)
    with capture_logs() as lines:
        await scene.store.forget(KEY, token_ids)
        await scene.store.discard(KEY, token_ids, ((0, 1),))
        scene.peer.fail_at = "prepare_store nonsense"
        await scene.save()
        scene.peer.fail_at = ""
        await scene.save()
        await scene.save()
    assert [(line["event"], line.get("what"), line.get("after")) for line in lines] == [
        ("session_store_failed", "forget", None),
        ("session_store_failed", "save", None),
        ("session_store_works_again", None, "kvd_protocol"),
    ]


async def test_a_discard_has_its_lineage(model, copy_threads):
    """So have stores and loads."""
    scene = await save_scene(model, copy_threads)
    token_ids, ranges = as_token_bytes(PROMPT), ((0, 10), (20, 21))
    await scene.store.discard(KEY, token_ids, ranges, WHOLE)
    after = WHOLE.after(token_ids, ranges)
    assert len(scene.peer.stored) == 4 * 29
    await scene.store.discard(KEY, scene.peer.stored, ((0, 1),), after)
    await scene.store.save(KEY, token_ids, 0, scene.computed()[1], lineage=after)
    kv = scene.pool.new_kv(64)
    request = LoadRequest(KEY, token_ids, kv, LoadPolicy.ALWAYS, lineage=after)
    await scene.store.loads.cancel(await scene.store.loads.begin(request))
    assert scene.counters.snapshot()["store_discards"] == 2
    assert set(scene.peer.lineages) == {None, WHOLE, after}, "not named is not whole"
    assert scene.peer.lineages[-4:] == [after] * 4


@pytest.mark.parametrize("fail_at", ["discard", "discard nonsense"])
async def test_a_discard_that_does_not_reach_kvd_is_counted(model, copy_threads, fail_at):
    """There is no error: a later load misses the tokens."""
    scene = await save_scene(model, copy_threads)
    scene.peer.fail_at = fail_at
    with capture_logs() as lines:
        await scene.store.discard(KEY, as_token_bytes(PROMPT), ((0, 10),))
    assert [(line["event"], line["what"]) for line in lines] == [
        ("session_store_failed", "discard")
    ]
    assert scene.counters.snapshot()["store_discards_failed"] == 1
    assert scene.counters.snapshot()["store_discards"] == 0
    begun, _, _ = await scene.load()
    assert begun.end_token == 39


async def test_a_save_of_stored_tokens_waits_for_its_step(model, copy_threads):
    """The step writes to the buffer all the same, which must not be freed before."""
    scene = Scene(model, copy_threads)
    assert await scene.save() == ""
    clock = StepClock(len(model[1].layers), CPU)
    buffer = scene.computed()[1]
    saving = asyncio.create_task(scene.store.save(KEY, as_token_bytes(PROMPT), 0, buffer, clock))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not saving.done()
    clock.open(clock.num_layers)
    clock.confirm()
    assert await saving == ""


class WatchedClock(StepClock):
    """Records which layers are waited for."""

    def wait(self, layer_index, *limits):
        """See StepClock."""
        self.awaited = [*getattr(self, "awaited", []), layer_index]
        super().wait(layer_index, *limits)


def test_a_save_wakes_up_for_several_layers_at_once():
    """At the last layer of each quarter, and for all that are computed."""
    clock = WatchedClock(10, CPU)
    wait_layer = _in_groups(clock, CopyStream(CPU))
    ends = []
    for num_layers in (3, 7, 10):
        clock.on_enqueued(num_layers)
        ends.append(wait_layer(ends[-1] if ends else 0))
    assert (clock.awaited, ends) == ([2, 5, 8], [3, 7, 10])


async def test_kvd_gets_the_queue(model, copy_threads):
    """It reads ahead accordingly."""
    scene, feed = Scene(model, copy_threads), QueueFeed()
    scene.store.follow_queue(feed)
    assert scene.peer.feed is feed
