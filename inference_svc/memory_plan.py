"""How much of a device's memory an engine takes for what, before it takes any.

    batch     how many requests run and load at once, and how many tokens a step has
    layers    what sequences hold in layers with a window, and which layers share pages
    states    those of recurrent layers: how many sessions keep theirs, beside the requests
    slots     of the rest: for working KV, and for what waits to be stored

Settings decide, or else the device and what is free on it. What is free comes in as a number.
"""

from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch

from inference_svc.config import InferenceSettings, SchedulerSettings
from inference_svc.core.compression import SnapKV
from inference_svc.core.kv_room import (
    configured_slots,
    requests_with_states,
    residents_with_states,
    slots_of_free_memory,
    states_of_requests,
    whole_pages,
)
from inference_svc.core.scheduling.page_groups import PLAIN
from inference_svc.core.scheduling.residents import MOST_RESIDENTS
from inference_svc.core.scheduling.step_plan import BatchBounds, SchedulerLimits, usual_bounds
from inference_svc.core.scheduling.write_slots import write_slots_for
from inference_svc.runtime.kv.layer_groups import HeldWindows, LayerGroups
from inference_svc.runtime.kv.layer_tensors import token_items_of
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration
from shared.types.kv_layout import KVLayout


class DeviceMemory(NamedTuple):
    """Bytes of memory where a model's KV is to be: what is free, and all there are."""

    free_bytes: int
    all_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """See the module docstring.

    Attributes:
        windows: what sequences hold in layers with a window; None: they hold all, or no layer has
            one.
        groups: of layers that share pages; None: KV is on none.
        limits: the scheduler's, with all token slots.
    """

    windows: HeldWindows | None
    groups: LayerGroups | None
    limits: SchedulerLimits


def batch_bounds(
    settings: SchedulerSettings, device: torch.device, state_bytes: int, free_bytes: int
) -> BatchBounds:
    """Return the bounds of a batch: as they are set, and by the device where a setting is 0.

    Args:
        settings: some of them 0.
        device: where the batch is computed.
        state_bytes: of a state; 0: the model has none.
        free_bytes: of memory where states are to be.
    """
    most_active = requests_with_states(free_bytes, state_bytes) if state_bytes else None
    usual = asdict(usual_bounds(device.type, most_active))
    bounds = BatchBounds(**{key: getattr(settings, key) or bound for key, bound in usual.items()})
    mixed_step_tokens = min(bounds.mixed_step_tokens, bounds.step_tokens)
    return replace(bounds, mixed_step_tokens=mixed_step_tokens)


def plan_memory(
    settings: InferenceSettings,
    bounds: BatchBounds,
    loaded: LoadedModel,
    calibration: Calibration,
    memory: DeviceMemory,
    *,
    saves: bool,
) -> MemoryPlan:
    """Divide what a model's KV and states may take.

    Args:
        settings: how much they name; without a setting, KV takes a share of the free memory.
        bounds: of a batch.
        loaded: the model.
        calibration: what is known of it.
        memory: of its device.
        saves: whether KV is saved.

    Raises:
        KvRoomError: there is no such memory.
    """
    scheduler, cache, layout = settings.scheduler, settings.cache, calibration.layout
    windows, groups = _held_layers(settings, bounds, calibration, loaded.device)
    most_residents, free_bytes = _with_states(layout, bounds, memory.free_bytes)
    num_slots = _token_slots(scheduler, layout, memory._replace(free_bytes=free_bytes), saves=saves)
    write_slots = _write_slots(settings, bounds, layout, num_slots) if saves else 0
    kv_slots = num_slots - write_slots
    keeps_residents = cache.residents and cache.mode == "cached"
    most = bounds.num_active * loaded.context_window
    if keeps_residents:
        most *= 2  # as much again for sessions whose turns are over
    if most and not scheduler.kv_tokens:
        kv_slots = min(kv_slots, most)
    if groups is not None:
        kv_slots = _page_slots(kv_slots, calibration, windows, groups)
    limits = SchedulerLimits(
        max_running=bounds.max_running,
        max_loading=bounds.max_loading,
        max_waiting=scheduler.max_turns,
        kv_slots=kv_slots,
        write_slots=write_slots,
        step_tokens=bounds.step_tokens,
        mixed_step_tokens=bounds.mixed_step_tokens,
        answer_tokens=scheduler.answer_tokens,
        keeps_residents=keeps_residents,
        block_tokens=layout.block_tokens,
        page_tokens=None if groups is None else groups.page_tokens,
        has_states=bool(layout.state_bytes),
        most_residents=most_residents,
        attention_window=layout.window,
        held_rows=None if windows is None else windows.rows,
        page_groups=PLAIN if groups is None else groups.pages,
    )
    return MemoryPlan(windows, groups, limits)


