"""Slots are copied from and to a device in order: bit for bit, and never too early."""

import gc
from types import SimpleNamespace

import pytest
import torch

from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.cuda import device_arena
from inference_svc.runtime.cuda.copier_arena import CopierArena
from inference_svc.runtime.cuda.device_arena import DeviceArena
from inference_svc.runtime.kv import copy_stream
from inference_svc.runtime.kv.arena_kv import ArenaKv
from inference_svc.runtime.kv.copy_stream import CopyProgress, CopyStream
from inference_svc.runtime.kv.layer_gate import LoadGate, StepClock
from inference_svc.runtime.kv.page_pool import PagePool
from inference_svc.runtime.kv.slot_runs import ScatteredTokens, SlotRun
from inference_svc.runtime.positions.rotation import LoadKernels
from inference_svc.runtime.transfer.layer_load import LayerLoader
from inference_svc.runtime.transfer.layer_store import store_blocks
from shared.types.errors import LoadFailedError
from tests.embed_in_one_call import embed_in_one_call
from tests.inference_svc.runtime.cuda.copier_in_process import copier_of
from tests.inference_svc.runtime.transfer.test_layer_load import blocks_of, tokens
from tests.simulated_device import RaceError, SimulatedDevice

CPU = torch.device("cpu")
NUM_SLOTS, HISTORY, PAGE_TOKENS = 6, 70, 8
PLACE_BYTES = 1 << 12  # a copier's: of a slot or two
SLOT_IDS = [4, 1, 2, 5, 0]
PAGES = [3, 0, 1, 2, 7, 6, 5, 4, 8]


@pytest.fixture
def device(monkeypatch):
    """Use a simulated device instead of the one that torch has for the CPU."""
    made = SimulatedDevice()
    monkeypatch.setattr(device_arena, "STAGING_BYTES", 1 << 20)  # each byte has a shadow record
    monkeypatch.setattr(copy_stream.torch, "get_device_module", lambda _device: made)
    return made


@pytest.fixture
def model(tiny):
    return tiny("llama")


class There:
    """A sequence on the device's pages, a write buffer, and an arena that the device reaches."""

    def __init__(self, device, model, make_arena, link=None):
        calibration = self.calibration = model.calibration
        shapes = [layer.shape for layer in calibration.layers]
        pool = PagePool(shapes, PagedSlots(12, PAGE_TOKENS), 96, device=CPU, dtype=torch.float32)
        device.own(pool._page_region)
        device.own(pool._region)
        self.device, self.pool = device, pool
        memory, _ = make_arena(calibration.layout, NUM_SLOTS)
        self.memory = memory
        self.plain = ArenaKv(memory, calibration.layout)
        self.bytes = torch.frombuffer(memory.memory, dtype=torch.uint8)
        device.own(self.bytes, is_host=True)
        if link is None:
            self.arena = DeviceArena(memory, calibration.layout, device, CPU)
            self.arena.registered.wait()
        else:
            self.arena = CopierArena(memory, calibration.layout, device, CPU, link)

    def new_kv(self):
        return self.pool.new_kv(HISTORY, PAGES)


@pytest.fixture
def there(device, model, make_arena):
    return There(device, model, make_arena)


@pytest.fixture(params=["registered", "staging", "copier"])
def any_there(request, device, model, make_arena):
    """Return one of these for each way in which slots are copied."""
    if request.param == "copier":
        link = SimpleNamespace()
        there = There(device, model, make_arena, link)
        with copier_of(device, there.memory, PLACE_BYTES) as link.channel:
            yield there
        return
    device.fails_at = 0 if request.param == "staging" else None
    yield There(device, model, make_arena)


def store_history(model, arena, rows):
    """Store a history as the CPU does; return its blocks."""
    kv, buffer = model.new_kv(128), model.new_buffer(128)
    chunk = Chunk(kv, tokens(5, HISTORY), want_logits=False, write_buffer=buffer)
    model.runner.step([chunk])
    blocks = blocks_of(rows, SLOT_IDS, HISTORY, 16)
    store_blocks(buffer, arena, blocks, model.calibration)
    return kv, buffer, blocks


def load(there, kv, blocks, opened=lambda _num_layers: None, embed=None):
    """Load all layers as a copy thread does."""
    stream = CopyStream(CPU)
    loaded = CopyProgress(opened)
    with stream.copies(behind_computing=True):
        loader = LayerLoader(kv, there.arena, blocks, there.calibration, kernels=LoadKernels(embed))
        for layer_index in range(len(there.calibration.layers)):
            loader.load(layer_index)
            loaded.add(stream.mark())
        loaded.finish()


