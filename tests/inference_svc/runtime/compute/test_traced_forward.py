"""A forward is traced to a graph for a range of numbers of tokens, or refused with the reason."""

import pytest
import torch

from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.compute.traced_forward import TracedForward, UntraceableError
from inference_svc.runtime.cpu import product_kernel
from inference_svc.runtime.memory import RegionTensors
from inference_svc.runtime.model.model_loader import describe_model
from inference_svc.runtime.model.packed_linear import PackedLinear
from inference_svc.runtime.model.packing import OneDnnPacking

ONEDNN = OneDnnPacking()
REGIONS = RegionTensors()
LOTS = 10_000


@pytest.fixture
def changed(build):
    """Return a function that makes a model whose first norm does something else, too."""

    def make(change):
        model = build("llama")
        loaded = describe_model(model, tokenizer=None, name="llama", fingerprint="0" * 32)
        calibration = calibrate(loaded)
        norm = model.model.layers[0].input_layernorm
        forward = norm.forward
        norm.forward = lambda states: change(forward(states))
        return loaded, calibration

    return make


def operators(traced):
    return [node.target for node in traced.graph.graph.nodes if node.op == "call_function"]


def test_all_numbers_of_tokens_have_one_graph(tiny):
    """Which has one call of our operator per layer."""
    model = tiny("llama").loaded, tiny("llama").calibration
    traced = TracedForward(*model, 2)
    traced.check()
    assert (traced.tokens.start, traced.rows.start) == (2, 2)
    assert traced.tokens.stop > LOTS < traced.rows.stop
    assert operators(traced).count(torch.ops.cachedattention.attend.default) == 2


def test_a_layer_that_counts_tokens_ends_the_range(tiny, build):
    """As layers packed for oneDNN do, which multiply up to three rows with stored weights."""
    model = build("llama")
    loaded = describe_model(model, tokenizer=None, name="llama", fingerprint="0" * 32)
    for layer in model.model.layers:
        layer.mlp.up_proj = PackedLinear(layer.mlp.up_proj, ONEDNN, REGIONS, keeps_stored=True)
    model.lm_head = PackedLinear(model.lm_head, ONEDNN, REGIONS, keeps_stored=True)
    few = TracedForward(loaded, calibrate(loaded), 2)
    few.check()
    assert (few.tokens, few.rows) == (range(2, 4), range(2, 4))
    many = TracedForward(loaded, calibrate(loaded), 4)
    many.check()
    assert (many.tokens.start, many.rows.start) == (4, 4)
    assert many.tokens.stop > LOTS < many.rows.stop


def test_layers_packed_for_our_kernel_have_one_graph(build, monkeypatch):
    """It multiplies all numbers of tokens in the same way."""
    monkeypatch.setattr(product_kernel, "MIN_WEIGHTS", 1)
    model = build("llama")
    loaded = describe_model(model, tokenizer=None, name="llama", fingerprint="0" * 32)
    calibration = calibrate(loaded, packing="cpp")
    traced = TracedForward(loaded, calibration, 2)
    traced.check()
    assert (traced.tokens.start, traced.rows.start) == (2, 2)
    assert traced.tokens.stop > LOTS < traced.rows.stop
    multiply = torch.ops.cachedattention.multiply_packed.default
    assert operators(traced).count(multiply) == 2 * 7 + 1


def test_a_forward_that_depends_on_more_than_a_range_is_refused(changed):
    """As on whether the number of tokens is even."""
    model = changed(lambda states: states if states.shape[1] % 2 else -states)
    with pytest.raises(UntraceableError, match="depends on whether"):
        TracedForward(*model, 2).check()


def test_a_forward_that_depends_on_contents_has_no_graph(changed):
    """The trace has none."""
    model = changed(lambda states: states if states.sum().item() < 1e30 else -states)
    with pytest.raises(Exception, match=r"[Dd]ata-dependent"):
        TracedForward(*model, 2)


def test_what_torch_cannot_trace_is_an_error_and_no_more(tiny, caplog):
    """As the product of several experts in float32; the log has no traceback besides."""
    model = tiny("mixtral")
    with pytest.raises(RuntimeError, match="Expected inputs of BF16"):
        TracedForward(model.loaded, model.calibration, 2)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("diffllama", "the model runs in mode gather"),
        ("lfm2", "the model has recurrent states"),
        ("gemma4", "layers attend to keys and values of others"),
    ],
)
def test_what_has_no_operator_for_each_layer_is_refused(tiny, name, reason):
    """In words."""
    with pytest.raises(UntraceableError, match=reason):
        TracedForward(tiny(name).loaded, tiny(name).calibration, 2)


def test_a_graph_runs_in_steps_only(tiny):
    """Otherwise nobody knows where the tokens' KV goes."""
    model = tiny("llama")
    traced = TracedForward(model.loaded, model.calibration, 2)
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(AssertionError, match="outside forward_context"):
        traced.graph(tokens, tokens, tokens[0])
