"""The pattern of a mask: everything before, a window, chunks, or another one."""

import pytest
import torch

from inference_svc.runtime.calibration.probe import Mask, Probe, describe_mask, run_probe

HORIZON = 96
CPU = torch.device("cpu")


def causal(_batch, _head, query, key):
    return key <= query


def window(size):
    return lambda b, h, query, key: causal(b, h, query, key) & (key > query - size)


def chunks(size):
    return lambda b, h, query, key: causal(b, h, query, key) & (query // size == key // size)


@pytest.mark.parametrize("size", [1, 2, 7, 48, 95])
def test_windows_are_found(size):
    """A window shorter than the horizon is found by its size."""
    assert describe_mask(window(size), HORIZON, CPU) == Mask(window=size)


@pytest.mark.parametrize("size", [2, 7, 32, 48, 95])
def test_chunks_are_found(size):
    """Chunks are found by their size, also where the last one has just begun."""
    assert describe_mask(chunks(size), HORIZON, CPU) == Mask(chunk=size)


@pytest.mark.parametrize("size", [96, 97, 4096])
def test_a_mask_that_hides_nothing_is_none(size):
    """Windows and chunks as long as the context do not count."""
    for allowed in (causal, window(size), chunks(size)):
        assert describe_mask(allowed, HORIZON, CPU) == Mask()


@pytest.mark.parametrize(
    "allowed",
    [
        lambda _b, _h, query, key: key <= query + 1,
        lambda _b, _h, query, key: (key <= query) & (key % 2 == query % 2),
        lambda _b, _h, query, key: (key <= query) & ((key < 4) | (key > query - 8)),
        lambda _b, _h, _query, key: key >= 0,
    ],
    ids=["future", "strided", "sinks", "bidirectional"],
)
def test_other_masks_are_reported_as_unknown(allowed):
    """A mask of another form is said not to be understood."""
    assert not describe_mask(allowed, HORIZON, CPU).is_understood


def test_slices_of_a_described_mask_are_the_description():
    """Models that slice their mask get it back."""
    mask = Mask(window=3)
    assert mask[:, :, :, -5:] is mask


@pytest.mark.parametrize(("name", "num_norms"), [("llama", 0), ("qwen3", 2), ("hunyuan", 2)])
def test_a_layers_operations_are_its_own(tiny, name, num_norms):
    """One rotation, and the norms of its queries and keys: none of the previous layer."""
    probe = run_probe(tiny(name).loaded.model, [5, 6, 7], 192)
    assert sorted(probe.layers) == [0, 1]
    for seen in probe.layers.values():
        assert (len(seen.calls), len(seen.norms)) == (1, num_norms)
    taken = [id(call.norm) for seen in probe.layers.values() for call in seen.norms]
    assert len(set(taken)) == 2 * num_norms


@pytest.mark.parametrize(
    ("order", "num_misplaced"),
    [
        (["k0", "i0", "k1", "i1"], 0),
        (["i0", "k0", "i1", "k1"], 0),
        (["k0", "k1", "i0"], 1),
        (["i0", "i0", "k0"], 1),
        (["k0", "i2"], 1),
    ],
    ids=["behind", "before", "late", "twice", "of a layer to come"],
)
def test_index_keys_are_cached_beside_their_layers_keys(order, num_misplaced):
    """Just before or after them, so that a save may follow layer by layer."""
    probe, keys = Probe(HORIZON, CPU), torch.zeros(1, 1, 3, 4)
    for kind, layer_index in order:
        if kind == "k":
            probe.update_cache(int(layer_index), keys, keys)
        else:
            probe.update_index(int(layer_index), keys[0])
    assert probe.num_misplaced == num_misplaced
