"""A forward follows a load, and a save follows a forward, layer by layer."""

import threading

import pytest
import torch

from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.step_forward import StepForward
from inference_svc.runtime.compute.step_places import StepPlaces
from inference_svc.runtime.kv.layer_gate import LayerGate, StepClock
from shared.types.errors import LoadFailedError

CPU = torch.device("cpu")

SOON = 60.0  # seconds that only a broken test takes


def tokens(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


@pytest.fixture(params=["computed", "graph"])
def llama_runner(request, tiny, graph_runner):
    """Return a runner of the model, which may run its forward as a graph."""
    return graph_runner("llama") if request.param == "graph" else tiny("llama").runner


def make_gated(model, token_ids, num_open):
    """Return KV with these tokens behind a gate with `num_open` open layers."""
    kv = model.new_kv(64)
    model.runner.step([Chunk(kv, token_ids, want_logits=False)])
    kv.gate = LayerGate(len(model.calibration.layers))
    kv.gate.open(num_open)
    return kv


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek-v3", "falcon", "bloom"])
@pytest.mark.parametrize("new", [[5], [5, 6, 7]])
def test_a_late_gate_changes_no_bit(tiny, name, new):
    """A step that waits for rows written by another thread computes what an open gate gives."""
    check_late_gate(tiny(name), tiny(name).runner, new)


@pytest.mark.parametrize("new", [[5], [5, 6, 7]])
def test_late_gate_changes_no_bit_of_a_graph(tiny, graph_runner, new):
    """It waits within a graph, too, layer by layer."""
    check_late_gate(tiny("llama"), graph_runner("llama"), new)


def check_late_gate(model, runner, new):
    history = tokens(13, 30)
    expected = runner.step([Chunk(make_gated(model, history, 2), new, want_logits=True)])

    kv = make_gated(model, history, 0)
    kept = [tensor[:, :, :30].clone() for tensor in (*kv.keys.layers, *kv.values.layers)]
    for tensor in (*kv.keys.layers, *kv.values.layers):
        tensor[:, :, :30] = float("nan")
    clock = StepClock(2, CPU)

    def load():
        for layer_index in range(2):
            clock.wait(layer_index, SOON)  # the step is this far: from here on it can only wait
            kv.keys[layer_index][:, :, :30] = kept[layer_index]
            kv.values[layer_index][:, :, :30] = kept[2 + layer_index]
            kv.gate.open(layer_index + 1)

    loader = threading.Thread(target=load)
    loader.start()
    logits = runner.step([Chunk(kv, new, want_logits=True)], clock)
    loader.join(SOON)
    assert torch.equal(logits, expected)
    assert kv.num_tokens == 30 + len(new)


@pytest.mark.parametrize("num_open", [0, 1])
def test_failed_gate_leaves_everything_as_it_was(tiny, llama_runner, num_open):
    """A load that fails before or within a step fails the step and moves no counter."""
    model = tiny("llama")
    kv = make_gated(model, tokens(14, 20), num_open)
    beside = model.new_kv(20)
    buffers = [model.new_buffer(20, first_token=20), model.new_buffer(20)]
    chunks = [
        Chunk(kv, [5, 6], want_logits=True, write_buffer=buffers[0]),
        Chunk(beside, [7], want_logits=True, write_buffer=buffers[1]),
    ]
    clock = StepClock(2, CPU)
    failing = threading.Thread(
        target=lambda: (
            clock.wait(num_open, SOON),
            kv.gate.fail(LoadFailedError("gone", "load again")),
        )
    )
    failing.start()
    with pytest.raises(LoadFailedError, match="gone"):
        llama_runner.step(chunks, clock)
    failing.join(SOON)
    assert (kv.num_tokens, beside.num_tokens) == (20, 0)
    assert [buffer.end_token for buffer in buffers] == [20, 0]
    assert clock.num_open == num_open + 1

    kv.reset()
    again = llama_runner.step([Chunk(kv, [*tokens(14, 20), 5, 6], want_logits=True)])
    torch.testing.assert_close(
        again[0], model.stock_logits([*tokens(14, 20), 5, 6])[-1], rtol=1e-5, atol=1e-5
    )


def test_clock_follows_the_rows(tiny, llama_runner):
    """When the clock lets a layer pass, its rows are in KV and buffer; those behind are not."""
    model = tiny("llama")
    kv, buffer = model.new_kv(8), model.new_buffer(8)
    for tensor in (*buffer.keys.layers, *buffer.values.layers):
        tensor.fill_(float("nan"))
    kv.gate = LayerGate(2)  # nothing is loaded; the gate only holds the step for the checks
    clock = StepClock(2, CPU)
    seen = []

    def follow():
        for layer_index in range(2):
            clock.wait(layer_index, SOON)
            layers = zip(buffer.keys.layers, buffer.values.layers, strict=True)
            seen.append([bool((keys + values)[:3].isfinite().all()) for keys, values in layers])
            kv.gate.open(layer_index + 1)

    follower = threading.Thread(target=follow)
    follower.start()
    llama_runner.step([Chunk(kv, [3, 4, 5], want_logits=False, write_buffer=buffer)], clock)
    follower.join(SOON)
    assert seen == [[True, False], [True, True]]
    assert clock.num_open == 2


def test_early_index_keys_wait_for_the_load(tiny):
    """A layer's history is read before the layer has cached, after it has been loaded."""
    model = tiny("qwen4-exp")
    history, new = tokens(13, 30), [5, 6, 7]
    expected = model.runner.step([Chunk(make_gated(model, history, 2), new, want_logits=True)])

    kv = make_gated(model, history, 1)
    loaded = [part.layers[1][:, :, :30] for part in (kv.keys, kv.values, kv.indexes)]
    kept = [tensor.clone() for tensor in loaded]
    for tensor in loaded:
        tensor.fill_(float("nan"))
    clock = StepClock(2, CPU)

    def load():
        clock.wait(0, SOON)
        for tensor, was in zip(loaded, kept, strict=True):
            tensor.copy_(was)
        kv.gate.open(2)

    loader = threading.Thread(target=load)
    loader.start()
    logits = model.runner.step([Chunk(kv, new, want_logits=True)], clock)
    loader.join(SOON)
    assert torch.equal(logits, expected)


def test_the_clock_waits_for_keys_and_index_keys(tiny):
    """When it opens a layer, all of its rows are in the buffer, in either order."""
    model = tiny("qwen4-exp")
    kv, buffer = model.new_kv(8), model.new_buffer(8)
    for part in buffer.components:
        for tensor in part.layers:
            tensor.fill_(float("nan"))
    kv.gate = LayerGate(2)
    kv.gate.open(1)  # for its states; the second layer's index keys hold the step
    clock = StepClock(2, CPU)
    seen = []

    def follow():
        for layer_index in range(2):
            clock.wait(layer_index, SOON)
            keys, values, indexes = (
                [bool(tensor[:3].isfinite().all()) for tensor in part.layers]
                for part in buffer.components
            )
            seen.append((keys, values, indexes[: layer_index + 1]))
            kv.gate.open(2)

    follower = threading.Thread(target=follow)
    follower.start()
    model.runner.step([Chunk(kv, [3, 4, 5], want_logits=False, write_buffer=buffer)], clock)
    follower.join(SOON)
    first, both = [True, False], [True, True]
    assert seen == [(first, first, [True]), (both, both, both)]


@pytest.mark.parametrize("layers", [(0, 0), (1,)], ids=["twice", "of a layer to come"])
def test_index_keys_out_of_order_are_an_error(tiny, layers):
    """They would overwrite another layer's, or the first ones."""
    model = tiny("qwen4-exp")
    chunks = [Chunk(model.new_kv(8), [5], False)]
    forward = StepForward(model.calibration, chunks, StepPlaces.of(chunks), None)
    *before, last = layers
    for layer_index in before:
        forward.update_index(layer_index, torch.zeros(1, 1, 8))
    with pytest.raises(AssertionError, match="is indexed after 0 layers"):
        forward.update_index(last, torch.zeros(1, 1, 8))


def test_a_forward_with_the_models_own_attention_offers_none(tiny):
    """A caller that needs it has a bug."""
    model = tiny("llama")
    chunks = [Chunk(model.new_kv(8), [5], False)]
    forward = StepForward(model.calibration, chunks, StepPlaces.of(chunks), None)
    query = torch.zeros(1, 4, 1, 8)
    with pytest.raises(AssertionError, match="was asked to attend"):
        forward.attend(query, query, query, None, {})
    with pytest.raises(AssertionError, match="no mask function"):
        forward.make_mask(torch.ge)