@pytest.mark.parametrize("embed", [None, embed_in_one_call], ids=["torch", "kernel"])
def test_a_load_has_the_bits_of_the_forward(device, model, any_there, rows, embed):
    """By batches from registered slots, through staging memory, and by a copier."""
    there = any_there
    computed, _, blocks = store_history(model, there.plain, rows)
    kv = there.new_kv()
    with device.running():
        load(there, kv, blocks, embed=embed)
    assert (device.num_batches > 0) == (device.fails_at is None)
    for layer_index in range(len(there.calibration.layers)):
        for loaded, made in ((kv.keys, computed.keys), (kv.values, computed.values)):
            expected = made.read(layer_index, 0, HISTORY)
            assert torch.equal(loaded.read(layer_index, 0, HISTORY), expected)


@pytest.mark.parametrize("staging_bytes", [1 << 20, 3000])
def test_a_store_has_the_bits_of_the_buffer(
    device, model, any_there, rows, staging_bytes, monkeypatch
):
    """From the device's memory to slots, in pieces where staging memory is small."""
    monkeypatch.setattr(device_arena, "STAGING_BYTES", staging_bytes)
    there = any_there
    _, buffer, blocks = store_history(model, there.plain, rows)
    expected = there.bytes.clone()
    there.bytes.fill_(0xAB)
    for kept in (buffer.keys, buffer.values):
        device.own(kept[0])
    with device.running(), CopyStream(CPU).copies(behind_computing=True):
        store_blocks(buffer, there.arena, blocks, there.calibration)
    assert torch.equal(there.bytes, expected)
    if there.arena.registered is not None and there.arena.registered.num_slots:
        assert device.num_batches == 4  # keys and values, of whole blocks and of the last one


def test_scattered_tokens_are_gathered(device, any_there):
    """As after discards; they pass through staging memory."""
    there = any_there
    there.plain.view(0, 0).copy_(torch.rand(there.plain.view(0, 0).shape))
    run = ScatteredTokens(torch.tensor([3, 3, 0, 5]), torch.tensor([1, 0, 9, 15]))
    out = device.own(torch.zeros(4, *there.plain.view(0, 0).shape[2:]))
    with device.running(), CopyStream(CPU).copies(behind_computing=False):
        there.arena.gather(0, 0, run, out)
    assert torch.equal(out, there.plain.view(0, 0)[run.slot_ids, run.offsets])


def test_copies_have_ended_when_their_block_is_left(device, any_there):
    """In any way: their results may be read, and their sources overwritten."""
    there = any_there
    out = device.own(torch.zeros(2, 16, *there.plain.view(0, 0).shape[2:]))
    device.promptness = 0.0

    def break_off():
        with CopyStream(CPU).copies(behind_computing=False):
            there.arena.gather(0, 0, SlotRun([0, 3], 0, 16), out)
            with pytest.raises(RaceError), device.stream(device._usual):
                out.sum()
            raise RuntimeError("a bug")

    with device.running():
        with pytest.raises(RuntimeError, match="a bug"):
            break_off()
        out.sum()


def test_memory_that_is_not_contiguous_is_filled_too(there):
    """For example KV whose heads are contiguous."""
    view = there.plain.view(1, 1)
    view.copy_(torch.rand(view.shape))
    _, _, heads, dim = view.shape
    out = there.device.own(torch.zeros(heads, 2, 16, dim)).permute(1, 2, 0, 3)
    with there.device.running(), CopyStream(CPU).copies(behind_computing=False):
        there.arena.gather(1, 1, SlotRun([5, 2], 0, 16), out)
    assert torch.equal(out, view[[5, 2], :16])


def test_readers_wait_for_the_gate(device, model, any_there, rows):
    """Each layer may be read as soon as it is reported; earlier reads are refused."""
    device.promptness = 0.0
    there = any_there
    _, _, blocks = store_history(model, there.plain, rows)
    kv = there.new_kv()
    refused = []

    def opened(num_layers):
        if device.current_stream() is not device._usual:
            with device.stream(device._usual):
                opened(num_layers)
            return
        kv.keys.read(num_layers - 1, 0, HISTORY).sum()
        if num_layers == 1:  # the next one is being copied
            with pytest.raises(RaceError, match="reads what may still be written"):
                kv.values.read(1, 0, HISTORY).sum()
            refused.append(num_layers)

    with device.running():
        load(there, kv, blocks, opened)
        kv.keys.read(0, 0, HISTORY).sum()
    assert refused == [1]


def test_work_behind_a_gate_follows_the_copies(device, model, there, rows):
    """As soon as they are enqueued, without a waiting thread; work before the gate is refused."""
    device.promptness = 0.0
    _, _, blocks = store_history(model, there.plain, rows)
    kv, gate, loading = there.new_kv(), LoadGate(2, CPU), CopyStream(CPU)
    with device.running(), loading.copies(behind_computing=True):
        loader = LayerLoader(kv, there.arena, blocks, there.calibration)
        for layer_index in range(2):
            loader.load(layer_index)
            gate.on_copies_enqueued(layer_index + 1, loading.mark())
        with device.stream(device._usual):
            gate.wait(0)
            kv.values.read(0, 0, HISTORY).sum()
            with pytest.raises(RaceError, match="reads what may still be written"):
                kv.values.read(1, 0, HISTORY).sum()
            gate.wait(1)
            kv.values.read(1, 0, HISTORY).sum()
    assert gate.num_open == 0
    gate.fail(LoadFailedError("kvd is gone", "load again"))
    with pytest.raises(LoadFailedError):
        gate.wait(0)


