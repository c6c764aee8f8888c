"""The session store with a peer that fails or answers nonsense: a miss, and released."""

import pytest

from inference_svc.core.rates.rates import LoadPolicy, pairs
from inference_svc.runtime.engine.engine_request import as_token_bytes
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.store.session_store import LoadRequest, NoSessionStore
from shared.types.errors import LoadFailedError
from shared.types.load_choice import IDLE, Traffic
from tests.inference_svc.runtime.store.failing_peer import KEY, PROMPT, Scene, save_scene


async def test_saved_tokens_are_loaded_except_the_last(model, copy_threads):
    """In several grants, each completed; the logits after loading are those of computing."""
    scene = await save_scene(model, copy_threads)
    begun, kv, error = await scene.load()
    assert error is None
    assert (begun.end_token, begun.tier_tokens, begun.reason) == (39, {"dram": 39}, "")
    assert not scene.peer.open_leases
    assert scene.counters.snapshot()["load_hits"] == 1
    assert scene.counters.snapshot()["stored_tokens"] == 40
    scene.check_logits(kv)


@pytest.mark.parametrize(
    "fail_at",
    ["prepare_load", "prepare_load nonsense", "second prepare_load", "slot"],
)
async def test_an_early_failure_is_a_miss_and_leaves_no_rows(model, copy_threads, fail_at):
    """No lease stays open, and the next load may succeed."""
    scene = await save_scene(model, copy_threads)
    scene.peer.fail_at = fail_at
    begun, kv, _ = await scene.load()
    assert (begun.end_token, kv.num_tokens, begun.tier_tokens) == (0, 0, {})
    assert begun.reason in {"kvd_unavailable", "kvd_protocol", "copy_failed"}
    assert not scene.peer.open_leases
    assert scene.counters.snapshot()["load_errors"] == 1
    scene.peer.fail_at = ""
    assert (await scene.load())[0].end_token == 39


async def test_a_partly_stored_history_is_loaded_in_part(model, copy_threads):
    """And the result says that there was no more."""
    scene = await save_scene(model, copy_threads)
    scene.peer.stored = scene.peer.stored[: 4 * 16]
    begun, kv, error = await scene.load()
    assert (begun.end_token, begun.reason) == (16, "partial")
    assert (kv.num_tokens, error) == (16, None)


async def test_a_load_that_cannot_continue_leaves_nothing(model, copy_threads):
    """Its first grants' rows are dropped."""
    scene = await save_scene(model, copy_threads, fail_at="second prepare_load")
    kv = scene.pool.new_kv(64)
    request = LoadRequest(KEY, as_token_bytes(PROMPT[:-1]), kv, LoadPolicy.ALWAYS)
    begun = await scene.store.loads.begin(request)
    assert (begun.end_token, begun.tail_from, begun.grant) == (0, 0, None)
    assert (kv.num_tokens, kv.gate) == (0, None)


@pytest.mark.parametrize("fail_at", ["complete_load", "complete_load nonsense"])
async def test_an_unconfirmed_lease_fails_the_gate(model, copy_threads, fail_at):
    """Its rows may have changed while they were copied: results over them are void."""
    scene = await save_scene(model, copy_threads, grant_tokens=64)
    scene.peer.fail_at = fail_at
    begun, _, error = await scene.load()
    assert begun.end_token == 39
    assert isinstance(error, LoadFailedError), "who waits for it computes instead"
    counts = scene.counters.snapshot()
    assert (counts["load_failed_late"], counts["load_errors"]) == (1, 1)
    assert not scene.peer.open_leases


async def test_an_abandoned_load_releases_its_lease(model, copy_threads):
    """None of it is copied."""
    scene = await save_scene(model, copy_threads, grant_tokens=64)
    kv = scene.pool.new_kv(64)
    request = LoadRequest(KEY, as_token_bytes(PROMPT[:-1]), kv, LoadPolicy.ALWAYS)
    begun = await scene.store.loads.begin(request)
    assert scene.peer.open_leases
    await scene.store.loads.cancel(begun)
    assert not scene.peer.open_leases


@pytest.mark.parametrize("pending", ["arrives", "fails"])
async def test_a_pending_load_progresses_layer_by_layer(model, copy_threads, pending):
    """Earlier grants are requested again if they fail."""
    scene = await save_scene(model, copy_threads, pending=pending)
    begun, kv, error = await scene.load()
    assert (begun.end_token, begun.tier_tokens, begun.reason) == (39, {"dram": 39}, "")
    assert error is None
    assert not scene.peer.open_leases
    assert scene.counters.snapshot()["loads_retried"] == (1 if pending == "fails" else 0)
    assert scene.counters.snapshot()["load_errors"] == 0
    scene.check_logits(kv)


@pytest.mark.parametrize("pending", ["fails", "never"])
async def test_a_load_that_breaks_off_fails_the_gate(model, copy_threads, pending):
    """A forward waits no longer than the deadline; the engine then computes."""
    saved = await save_scene(model, copy_threads, grant_tokens=64, pending=pending)
    scene = Scene(model, copy_threads, deadline_s=0.2, peer=saved.peer)
    _, _, error = await scene.load()
    assert isinstance(error, LoadFailedError)
    assert not scene.peer.open_leases


