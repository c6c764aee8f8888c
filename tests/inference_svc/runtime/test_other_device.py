"""Re-embedding of KV on another device: every table has to be on that device.

The device is a stand-in that computes on the CPU and refuses tensors of two devices, as a GPU does
(tests/other_device.py); so results are those of the CPU, bit for bit.
"""

from dataclasses import replace
from itertools import starmap

import pytest
import torch

from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.positions.rotary import RotaryTable, find_pairing
from inference_svc.runtime.transfer.compaction import Compaction
from inference_svc.runtime.transfer.layer_load import LayerLoader
from inference_svc.runtime.transfer.layer_store import store_blocks
from tests.inference_svc.runtime.kv.test_own_layers import describe_layer, make_layer
from tests.inference_svc.runtime.transfer.test_layer_load import blocks_of, prefill, tokens
from tests.other_device import CPU, OTHER, other_device, to_cpu
from tests.ropes import DIM, halves, interleaved, partial, permuting, scattered

NUM_TOKENS = 40
# short gaps, across which rows are gathered, and a run that moves
KEPT = ((2, 3), (4, 20), (24, 40))


def _there(rope):
    """Put a model's own tables on the other device."""

    def embed(keys, positions):
        assert keys.device == positions.device == OTHER
        return rope(keys.to(CPU), positions.to(CPU)).to(OTHER)

    return embed


def _tables(rotary):
    """Put the same tables on the other device."""
    return RotaryTable(
        _there(rotary._rope),
        rotary.pairing,
        max_tokens=rotary._max_tokens,
        table_dtype=rotary._table_dtype,
        dtype=rotary._dtype,
        device=OTHER,
    )


def _recipe_there(recipe):
    return replace(recipe, rotary=recipe.rotary and _tables(recipe.rotary))


def _calibration_there(calibration):
    layers = [
        replace(layer, key=_recipe_there(layer.key), value=_recipe_there(layer.value))
        for layer in calibration.layers
    ]
    return replace(calibration, layers=tuple(layers))


def test_the_stand_in_refuses_mixed_devices():
    """Tensors of two devices can only be copied; results stay on their device."""
    with other_device():
        there = torch.arange(3.0).to(OTHER)
        with pytest.raises(RuntimeError, match="two devices"):
            there + torch.arange(3.0)
        with pytest.raises(RuntimeError, match="two devices"):
            there.index_select(0, torch.tensor([1]))
        picked = there.index_select(0, torch.tensor([1], device=OTHER))
        there[1:].copy_(torch.tensor([7.0, 8.0]))
        assert (picked.device, to_cpu(there).tolist()) == (OTHER, [0.0, 7.0, 8.0])


@pytest.mark.parametrize("rope", [halves, interleaved, permuting, partial, scattered])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_unrotated_and_moved_on_their_device(rope, dtype):
    """By slices and by gathers, in the model's dtype and wider."""
    here = RotaryTable(
        rope,
        find_pairing(rope, DIM, CPU),
        max_tokens=1000,
        table_dtype=dtype,
        dtype=dtype,
        device=CPU,
    )
    keys = torch.randn(NUM_TOKENS, 3, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)

    def work(rotary, keys):
        back, moved = torch.empty_like(keys), torch.empty_like(keys)
        rotary.unrotate_into(keys, 7, back)
        rotary.move_into(keys, 7, 3, moved)
        return rotary.rotate(keys, 7), back, moved

    with other_device():
        results = work(_tables(here), keys.to(OTHER))
        assert {result.device for result in results} == {OTHER}
    assert all(starmap(torch.equal, zip(map(to_cpu, results), work(here, keys), strict=True)))


@pytest.mark.parametrize("name", ["llama", "cohere2"])
def test_loaded_and_shifted_rows_equal_those_of_the_cpu(tiny, make_arena, rows, name):
    """A history from kvd's memory into the device's, and its rest after a discard."""
    model = tiny(name)
    arena_kv = make_arena(model.calibration.layout)[1]
    _, buffer = prefill(model, tokens(3, NUM_TOKENS))
    spans = blocks_of(rows, (2, 0, 1), NUM_TOKENS, 16)
    store_blocks(buffer, arena_kv, spans, model.calibration)

    @torch.no_grad()
    def work(calibration, device):
        shapes = [layer.shape for layer in calibration.layers]
        kv = KVPool(shapes, 256, device=device, dtype=torch.float32).new_kv(64)
        for layer_index in range(len(calibration.layers)):
            # Without inference mode, where subclasses of tensors have no views.
            LayerLoader.load.__wrapped__(LayerLoader(kv, arena_kv, spans, calibration), layer_index)
        loaded = [to_cpu(rows)[:, :, :NUM_TOKENS].clone() for rows in (*kv.keys, *kv.values)]
        Compaction(kv, KEPT, calibration).run()
        return [*loaded, *(to_cpu(rows)[:, :, :33] for rows in (*kv.keys, *kv.values))]

    with other_device():
        found = work(_calibration_there(model.calibration), OTHER)
    assert all(starmap(torch.equal, zip(found, work(model.calibration, CPU), strict=True)))


def test_a_models_own_cache_stays_on_its_device():
    """It is taken apart, and restored."""
    own, layer = describe_layer(4), make_layer(4, 23)
    expected = torch.cat(list(own.rows(layer, 0, 23)), 1)
    with other_device():
        there, again = make_layer(4, 23), make_layer(4, 0, fresh=True)
        there.window = there.values = there.window.to(OTHER)
        for parts in (there.entries, there.buffer):
            parts["of"] = parts["of"].to(OTHER)
        rows = torch.cat(list(own.rows(there, 0, 23)), 1)
        states = {place: state.to(OTHER) for place, state in own.states(there)}
        own.fill(again, states.__getitem__, rows)
        found = (rows, again.window, again.entries["of"], again.buffer["of"])
        assert {tensor.device for tensor in found} == {OTHER}
    kept = (expected, layer.window, layer.entries["of"], layer.buffer["of"])
    assert all(starmap(torch.equal, zip(map(to_cpu, found), kept, strict=True)))
