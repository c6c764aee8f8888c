"""When histories in kvd are not loaded: computing is cheaper, time is over, the service stops."""

import asyncio

import pytest

from inference_svc.core.rates.rates import LoadPolicy, pairs
from inference_svc.runtime.engine.engine_request import as_token_bytes
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.store.session_store import LoadRequest
from shared.types.errors import LoadFailedError
from tests.inference_svc.runtime.store.failing_peer import KEY, PROMPT, Peer, Scene, saved_scene


def know(rates, **load_s):
    """Rates of loads by tier, in seconds a token; a token computed takes a millisecond."""
    for num_tokens in (16, 64, 256, 1024):
        for _ in range(3):
            for tier, seconds in load_s.items():
                rates.loads.note(tier, num_tokens, seconds * num_tokens)
            rates.steps.note(num_tokens, pairs(0, num_tokens), 1e-3 * num_tokens)
            rates.steps.note(1, 9 * num_tokens, 1e-3)


async def test_kvd_is_not_asked_for_what_is_computed_sooner(model, copy_threads):
    """Not even its memory is fast enough."""
    scene = await saved_scene(model, copy_threads)
    know(scene.rates, dram=10.0, ssd=10.0)
    scene.peer.lineages.clear()
    begun, _, _ = await scene.load(LoadPolicy.AUTO)
    assert (begun.end_token, begun.reason, begun.grant) == (0, "recompute_cheaper", None)
    assert not scene.peer.lineages, "nobody was asked"
    assert scene.counters.snapshot()["loads_refused"] == 1
    assert (await scene.load(LoadPolicy.ALWAYS))[0].end_token == 39


async def test_what_is_all_on_ssd_is_not_read_if_that_takes_longer(model, copy_threads):
    """kvd says where it is, and does not read it."""
    scene = await saved_scene(model, copy_threads)
    scene.peer.dram_tokens = 0
    know(scene.rates, dram=1e-9, ssd=10.0)
    begun, _, _ = await scene.load(LoadPolicy.AUTO)
    assert (begun.end_token, begun.reason) == (0, "recompute_cheaper")
    counts = scene.counters.snapshot()
    assert (counts["loads_refused"], counts["load_misses"]) == (1, 1)
    assert not scene.peer.open_leases


async def test_a_load_that_has_no_time_left_is_a_miss(model, copy_threads):
    """With its reason, and no error."""
    saved = await saved_scene(model, copy_threads)
    scene = Scene(model, copy_threads, deadline_s=0.0, peer=saved.peer)
    begun, _, _ = await scene.load()
    assert (begun.end_token, begun.reason) == (0, "deadline")
    assert scene.counters.snapshot()["load_errors"] == 0
    assert not scene.peer.open_leases


async def test_a_load_that_is_cancelled_fails_the_gate_and_returns_its_lease(model, copy_threads):
    """Whoever waits in a forward goes on; the cancellation goes on, too."""
    saved = await saved_scene(model, copy_threads, grant_tokens=64, pending="never")
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
    """Notes how much time stores are given."""

    async def prepare_store(self, key, token_ids, from_token, deadline_s, *, lineage):
        """See Peer."""
        self.given_s = [*getattr(self, "given_s", []), deadline_s]
        return await super().prepare_store(key, token_ids, from_token, deadline_s, lineage=lineage)


async def test_all_grants_of_a_save_share_its_time(model, copy_threads):
    """Each has what those before it have left."""
    peer = TimedPeer(model[1].layout)
    scene = Scene(model, copy_threads, deadline_s=1000.0, peer=peer)
    assert await scene.save() == ""
    assert len(peer.given_s) == 3
    assert 1000.0 >= peer.given_s[0] > peer.given_s[1] > peer.given_s[2] > 0.0


def test_a_store_says_whether_kvd_is_there(model, copy_threads):
    """For people."""
    scene = Scene(model, copy_threads)
    assert scene.store.state == "attached"
    scene.peer.attached = False
    assert scene.store.state == "detached"


async def test_a_short_block_that_nothing_follows_counts_as_it_is(model, copy_threads):
    """What was copied is there: the next block is stored behind it, and it is not loaded again."""
    peer = ForgetfulPeer(model[1].layout, grant_tokens=10)
    scene = Scene(model, copy_threads, peer=peer)
    await scene.save()
    begun, kv, error = await scene.load()
    assert (begun.grant, error) == (None, None)
    assert (begun.end_token, begun.tail_from, kv.num_tokens) == (10, 10, 10)
    assert sum(begun.tier_tokens.values()) == 10


class ForgetfulPeer(Peer):
    """Loses the rest of a session while the first part of it is copied."""

    async def complete_load(self, grant):
        await super().complete_load(grant)
        self.stored = b""
