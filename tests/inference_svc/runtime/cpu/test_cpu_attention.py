"""The back-end for CPUs answers as torch does, over every kind of working KV."""

import pytest
import torch

from inference_svc.runtime.attention.attention import Part, TorchAttention
from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.cpu.attention_kernel import AttentionKernel, why_unsupported
from inference_svc.runtime.cpu.cpu_attention import CpuAttention
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_tensors import LayerShape
from tests.held_windows import KINDS, check_answers

HEADS, KV_HEADS, DIM, NUM_LAYERS = 6, 2, 32, 2
WINDOWED = ("gemma4", "gemma2", "gemma3", "cohere2", "gpt-oss", "mistral", "llama4-ragged")
OPTIONS = {
    "plain": AttentionOptions(),
    "window": AttentionOptions(scale=0.3, window=5),
    "chunk": AttentionOptions(chunk=8),
    "softcap": AttentionOptions(softcap=1.5),
    "sinks": AttentionOptions(sinks=torch.linspace(-1, 2, HEADS), window=9),
}


@pytest.fixture(scope="module")
def cpu_attention():
    return CpuAttention(AttentionKernel.load())


def filled_parts(sizes):
    """Return parts of these (tokens before, new tokens), their KV full of random tokens."""
    shapes = [LayerShape((KV_HEADS, DIM), (KV_HEADS, DIM))] * NUM_LAYERS
    pool = KVPool(shapes, 500, device=torch.device("cpu"), dtype=torch.float32)
    torch.manual_seed(4)
    parts = []
    for num_past, num_tokens in sizes:
        kv = pool.new_kv(num_past + num_tokens + 3)
        for tensor in (*kv.keys.layers, *kv.values.layers):
            tensor.normal_()
        kv.num_tokens = num_past
        parts.append(Part(kv, num_tokens))
    return parts


@pytest.mark.parametrize(
    "sizes", [[(20, 1), (0, 1), (7, 1)], [(20, 1), (0, 6), (9, 1), (9, 4)], [(0, 6), (9, 4)]]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_it_answers_as_torch_does(cpu_attention, name, sizes):
    """In decode steps, mixed steps and steps without a lone token."""
    parts = filled_parts(sizes)
    query = torch.randn(1, sum(num for _, num in sizes), HEADS, DIM).transpose(1, 2)
    ours, torchs = cpu_attention.prepare(parts), TorchAttention().prepare(parts)
    for layer_index in range(NUM_LAYERS):
        found = ours.attend(query, layer_index, OPTIONS[name])
        expected = torchs.attend(query, layer_index, OPTIONS[name])
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_last_tokens_of_a_part_may_attend_alone(cpu_attention, name):
    """They see what they see beside those before them."""
    parts = filled_parts([(6, 5), (11, 3), (0, 4)])
    query = torch.randn(1, 12, HEADS, DIM).transpose(1, 2)
    whole = cpu_attention.prepare(parts).attend(query, 1, OPTIONS[name])
    last = [Part(parts[0].kv, 2, 3), Part(parts[2].kv, 1, 3)]
    rows = [3, 4, 11]
    found = cpu_attention.prepare(last).attend(query[:, :, rows], 1, OPTIONS[name])
    torch.testing.assert_close(found, whole[:, rows], rtol=1e-5, atol=1e-5)


def test_a_lone_token_has_the_same_bits_beside_others(cpu_attention):
    """Beside a prompt, too: an answer does not depend on the other sequences of its steps."""
    parts = filled_parts([(20, 1), (0, 6), (9, 1)])
    query = torch.randn(1, 8, HEADS, DIM).transpose(1, 2)
    options = OPTIONS["plain"]
    together = cpu_attention.prepare(parts).attend(query, 1, options)
    for part, row in ((parts[0], 0), (parts[2], 7)):
        alone = cpu_attention.prepare([part]).attend(query[:, :, row : row + 1], 1, options)
        assert torch.equal(together[:, row], alone[:, 0])


def test_tokens_written_since_the_last_step_are_read(cpu_attention):
    """Only the addresses are kept from step to step, not what they point to."""
    (part,) = filled_parts([(20, 1)])
    query = torch.randn(1, HEADS, 1, DIM)
    cpu_attention.prepare([part]).attend(query, 0, OPTIONS["plain"])
    part.kv.num_tokens += 1
    part.kv.values.layers[0][:, :, 21] = 100.0
    found = cpu_attention.prepare([part]).attend(query, 0, OPTIONS["plain"])
    expected = TorchAttention().prepare([part]).attend(query, 0, OPTIONS["plain"])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["side by side", "on pages"])
@pytest.mark.parametrize(
    "name", [WINDOWED[0], *(pytest.param(name, marks=pytest.mark.long) for name in WINDOWED[1:])]
)
def test_layers_that_hold_their_window_only(tiny, cpu_attention, name, kind):
    """Softcaps, sinks, chunks and layers of several shapes, on contiguous KV and on pages."""
    model = tiny(name, has_windows=True, head_dim=16)
    shapes = [layer.shape for layer in model.calibration.layers]
    assert why_unsupported(shapes, model.loaded.dtype) == ""
    holding = KINDS[kind](model)
    holding.runner = ModelRunner(model.loaded, model.calibration, cpu_attention)
    check_answers(holding, seed=3, tolerance=1e-4)
