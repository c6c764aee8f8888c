"""When stored histories are not loaded: computing is faster, time is up, the service stops."""

import asyncio
import time

import pytest

from inference_svc.core.rates.rates import LoadPolicy, pairs
from inference_svc.runtime.engine.engine_request import as_token_bytes
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.store.session_store import BegunLoad, LoadRequest
from shared.kvd_client.grants import StoreGrant
from shared.types.errors import LoadFailedError
from shared.types.granted_slots import LoadSpan, Lookup
from tests.inference_svc.runtime.store.failing_peer import KEY, PROMPT, Peer, Scene, save_scene


def know(rates, **load_s):
    """Make rates of loads by tier, in seconds per token; computing a token takes a millisecond."""
    for num_tokens in (16, 64, 256, 1024):
        for _ in range(3):
            for tier, seconds in load_s.items():
                rates.loads.note(tier, num_tokens, seconds * num_tokens)
            rates.steps.note(num_tokens, pairs(0, num_tokens), 1e-3 * num_tokens)
            rates.steps.note(1, 9 * num_tokens, 1e-3)


async def test_kvd_is_not_asked_if_computing_is_faster(model, copy_threads):
    """Not even its DRAM is fast enough."""
    scene = await save_scene(model, copy_threads)
    know(scene.rates, dram=10.0, ssd=10.0)
    scene.peer.lineages.clear()
    begun, _, _ = await scene.load(LoadPolicy.AUTO)
    assert (begun.end_token, begun.reason, begun.grant) == (0, "recompute_cheaper", None)
    assert not scene.peer.lineages, "nobody was asked"
    assert scene.counters.snapshot()["loads_refused"] == 1
    assert (await scene.load(LoadPolicy.ALWAYS))[0].end_token == 39


async def test_a_history_on_ssd_is_not_read_if_that_takes_longer(model, copy_threads):
    """kvd reports the tier, and does not read."""
    scene = await save_scene(model, copy_threads)
    scene.peer.dram_tokens = 0
    know(scene.rates, dram=1e-9, ssd=10.0)
    begun, _, _ = await scene.load(LoadPolicy.AUTO)
    assert (begun.end_token, begun.reason) == (0, "recompute_cheaper")
    counts = scene.counters.snapshot()
    assert (counts["loads_refused"], counts["load_misses"]) == (1, 1)
    assert not scene.peer.open_leases


async def test_a_load_without_time_left_is_a_miss(model, copy_threads):
    """With its reason, and no error."""
    saved = await save_scene(model, copy_threads)
    scene = Scene(model, copy_threads, deadline_s=0.0, peer=saved.peer)
    begun, _, _ = await scene.load()
    assert (begun.end_token, begun.reason) == (0, "deadline")
    assert scene.counters.snapshot()["load_errors"] == 0
    assert not scene.peer.open_leases


async def test_a_fetched_session_is_waited_for_once(model, copy_threads):
    """With the first request, as long as it may pay: rates are unknown yet."""
    scene = await save_scene(model, copy_threads)
    assert (await scene.load(LoadPolicy.AUTO, history_tokens=30))[0].end_token == 39
    [first_s, *others_s] = scene.peer.fetch_waits_s
    assert (first_s > 0, set(others_s)) == (True, {0.0})
    assert set(scene.peer.histories) == {30}


async def test_the_wait_for_a_fetch_is_not_part_of_the_load(model, copy_threads):
    """The load's deadline and measured rate start after it."""
    scene, wait_s = await save_scene(model, copy_threads), 0.1
    scene.peer.prepare_load = waiting = WaitingLoad(scene.peer, wait_s)
    first_s = time.monotonic()
    for _ in range(3):
        waiting.waits, asked_s = True, time.monotonic()
        begun, _, error = await scene.load()
        assert (begun.end_token, error) == (39, None)
        assert begun.began_s >= asked_s + wait_s
    all_loads_s = time.monotonic() - first_s - 3 * wait_s
    assert scene.rates.loads.seconds("dram", 39) <= all_loads_s


async def test_a_reported_wait_is_at_most_the_elapsed_time(model, copy_threads):
    """Whatever kvd reports: it cannot extend the load's deadline."""
    scene = await save_scene(model, copy_threads)
    scene.peer.fetch_waited_s = 1e9
    begun, _, error = await scene.load()
    assert (begun.end_token, error) == (39, None)
    assert begun.began_s <= time.monotonic()


class WaitingLoad:
    """Delays the peer's first answer, and reports a wait."""

    def __init__(self, peer, wait_s):
        self.peer, self.wait_s, self.waits = peer, wait_s, True
        self.prepare_load = peer.prepare_load

    async def __call__(self, *args, **kwargs):
        """See Peer.prepare_load."""
        self.peer.fetch_waited_s = self.wait_s if self.waits else 0.0
        await asyncio.sleep(self.peer.fetch_waited_s)
        self.waits = False
        return await self.prepare_load(*args, **kwargs)