def _held_layers(
    settings: InferenceSettings,
    bounds: BatchBounds,
    calibration: Calibration,
    device: torch.device,
) -> tuple[HeldWindows | None, LayerGroups | None]:
    """Return what sequences hold in layers with a window, and how layers share pages.

    They hold all, None, where kernels read what lies side by side; and on pages unless layers can
    be divided into groups. The groups are None without pages.
    """
    shapes, layout = [layer.shape for layer in calibration.layers], calibration.layout
    page_tokens, step_tokens = _page_tokens(settings.scheduler, device), bounds.step_tokens
    if page_tokens is not None:  # those of a GPU's step would fill more pages than windows do
        step_tokens = min(step_tokens, max(bounds.mixed_step_tokens, layout.window))
    step_tokens = max(step_tokens, 1 + settings.scheduler.draft_tokens)
    windows = HeldWindows.of(
        layout, shapes, step_tokens=step_tokens, scored_tokens=SnapKV.window_tokens
    )
    if page_tokens is None:
        is_held = device.type == "cpu" and settings.model.rotation != "triton"
        return windows if is_held else None, None
    groups = None if windows is None else LayerGroups.of(windows, shapes, page_tokens)
    if groups is None:
        return None, LayerGroups.plain(shapes, page_tokens)
    return windows, groups


def _page_tokens(settings: SchedulerSettings, device: torch.device) -> int | None:
    """Return the tokens of a page of working KV; None: there are none.

    A GPU reads pages where they are; a CPU reads fastest what lies side by side.
    """
    usual = "pages" if device.type == "cuda" else "contiguous"
    working_kv = usual if settings.working_kv == "auto" else settings.working_kv
    return settings.page_tokens if working_kv == "pages" else None


def _with_states(layout: KVLayout, bounds: BatchBounds, free_bytes: int) -> tuple[int, int]:
    """Return the most resident sessions, and the bytes that all states there may be leave free."""
    if not layout.state_bytes:
        return MOST_RESIDENTS, free_bytes
    most_residents = residents_with_states(
        free_bytes, layout.state_bytes, bounds.num_active, MOST_RESIDENTS
    )
    num_states = states_of_requests(bounds.num_active) + most_residents
    return most_residents, free_bytes - num_states * layout.state_bytes


def _token_slots(
    settings: SchedulerSettings, layout: KVLayout, memory: DeviceMemory, *, saves: bool
) -> int:
    """Return the token slots of working KV and the write ring together."""
    token_bytes = max(1, layout.token_bytes)  # a model may have nothing but a state
    if settings.kv_tokens:
        return configured_slots(settings.kv_tokens, token_bytes, memory.all_bytes)
    return slots_of_free_memory(memory.free_bytes, token_bytes, saves=saves)


def _write_slots(
    settings: InferenceSettings, bounds: BatchBounds, layout: KVLayout, num_slots: int
) -> int:
    """Return how many of the token slots are the write ring's."""
    write_slots = settings.scheduler.write_buffer_tokens or write_slots_for(
        num_slots,
        step_tokens=bounds.step_tokens,
        max_running=bounds.max_running,
        group_tokens=settings.cache.save_group_tokens,
        block_tokens=layout.block_tokens,
    )
    return min(write_slots, num_slots // 2)


def _page_slots(
    kv_slots: int, calibration: Calibration, windows: HeldWindows | None, groups: LayerGroups
) -> int:
    """Return the slots of the whole pages that fit where so many slots of all layers do."""
    if windows is not None:  # slots are of a part of a token each
        shapes = [layer.shape for layer in calibration.layers]
        kv_slots = kv_slots * token_items_of(shapes) // token_items_of(groups.places)
    return whole_pages(kv_slots, groups.page_tokens, groups.pages.num_groups)
