"""Compiled forwards give the results of the forwards they were made of, in every step.

Graphs run operation by operation here; `make test-long` has torch's compiler make kernels of them.
"""

import shutil

import pytest
import torch

from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.compute import compiled_forward
from inference_svc.runtime.compute.attention_scores import ScoreKeeper
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.compiled_forward import compile_forward
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.compute.piece_compiler import INDUCTOR
from inference_svc.runtime.compute.traced_forward import UntraceableError
from inference_svc.runtime.cpu import product_kernel
from inference_svc.runtime.cpu.attention_kernel import AttentionKernel
from inference_svc.runtime.cpu.cpu_attention import CpuAttention
from inference_svc.runtime.memory import RegionTensors
from inference_svc.runtime.model.model_loader import describe_model
from inference_svc.runtime.model.packed_linear import PackedLinear
from inference_svc.runtime.model.packing import OneDnnPacking
from tests.held_windows import KINDS, check_answers
from tests.inference_svc.runtime.eager_pieces import EAGER
from tests.sampled import sampled

ONEDNN = OneDnnPacking()
REGIONS = RegionTensors()
FAMILIES = [
    "llama",
    "llama-yarn",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gemma4-wide",
    "gpt-neox",
    "phi",
    "phi3",
    "stablelm",
    "glm",
    "cohere",
    "cohere2",
    "hunyuan",
    "nanochat",
    "smollm3",
    "gpt2",
    "opt",
    "llama4-ragged",
]
# Tokens of the two sequences in each step, and whether they want logits.
STEPS = (
    ((20, 0), False),
    ((1, 11), True),
    ((1, 1), True),
    ((1, 0), True),
    ((0, 1), False),
    ((2, 1), True),
    ((0, 3), True),
    ((4, 0), True),
    ((5, 30), False),
)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def described(model):
    return describe_model(model, tokenizer=None, name="llama", fingerprint="0" * 32)


def chunks_of(sequences, sizes, want_logits):
    return [
        Chunk(
            kv,
            [(37 * (kv.num_tokens + i) + 11) % 97 for i in range(size)],
            want_logits=want_logits,
            write_buffer=buffer,
        )
        for (kv, buffer), size in zip(sequences, sizes, strict=True)
        if size
    ]


def outcome(model, runner):
    """Compute steps; returns their logits, and what they wrote to KV and buffer."""
    sequences = [(model.new_kv(64), model.new_buffer(64)), (model.new_kv(64), None)]
    logits = [runner.step(chunks_of(sequences, *step)) for step in STEPS]
    (first, buffer), (second, _) = sequences
    written = [
        layer[buffer.slots[: buffer.end_token]]
        for tensors in buffer.components
        for layer in tensors.layers
    ]
    held = [
        component.read(layer_index, 0, kv.num_tokens)
        for kv in (first, second)
        for component in kv.components
        for layer_index in range(len(model.calibration.layers))
    ]
    return logits, [*written, *held]


def check_same(model, runner, computed=None, to_the_bit=False, close=CLOSE):
    """Compare with another runner; logits may round otherwise: a graph may have more rows."""
    before = runner.compiled.num_run
    logits, written = outcome(model, runner)
    assert runner.compiled.num_run == before + len(STEPS)
    expected_logits, expected = outcome(model, computed or model.runner)
    for found, computed_logits in zip(logits, expected_logits, strict=True):
        torch.testing.assert_close(found, computed_logits, **close)
    for found, computed_tokens in zip(written, expected, strict=True):
        if to_the_bit:
            assert torch.equal(found, computed_tokens)
        torch.testing.assert_close(found, computed_tokens, **close)


@pytest.mark.parametrize("name", sampled(FAMILIES, 4, seed=3, always=("llama", "gemma2")))
def test_a_graph_gives_what_the_forward_gives(tiny, graph_runner, name):
    """What is written to the bit: in prefill and decoding, with a write buffer and without."""
    check_same(tiny(name), graph_runner(name), to_the_bit=True)


@pytest.fixture
def written_layers(monkeypatch):
    """Return the layers whose new tokens the kernel of decode steps writes, call by call."""
    layers, write = [], AttentionKernel.write_and_decode

    def noted(kernel, *arguments):
        layers.append(arguments[3])
        return write(kernel, *arguments)

    monkeypatch.setattr(AttentionKernel, "write_and_decode", noted)
    return layers


def runner_with_kernel(model):
    attention = CpuAttention(AttentionKernel.load())
    compiled = compile_forward(model.loaded, model.calibration, EAGER)
    return ModelRunner(model.loaded, model.calibration, attention, compiled=compiled)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_kernel_writes_what_the_forward_writes(tiny, written_layers, name):
    """In steps of lone tokens, to which it also attends; the last step of STEPS wants no logits."""
    model = tiny(name, head_dim=16)
    check_same(model, runner_with_kernel(model))
    num_layers = len(model.calibration.layers)
    assert written_layers.count(0) == sum(max(sizes) == 1 for sizes, _ in STEPS)
    assert set(written_layers) == set(range(num_layers))


@pytest.mark.parametrize("kind", ["side by side", "on pages"])
@pytest.mark.parametrize(
    "name",
    sampled(["gemma3", "cohere2", "llama4-ragged", "mistral"], 1, seed=3, always=("gemma3",)),
)
def test_a_kernel_writes_where_layers_hold_their_window(tiny, written_layers, name, kind):
    """In rows, whose slots are not positions, and on pages."""
    model = tiny(name, has_windows=True, head_dim=16)
    holding = KINDS[kind](model)
    holding.runner = runner_with_kernel(model)
    check_answers(holding, seed=3, tolerance=1e-4)
    assert set(written_layers) == set(range(len(model.calibration.layers)))


