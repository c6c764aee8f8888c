"""Copies between an arena and the device keep all bytes, whether its memory is locked or not."""

import mmap

import pytest
import torch

from inference_svc.runtime.cuda.device_arena import DeviceArena
from inference_svc.runtime.kv.arena_kv import ArenaKv
from inference_svc.runtime.kv.copy_stream import CopyStream
from inference_svc.runtime.kv.layer_tensors import Places
from inference_svc.runtime.kv.slot_runs import ScatteredTokens, SlotRun
from shared.cuda.driver_calls import DriverError
from shared.types.kv_layout import Component, KVLayout, Layer

NUM_SLOTS = 8


class Slots:
    """An arena of a small layout in page-aligned memory, full of random numbers."""

    def __init__(self):
        parts = (Component("k", (2, 64), "bfloat16", "r"), Component("v", (2, 32), "bfloat16"))
        self.layout = KVLayout("0" * 32, (Layer(parts),) * 2, 64)
        self.slot_bytes, self.num_slots = -(-self.layout.block_bytes // 4096) * 4096, NUM_SLOTS
        self.memory = memoryview(mmap.mmap(-1, self.slot_bytes * NUM_SLOTS))
        torch.frombuffer(self.memory, dtype=torch.bfloat16).normal_()


@pytest.fixture(params=[True, False], ids=["registered", "refused"])
def arena(request, device, driver, monkeypatch):
    """Return an arena that the device reaches, or one that the system refuses to lock."""
    if not request.param:

        def refuse(*_):
            raise DriverError("CUDA_ERROR_OUT_OF_MEMORY")

        monkeypatch.setattr(driver, "register", refuse)
    slots = Slots()
    if device.type == "cpu":
        driver.own(torch.frombuffer(slots.memory, dtype=torch.uint8), is_host=True)
    made = DeviceArena(slots, slots.layout, driver, device)
    assert made.registered.wait() == (NUM_SLOTS if request.param else 0)
    return made, ArenaKv(slots, slots.layout)


def there(tensor, device, driver):
    """Put a tensor on the device."""
    placed = tensor.to(device)
    return driver.own(placed) if device.type == "cpu" else placed


RUNS = [
    SlotRun([5, 2, 3], 0, 64),
    SlotRun([7], 9, 30),
    ScatteredTokens(torch.tensor([3, 3, 0]), torch.tensor([63, 0, 9])),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("component", [0, 1])
def test_loads_have_the_slots_bytes(arena, device, driver, run, component):
    """Tokens may lie anywhere in the slots."""
    on_device, plain = arena
    shape = (
        len(run.slot_ids),
        *([] if isinstance(run, ScatteredTokens) else [run.tokens_per_slot]),
    )
    expected = torch.zeros(*shape, *plain.view(1, component).shape[2:], dtype=torch.bfloat16)
    plain.gather(1, component, run, expected)
    out = there(torch.zeros_like(expected), device, driver)
    with CopyStream(device).copies(behind_computing=True):
        on_device.gather(1, component, run, out)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("run", RUNS)
def test_loads_write_to_the_given_places(arena, device, driver, run):
    """The places may lie in memory that other sequences share."""
    on_device, plain = arena
    shape = plain.view(1, 0).shape[2:]
    places = torch.randperm(300, generator=torch.Generator().manual_seed(2))[: run.num_tokens]
    tokens = torch.empty(run.num_tokens, *shape, dtype=torch.bfloat16)
    plain.gather(1, 0, run, run.by_slot(tokens))
    expected = torch.full((300, *shape), 7.0, dtype=torch.bfloat16)
    expected[places] = tokens
    region = there(torch.full_like(expected, 7.0), device, driver)
    with CopyStream(device).copies(behind_computing=True):
        on_device.gather_to(1, 0, run, region, there(places, device, driver))
    assert torch.equal(region.cpu(), expected)


@pytest.mark.parametrize("run", RUNS[:2])
@pytest.mark.parametrize("lies", ["side by side", "here and there"])
def test_saves_change_only_their_tokens(arena, device, driver, run, lies):
    """Both layers are checked: no byte beside the tokens changes."""
    on_device, plain = arena
    views = [plain.view(layer, 1) for layer in (0, 1)]
    expected = [view.clone() for view in views]
    slots = list(range(5, 5 + run.num_tokens))
    if lies == "here and there":
        slots.reverse()
    tensors = torch.randn(2, 300, *views[0].shape[2:]).bfloat16()
    for wanted, tensor in zip(expected, tensors, strict=True):
        rows = run.by_slot(tensor[slots])
        wanted[run.slot_ids, run.start : run.start + run.tokens_per_slot] = rows
    layers = there(tensors, device, driver).unbind(0)
    with CopyStream(device).copies(behind_computing=True):
        on_device.scatter_layers((0, 1), 1, run, layers, Places(slots, device))
    for wanted, view in zip(expected, views, strict=True):
        assert torch.equal(view, wanted)
