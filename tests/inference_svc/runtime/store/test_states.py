"""States between working memory and a peer in kvd's place: what is stored and loaded."""

import pytest
import torch

from inference_svc.core.kv_room import MOST_UNSAVED_STATES
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.engine.engine_request import as_token_bytes
from inference_svc.runtime.model.model_loader import load_model
from inference_svc.runtime.store.kvd_loads import NO_STATE
from tests.inference_svc.runtime.store.failing_peer import KEY, PROMPT, Scene
from tests.models import build_hybrid_model

STORED = len(PROMPT) - 1  # the last token is always computed


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    loaded = load_model(build_hybrid_model(tmp_path_factory.mktemp("hybrid")), "float32", "cpu")
    return loaded, calibrate(loaded)


@pytest.mark.parametrize("pending", ["", "arrives"])
@pytest.mark.parametrize("pauses", [False, True])
async def test_a_load_has_the_state_behind_its_tokens(hybrid, copy_threads, pending, pauses):
    """New tokens have the same logits behind loaded and computed ones."""
    scene = Scene(hybrid, copy_threads, pending=pending, grant_tokens=20)
    assert await scene.save(marks=(20,)) == ""
    scene.peer.stored = scene.peer.stored[: 20 * 4]
    begun, kv, error = await scene.load(pauses=pauses)
    assert (begun.end_token, error) == (20, None)
    assert kv.states.num_tokens == 20
    scene.check_logits(kv)
    counters = scene.counters.snapshot()
    assert (counters["stored_states"], counters["loaded_states"]) == (1, 1)
    assert not scene.peer.open_leases


@pytest.mark.parametrize("marks", [(), (20,)])
async def test_tokens_without_their_state_are_a_miss(hybrid, copy_threads, marks):
    """They are released, and the turn is computed."""
    scene = Scene(hybrid, copy_threads, grant_tokens=20)
    assert await scene.save(marks) == ""
    begun, kv, error = await scene.load()
    assert (begun.end_token, begun.reason, error) == (0, NO_STATE, None)
    assert (kv.num_tokens, kv.states.num_tokens) == (0, 0)
    assert not scene.peer.open_leases
    scene.check_logits(kv)


async def test_a_state_of_another_position_is_refused(hybrid, copy_threads):
    """The state has its position; the load fails late, and the turn is computed."""
    scene = Scene(hybrid, copy_threads, grant_tokens=20)
    assert await scene.save(marks=(16, 20)) == ""
    scene.peer.stored = scene.peer.stored[: 20 * 4]
    scene.peer.states[20] = scene.peer.states[16]
    _, _, error = await scene.load()
    assert "a state after 16 tokens" in str(error)
    assert scene.counters.snapshot()["load_failed_late"] == 1
    assert not scene.peer.open_leases


async def test_a_states_last_slot_is_padded_with_zeros(hybrid, copy_threads):
    """Its last slot has zeros where it ends."""
    scene = Scene(hybrid, copy_threads, grant_tokens=20)
    slots = torch.frombuffer(scene.peer.arena.memory, dtype=torch.uint8)
    slots.fill_(7)
    assert await scene.save(marks=(20,)) == ""
    layout = hybrid[1].layout
    *_, last = scene.peer.states[20]
    end = layout.state_bytes - (layout.state_slots - 1) * layout.block_bytes
    slot = slots[last * layout.block_bytes : (last + 1) * layout.block_bytes]
    assert not slot[end:].any()


async def test_a_state_dropped_meanwhile_is_stored_all_the_same(hybrid, copy_threads, monkeypatch):
    """The turn continues while kvd is asked; an offered state stays until it is copied."""
    scene = Scene(hybrid, copy_threads, grant_tokens=40)
    _, buffer = scene.computed(marks=(20,))
    prepare = scene.peer.prepare_store

    async def prepared(*args, **kwargs):
        grant = await prepare(*args, **kwargs)
        buffer.states.clear()
        return grant

    monkeypatch.setattr(scene.peer, "prepare_store", prepared)
    assert await scene.store.save(KEY, as_token_bytes(PROMPT), 0, buffer) == ""
    assert list(scene.peer.states) == [20]
    scene.peer.stored = scene.peer.stored[: 20 * 4]
    _, kv, error = await scene.load()
    assert (kv.states.num_tokens, error) == (20, None)
    scene.check_logits(kv)


def test_few_states_wait_to_be_stored(hybrid, copy_threads):
    """The first and the newest ones; a noted state does not change."""
    scene = Scene(hybrid, copy_threads)
    kv, buffer = scene.computed(marks=(4, 8, 12, 16, 20, 24))
    assert list(buffer.states) == [4, 16, 20, 24]
    assert len(buffer.states) == MOST_UNSAVED_STATES
    assert [states.num_tokens for states in buffer.states.values()] == [4, 16, 20, 24]
    packed = buffer.states[24].snapshot()
    assert not torch.equal(packed, kv.states.snapshot())
    buffer.forget_states([4, 16, 20])
    assert list(buffer.states) == [24]