async def test_a_cancelled_load_fails_the_gate_and_releases_its_lease(model, copy_threads):
    """A forward that waits for it continues; the cancellation takes effect, too."""
    saved = await save_scene(model, copy_threads, grant_tokens=64, pending="never")
    scene = Scene(model, copy_threads, deadline_s=0.2, peer=saved.peer)
    kv = scene.pool.new_kv(64)
    request = LoadRequest(KEY, as_token_bytes(PROMPT[:-1]), kv, LoadPolicy.ALWAYS)
    begun = await scene.store.loads.begin(request)
    gate = LayerGate(len(model[1].layers))
    tail = scene.pool.new_write_buffer(begun.tail_from, 64)
    load = scene.store.loads.finish(begun, kv, tail, gate, range(gate.num_layers))
    task = asyncio.create_task(load)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert isinstance(gate.error, LoadFailedError)
    assert not scene.peer.open_leases
    assert scene.counters.snapshot()["load_errors"] == 0


class TimedPeer(Peer):
    """Records the time limits of stores."""

    async def prepare_store(self, key, token_ids, from_token, deadline_s, *, lineage, load_ends=()):
        """See Peer."""
        self.given_s = [*getattr(self, "given_s", []), deadline_s]
        return await super().prepare_store(key, token_ids, from_token, deadline_s, lineage=lineage)


async def test_all_grants_of_a_save_share_its_time(model, copy_threads):
    """Each has the time that the earlier ones have left."""
    peer = TimedPeer(model[1].layout)
    scene = Scene(model, copy_threads, deadline_s=1000.0, peer=peer)
    assert await scene.save() == ""
    assert len(peer.given_s) == 3
    assert 1000.0 >= peer.given_s[0] > peer.given_s[1] > peer.given_s[2] > 0.0


class StingyPeer(Peer):
    """Has no room, but says that there is more."""

    async def prepare_store(self, key, token_ids, from_token, deadline_s, *, lineage, load_ends=()):
        """See Peer."""
        return StoreGrant(0, (), from_token, more=True, refused_reason="", arena=self.arena)


async def test_a_save_without_progress_ends(model, copy_threads):
    """Otherwise it would ask again for ever."""
    scene = Scene(model, copy_threads, peer=StingyPeer(model[1].layout))
    async with asyncio.timeout(60):  # otherwise it would not end
        assert await scene.save() == ""


def test_a_store_reports_whether_kvd_is_attached(model, copy_threads):
    """For people."""
    scene = Scene(model, copy_threads)
    assert (scene.store.state, scene.store.saves) == ("attached", True)
    scene.peer.attached = False
    assert scene.store.state == "detached"


async def test_a_short_last_block_counts_as_it_is(model, copy_threads):
    """Its copied rows stay: the next block is stored behind it, and it is not loaded again."""
    peer = ForgetfulPeer(model[1].layout, grant_tokens=10)
    scene = Scene(model, copy_threads, peer=peer)
    await scene.save()
    begun, kv, error = await scene.load()
    assert (begun.grant, error) == (None, None)
    assert (begun.end_token, begun.tail_from, kv.num_tokens) == (10, 10, 10)
    assert sum(begun.tier_tokens.values()) == 10


async def test_a_load_whose_session_disappears_leaves_nothing(model, copy_threads):
    """It is requested again, and there is nothing then."""
    peer = ForgetfulPeer(model[1].layout, pending="fails")
    scene = Scene(model, copy_threads, peer=peer)
    await scene.save()
    begun, _, error = await scene.load()
    assert (begun.end_token, begun.grant, error) == (0, None, None)
    assert scene.counters.snapshot()["loads_retried"] == 1
    assert not peer.open_leases


def test_only_a_short_last_block_is_stored_again(model, copy_threads):
    """With the tokens behind it; a full one is followed by another."""
    scene, size = Scene(model, copy_threads), model[1].layout.block_tokens
    for last_tokens, tail_from in ((size, 2 * size), (size - 1, size)):
        spans = (LoadSpan(0, 0, size, 0, 1, "dram"), LoadSpan(1, 0, last_tokens, size, 1, "ssd"))
        grant = scene.peer.load_grant(Lookup.HIT, 1, spans, size + last_tokens, False)
        begun = BegunLoad()
        scene.store.loads._add_spans(begun, grant)
        assert (begun.end_token, begun.tail_from) == (size + last_tokens, tail_from)
        assert begun.tier_tokens == {"dram": size, "ssd": last_tokens}


class ForgetfulPeer(Peer):
    """Loses the rest of a session while its first part is copied."""

    async def complete_load(self, grant):
        await super().complete_load(grant)
        self.stored = b""
