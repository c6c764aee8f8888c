"""The memory plan: how an engine divides a device's memory, before it reserves any.

    batch     how many requests run and load at once, and how many tokens a step has
    layers    what sequences hold in layers with a window, and which layers share pages
    states    of recurrent layers: how many resident sessions keep one, beside the requests
    slots     token slots in the memory that is left: for working KV, and for the write ring

Settings decide; where they say nothing, the device and its free memory do. The number of free bytes
is an argument: nothing here asks the device.
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
    """Memory of the device that holds a model's KV, in bytes: free, and in total."""

    free_bytes: int
    all_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of an engine's memory.

    Attributes:
        windows: the tokens that sequences hold in layers with a window; None: they hold all tokens,
            or no layer has a window.
        groups: the groups of layers that share pages; None: KV is not on pages.
        limits: the scheduler's limits, with all token slots.
    """

    windows: HeldWindows | None
    groups: LayerGroups | None
    limits: SchedulerLimits


def batch_bounds(
    settings: SchedulerSettings, device: torch.device, state_bytes: int, free_bytes: int
) -> BatchBounds:
    """Return the bounds of a batch: those of the settings, or the device's where these are 0.

    Args:
        settings: the scheduler's settings.
        device: the device that computes.
        state_bytes: bytes of a sequence's state; 0: the model has none.
        free_bytes: free bytes of the device's memory.
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
    """Divide a device's memory between a model's KV and its states.

    Args:
        settings: the settings; where they name no size, KV takes a share of the free memory.
        bounds: the bounds of a batch.
        loaded: the model.
        calibration: the model's layers, rotations and layout.
        memory: the memory of its device.
        saves: whether KV is saved.

    Raises:
        KvRoomError: the device does not have that memory.
    """
    scheduler, cache, layout = settings.scheduler, settings.cache, calibration.layout
    windows, groups = _held_layers(settings, bounds, calibration, loaded.device)
    most_residents, free_bytes = _plan_states(layout, bounds, memory.free_bytes)
    num_slots = _token_slots(scheduler, layout, memory._replace(free_bytes=free_bytes), saves=saves)
    write_slots = _write_slots(settings, bounds, layout, num_slots) if saves else 0
    kv_slots = num_slots - write_slots
    keeps_residents = cache.residents and cache.mode == "cached"
    most = bounds.num_active * loaded.context_window
    if keeps_residents:
        most *= 2  # the same amount again for sessions whose turns are over
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
    """Return the tokens that sequences hold in layers with a window, and how layers share pages.

    The former are None, and sequences hold all tokens, where kernels read contiguous KV, and on
    pages if layers cannot be divided into groups. The groups are None without pages.
    """
    shapes, layout = [layer.shape for layer in calibration.layers], calibration.layout
    page_tokens, step_tokens = _page_tokens(settings.scheduler, device), bounds.step_tokens
    if page_tokens is not None:  # a GPU's long steps would fill more pages than the windows do
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
    """Return the tokens of a page of working KV; None: KV is contiguous.

    A GPU reads scattered pages as fast as contiguous KV; a CPU reads contiguous KV faster.
    """
    usual = "pages" if device.type == "cuda" else "contiguous"
    working_kv = usual if settings.working_kv == "auto" else settings.working_kv
    return settings.page_tokens if working_kv == "pages" else None


def _plan_states(layout: KVLayout, bounds: BatchBounds, free_bytes: int) -> tuple[int, int]:
    """Return the most resident sessions, and the bytes left free by the most possible states."""
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
    token_bytes = max(1, layout.token_bytes)  # a model may have states only, and no KV of tokens
    if settings.kv_tokens:
        return configured_slots(settings.kv_tokens, token_bytes, memory.all_bytes)
    return slots_of_free_memory(memory.free_bytes, token_bytes, saves=saves)


def _write_slots(
    settings: InferenceSettings, bounds: BatchBounds, layout: KVLayout, num_slots: int
) -> int:
    """Return how many of the token slots belong to the write ring."""
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
    """Return the slots of all whole pages that fit into the memory of `kv_slots` token slots."""
    if windows is not None:  # a slot on pages holds a token of one group of layers only
        shapes = [layer.shape for layer in calibration.layers]
        kv_slots = kv_slots * token_items_of(shapes) // token_items_of(groups.places)
    return whole_pages(kv_slots, groups.page_tokens, groups.pages.num_groups)