async def half_on_slow_ssd(model, threads):
    """Make a scene whose first block is in DRAM; a token from SSD takes 10 s."""
    scene = await save_scene(model, threads)
    scene.peer.dram_tokens = 16
    for num_tokens in (16, 64, 256, 1024):
        for _ in range(3):
            scene.rates.loads.note("ssd", num_tokens, 10.0 * num_tokens)
            scene.rates.loads.note("dram", num_tokens, 1e-9 * num_tokens)
            scene.rates.steps.note(num_tokens, pairs(0, num_tokens), 1e-3 * num_tokens)
            scene.rates.steps.note(1, 9 * num_tokens, 1e-3)
    return scene


async def test_a_slow_read_is_waited_for_if_many_turns_would_wait(model, copy_threads):
    """Ten thousand times as long is not too long for a hundred thousand turns behind."""
    scene = await half_on_slow_ssd(model, copy_threads)
    many = Traffic(num_waiting=100_000, num_places=10**9)
    begun, _, error = await scene.load(LoadPolicy.AUTO, many)
    assert error is None
    assert begun.tier_tokens == {"dram": 16, "ssd": 23}
    assert scene.counters.snapshot()["loads_refused"] == 0


async def test_a_read_slower_than_computing_is_not_waited_for(model, copy_threads):
    """DRAM's part is loaded, SSD's is recomputed; with `always` both are loaded."""
    scene = await half_on_slow_ssd(model, copy_threads)
    begun, kv, _ = await scene.load(LoadPolicy.AUTO)
    assert (begun.end_token, begun.reason) == (16, "recompute_cheaper")
    assert begun.grant is not None, "it is copied while the turn computes"
    assert kv.num_tokens == 16
    assert not scene.peer.open_leases
    assert scene.counters.snapshot()["loads_refused"] == 1
    begun, kv, _ = await scene.load(LoadPolicy.ALWAYS)
    assert begun.tier_tokens == {"dram": 16, "ssd": 23}
    scene.check_logits(kv)


async def test_a_part_not_worth_reading_from_ssd_may_be_in_dram(model, copy_threads):
    """kvd is asked for its tier: reading little takes nearly as long as much."""
    scene = await save_scene(model, copy_threads, grant_tokens=20)
    for num_tokens in (16, 64, 256, 1024):
        for _ in range(3):
            scene.rates.loads.note("ssd", num_tokens, 30e-3 + 1e-9 * num_tokens)
            scene.rates.loads.note("dram", num_tokens, 1e-9 * num_tokens)
            scene.rates.steps.note(num_tokens, pairs(0, num_tokens), 1e-3 * num_tokens)
            scene.rates.steps.note(1, 9 * num_tokens, 1e-3)
    chooser = scene.store.loads._chooser
    wanted = [chooser.should_load(LoadPolicy.AUTO, "ssd", start, 39, IDLE) for start in (0, 20)]
    assert wanted == [True, False]
    begun, kv, _ = await scene.load(LoadPolicy.AUTO)
    assert (begun.end_token, begun.reason) == (39, "")
    scene.check_logits(kv)


@pytest.mark.parametrize("part", ["kv", "tail"])
async def test_a_load_holds_the_rows_that_it_fills(model, copy_threads, part):
    """A cancelled turn frees its rows; they are lent again once the copy has ended."""
    scene = await save_scene(model, copy_threads, grant_tokens=64)
    lent = {"kv": scene.pool.new_kv(64)}
    request = LoadRequest(KEY, as_token_bytes(PROMPT[:-1]), lent["kv"], LoadPolicy.ALWAYS)
    begun = await scene.store.loads.begin(request)
    lent["tail"] = scene.pool.new_write_buffer(begun.tail_from, 64)
    gate = LayerGate(len(model[1].layers))
    before, seen = scene.pool.num_free, []

    def cancel():
        if not seen:
            scene.pool.release(lent[part])
            seen.append(scene.pool.num_free)

    gate.on_change = cancel
    layers = range(gate.num_layers)
    await scene.store.loads.finish(begun, lent["kv"], lent["tail"], gate, layers)
    assert gate.error is None
    assert seen == [before]
    assert scene.pool.num_free == before + 64


async def test_load_policy_never_asks_for_nothing(model, copy_threads):
    """History is saved, and recomputed all the same."""
    scene = await save_scene(model, copy_threads)
    assert (await scene.load(LoadPolicy.NEVER))[0].reason == "load_policy_never"


async def test_without_a_store_nothing_is_found(model, copy_threads):
    """With that reason; to load or to save is a bug."""
    scene, store = Scene(model, copy_threads), NoSessionStore()
    kv, buffer = scene.computed()
    token_ids = as_token_bytes(PROMPT)
    begun = await store.loads.begin(LoadRequest(KEY, token_ids, kv, LoadPolicy.ALWAYS))
    assert (begun.end_token, begun.reason, begun.grant) == (0, "mode_recompute", None)
    with pytest.raises(AssertionError, match="nothing was begun"):
        await store.loads.finish(begun, kv, None, LayerGate(2), range(2))
    with pytest.raises(AssertionError, match="nothing is saved"):
        await store.save(KEY, token_ids, 0, buffer)