@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("mixtral", marks=pytest.mark.long)])
def test_experts_of_16_bits_are_within_the_graph(tiny, name):
    """Which chooses among them by numbers, and not by code; sinks are an operand of attention."""
    model = tiny(name, torch.bfloat16)
    compiled = compile_forward(model.loaded, model.calibration, EAGER)
    runner = ModelRunner(model.loaded, model.calibration, compiled=compiled)
    check_same(model, runner, to_the_bit=True, close={"rtol": 2e-2, "atol": 2e-2})


def test_packed_layers_have_a_graph_for_few_tokens_and_one_for_many(tiny, build):
    """And give what they give without."""
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.up_proj = PackedLinear(layer.mlp.up_proj, ONEDNN, REGIONS, keeps_stored=True)
        layer.mlp.down_proj = PackedLinear(layer.mlp.down_proj, ONEDNN, REGIONS)
    model.lm_head = PackedLinear(model.lm_head, ONEDNN, REGIONS, keeps_stored=True)
    packed = described(model), calibrate(described(model))
    compiled = compile_forward(*packed, EAGER)
    assert len(compiled.graphs) == 3  # of 1 token, 2 or 3, and more
    check_same(tiny("llama"), ModelRunner(*packed, compiled=compiled), ModelRunner(*packed))


@pytest.mark.parametrize("compiler", [EAGER, pytest.param(INDUCTOR, marks=pytest.mark.long)])
def test_layers_packed_for_our_kernel_are_operators_of_graphs(tiny, build, monkeypatch, compiler):
    """And give what they give without."""
    monkeypatch.setattr(product_kernel, "MIN_WEIGHTS", 1)
    loaded = described(build("llama"))
    packed = loaded, calibrate(loaded, packing="cpp")
    compiled = compile_forward(*packed, compiler)
    assert len(compiled.graphs) == 2  # of 1 token, and more
    check_same(tiny("llama"), ModelRunner(*packed, compiled=compiled), ModelRunner(*packed))


def test_logits_of_all_tokens(tiny, graph_runner):
    """As drafts want them."""
    model, runner = tiny("llama"), graph_runner("llama")
    found, expected = (
        each.step([Chunk(model.new_kv(9), [3, 4, 5, 6, 7], True, want_all=True)])
        for each in (runner, model.runner)
    )
    assert found.shape == (5, 97)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_of_some_sequences(tiny, graph_runner, name):
    """The last layer attends for those only, and writes the keys and values of all."""
    model, runner = tiny(name), graph_runner(name)
    wants = ([False, True, False, True], [True, False, True, False], [False] * 4, [True] * 4)
    steps = []
    for each in (runner, model.runner):
        kvs = [model.new_kv(40) for _ in range(4)]
        for want in wants:
            chunks = [
                Chunk(kv, list(range(3, 3 + size)), wanted, want_all=wanted and size == 4)
                for kv, size, wanted in zip(kvs, (9, 1, 4, 6), want, strict=True)
            ]
            steps.append(each.step(chunks))
    for found, expected in zip(steps[:4], steps[4:], strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def test_what_looks_inside_of_a_forward_runs_without_a_graph(tiny, graph_runner):
    """As scores of attention do, which keep queries."""
    model, runner = tiny("llama"), graph_runner("llama")
    before = runner.compiled.num_run
    keeper = ScoreKeeper("accumulated", 8, 3)
    runner.step([Chunk(model.new_kv(9), [3, 4, 5], True, scores=keeper)])
    assert runner.compiled.num_run == before


def changed(build, change):
    model = build("llama")
    loaded = described(model)
    calibration = calibrate(loaded)
    norm = model.model.layers[0].input_layernorm
    forward = norm.forward
    norm.forward = lambda states: change(forward(states))
    return loaded, calibration


def test_steps_of_more_tokens_than_any_graph_has_are_computed(tiny, build):
    """The last graph need only reach as far as the window."""
    model = changed(build, lambda states: states if states.shape[1] <= 200 else states.clone())
    compiled = compile_forward(*model, EAGER)
    assert len(compiled.graphs) == 2
    runner = ModelRunner(*model, compiled=compiled)
    chunks = [Chunk(tiny("llama").new_kv(150), [5] * 150, True) for _ in range(2)]
    assert runner.step(chunks).shape == (2, 97)
    assert compiled.num_run == 0


def test_a_forward_with_too_many_ranges_is_refused(build, monkeypatch):
    """Each graph takes its time; here there may be two."""
    monkeypatch.setattr(compiled_forward, "MOST_GRAPHS", 2)

    def change(states):
        return states * sum(states.shape[1] <= number for number in (3, 6, 9))

    with pytest.raises(UntraceableError, match="more than 2 graphs"):
        compile_forward(*changed(build, change), EAGER)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one of C++")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_kernels_give_what_the_forward_gives(tiny, name):
    """As torch makes them for this CPU."""
    model = tiny(name).loaded, tiny(name).calibration
    check_same(tiny(name), ModelRunner(*model, compiled=compile_forward(*model, INDUCTOR)))


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one of C++")
def test_kernels_of_another_model_of_the_same_shape_have_its_weights(tiny, build):
    """Although they come from a cache that knows shapes; and packed layers are constants, too."""
    for seed in (1, 2):
        model = build("llama")
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(torch.rand_like(parameter) + 0.5)
        for layer in model.model.layers:
            layer.mlp.down_proj = PackedLinear(layer.mlp.down_proj, ONEDNN, REGIONS)
        packed = described(model), calibrate(described(model))
        runner = ModelRunner(*packed, compiled=compile_forward(*packed, INDUCTOR))
        check_same(tiny("llama"), runner, ModelRunner(*packed))
