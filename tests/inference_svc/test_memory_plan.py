"""The memory of an engine's parts, by settings, device and free memory."""

from dataclasses import replace

import pytest
import torch

from inference_svc.config import InferenceSettings, SchedulerSettings
from inference_svc.core.compression import SnapKV
from inference_svc.core.errors import KvRoomError
from inference_svc.core.kv_room import KV_SHARE
from inference_svc.core.scheduling.step_plan import ON_CPU, ON_GPU, BatchBounds
from inference_svc.memory_plan import DeviceMemory, batch_bounds, plan_memory
from tests.memory_engine import loaded_model
from tests.models import build_windowed_model

CPU = torch.device("cpu")
BOUNDS = BatchBounds(max_running=2, max_loading=1, step_tokens=64, mixed_step_tokens=32)
RECOMPUTE = {"cache": {"mode": "recompute"}}


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


@pytest.mark.parametrize(("device", "usual"), [("cpu", ON_CPU), ("cuda:1", ON_GPU)])
def test_the_device_limits_a_batch_without_settings(device, usual):
    """Each limit separately; prompts beside answers get no more than prompts alone."""

    def bounds(**given):
        return batch_bounds(SchedulerSettings(**given), torch.device(device), 0, 0)

    assert bounds() == usual
    assert bounds(max_running=2, step_tokens=96) == BatchBounds(
        2, usual.max_loading, 96, mixed_step_tokens=96
    )
    assert bounds(max_loading=1, mixed_step_tokens=16) == BatchBounds(
        usual.max_running, 1, usual.step_tokens, mixed_step_tokens=16
    )


@pytest.mark.parametrize(("free", "running"), [(1440, 64), (1439, 32), (7, 8)])
def test_without_room_for_states_fewer_turns_run(free, running):
    """Unless a setting has a number; a request has five states, and residents have as many."""
    device, state_bytes, free_bytes = torch.device("cuda"), 1000, free * 2000

    def most_running(**given):
        settings = SchedulerSettings(**given)
        return batch_bounds(settings, device, state_bytes, free_bytes).max_running

    assert most_running() == running
    assert most_running(max_running=50) == 50


def plan(model, settings, free_tokens, *, saves=False):
    """Make a plan for so many tokens' room: KV may take a part of the free memory."""
    free_bytes = free_tokens * model[1].layout.token_bytes * KV_SHARE
    memory = DeviceMemory(free_bytes, 2 * free_bytes)
    settings = InferenceSettings.model_validate(settings)
    return plan_memory(settings, BOUNDS, *model, memory, saves=saves)


def test_token_slots_use_free_memory_or_the_configured_number(model):
    """As many as all requests together could fill, unless a setting has more."""
    most = BOUNDS.num_active * model[0].context_window
    assert plan(model, RECOMPUTE, 1000).limits.kv_slots == 1000
    assert plan(model, RECOMPUTE, 10 * most).limits.kv_slots == most
    assert plan(model, {}, 10 * most).limits.kv_slots == 2 * most  # with resident sessions
    asked = RECOMPUTE | {"scheduler": {"kv_tokens": 7 * most}}
    assert plan(model, asked, 10 * most).limits.kv_slots == 7 * most
    with pytest.raises(KvRoomError, match="kv_tokens"):  # more than the memory
        plan(model, asked, 7 * most // (2 * KV_SHARE) - 1)


def test_saving_has_its_own_slots(model):
    """A configured number, or as many as steps and requests need; at most half of all."""
    assert plan(model, {}, 1000).limits.write_slots == 0
    for given, slots in ((0, 200), (300, 300), (900, 500)):
        settings = {"scheduler": {"write_buffer_tokens": given}}
        limits = plan(model, settings, 1000, saves=True).limits
        assert (limits.write_slots, limits.kv_slots) == (slots, 1000 - slots)


def test_states_reduce_the_token_slots(model):
    """Those of requests and of as many residents as there is room for."""
    loaded, calibration = model
    layout = replace(calibration.layout, state_bytes=1000)
    placed = (loaded, replace(calibration, layout=layout))
    free_bytes = 4000 * 1000
    settings = InferenceSettings.model_validate(RECOMPUTE)
    memory = DeviceMemory(free_bytes, free_bytes)
    limits = plan_memory(settings, BOUNDS, *placed, memory, saves=False).limits
    assert limits.has_states
    num_states = BOUNDS.num_active * 5 + limits.most_residents
    slots = (free_bytes - num_states * 1000) // KV_SHARE // layout.token_bytes
    assert limits.kv_slots == min(slots, BOUNDS.num_active * loaded.context_window)


def test_windows_keep_tokens_that_policies_score(tmp_path):
    """Tokens before the window: a block, or those whose queries score the others."""
    model = loaded_model(build_windowed_model(tmp_path))
    block_tokens = model[1].layout.block_tokens
    found = plan(model, RECOMPUTE, 4000)
    assert found.groups is None
    assert found.limits.held_rows is found.windows.rows
    assert found.windows.rows.spare_tokens == max(block_tokens, SnapKV.window_tokens)
    assert found.windows.rows.step_tokens == BOUNDS.step_tokens
    by_kernels = RECOMPUTE | {"model": {"rotation": "triton"}}
    assert plan(model, by_kernels, 4000).windows is None


def test_pages_are_never_divided(model):
    """As many as fit, and at least one."""
    paged = RECOMPUTE | {"scheduler": {"working_kv": "pages", "page_tokens": 64}}
    limits = plan(model, paged, 1000).limits
    assert (limits.page_tokens, limits.kv_slots) == (64, 960)
    with pytest.raises(KvRoomError, match="page"):
        plan(model, paged, 63)