def test_a_load_waits_for_readers_of_its_pages(there, rows, model):
    """They belonged to another sequence until now."""
    there.arena.registered.wait()
    _, _, blocks = store_history(model, there.plain, rows)
    kv = there.new_kv()
    with there.device.running():
        kv.keys.read(0, 0, HISTORY).sum()
        stream = CopyStream(CPU)
        with (
            pytest.raises(RaceError, match="writes what may still be read"),
            stream.copies(behind_computing=False),
        ):
            LayerLoader(kv, there.arena, blocks, there.calibration).load(0)
        load(there, kv, blocks)


def test_the_embedding_kernel_waits_for_the_copies_of_its_keys(there, rows, model):
    """On their stream; on another one it is refused, as it is on pages that are still read."""
    there.arena.registered.wait()
    _, _, blocks = store_history(model, there.plain, rows)
    kv, device = there.new_kv(), there.device

    def elsewhere(*given):
        with device.stream(device.Stream()):
            embed_in_one_call(*given)

    with device.running():
        with pytest.raises(RaceError, match="reads what may still be written"):
            load(there, kv, blocks, embed=elsewhere)
        load(there, kv, blocks, embed=embed_in_one_call)
        kv.keys.read(0, 0, HISTORY).sum()
        kernels = LoadKernels(embed_in_one_call)
        loader = LayerLoader(kv, there.arena, blocks, there.calibration, kernels=kernels)
        with (
            pytest.raises(RaceError, match="writes what may still be read"),
            CopyStream(CPU).copies(behind_computing=False),
        ):
            loader.load(0)


def test_a_store_waits_for_the_layers_computation(there, rows, model):
    """Behind its mark; without it, the copy is refused."""
    there.arena.registered.wait()
    _, buffer, blocks = store_history(model, there.plain, rows)
    for kept in (buffer.keys, buffer.values):
        there.device.own(kept[0])
    clock = StepClock(len(there.calibration.layers), CPU)
    with there.device.running():
        for layer_index in range(clock.num_layers):
            buffer.keys[layer_index].add_(1)
            buffer.values[layer_index].add_(1)
            clock.on_enqueued(layer_index + 1)
        with (
            pytest.raises(RaceError, match="reads what may still be written"),
            CopyStream(CPU).copies(behind_computing=False),
        ):
            store_blocks(buffer, there.arena, blocks, there.calibration, lambda layer: layer + 1)
        stream = CopyStream(CPU)

        def wait_layer(layer_index):
            stream.wait(clock.computed_mark(layer_index))
            return layer_index + 1

        with stream.copies(behind_computing=False):
            store_blocks(buffer, there.arena, blocks, there.calibration, wait_layer)


def test_staging_memory_is_not_filled_while_it_is_copied(device, model, make_arena, monkeypatch):
    """The copy is waited for; otherwise the write is refused."""
    device.fails_at = 0
    there = There(device, model, make_arena)
    there.arena.registered.wait()
    out = device.own(torch.zeros(2, 16, *there.plain.view(0, 0).shape[2:]))
    run = SlotRun([0, 3], 0, 16)
    with device.running(), CopyStream(CPU).copies(behind_computing=False):
        there.arena.gather(0, 0, run, out)
        there.arena.gather(0, 1, run, out)
        monkeypatch.setattr(device_arena, "mark_enqueued", lambda _device: None)
        there.arena.gather(0, 0, run, out)
        with pytest.raises(RaceError, match="writes what may still be read"):
            there.arena.gather(0, 1, run, out)


def test_staging_memory_is_locked_for_all_that_fits():
    """Only larger pieces have other memory."""
    memory = torch.zeros(64, dtype=torch.uint8)
    staging = device_arena.Staging(memory)
    for num_rows, is_kept in ((1, True), (8, True), (9, False)):
        rows = torch.zeros(num_rows, 2)
        staged = staging.of(rows)
        assert (staged.shape, staged.dtype) == (rows.shape, rows.dtype)
        assert (staged.data_ptr() == memory.data_ptr()) is is_kept


def test_a_closed_arena_is_unregistered(device, model, make_arena):
    """So its memory can be freed."""
    there = There(device, model, make_arena)
    there.arena.registered.wait()
    assert device.registered
    there.arena = None
    gc.collect()
    assert not device.registered
