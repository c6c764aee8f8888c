"""The kernel multiplies like torch, for all shapes, strides, rows and threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear

from inference_svc.runtime.cpu.native_library import load_library
from inference_svc.runtime.cpu.product_kernel import ProductKernel
from inference_svc.runtime.memory import RegionTensors

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


@pytest.fixture(scope="module")
def kernel():
    return ProductKernel.load()


def make_layer(outputs, inputs, dtype=torch.float32, seed=0):
    """Return weights and bias of a layer whose products are of the order of 1."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=random) * inputs**-0.5
    return weight.to(dtype), torch.randn(outputs, generator=random).to(dtype)


def skip_unless_usable(kernel, dtype):
    if kernel.why_unusable(CPU, dtype):
        pytest.skip(kernel.why_unusable(CPU, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(0, 140),
    inputs=st.sampled_from([1, 2, 17, 64, 2047, 2049, 4100]),
    outputs=st.sampled_from([1, 15, 16, 33, 64, 97]),
    has_bias=st.booleans(),
)
def test_it_is_torchs_product(kernel, dtype, rows, inputs, outputs, has_bias):
    """With whole panels, blocks of rows and of inputs, and parts of them."""
    skip_unless_usable(kernel, dtype)
    weight, bias = make_layer(outputs, inputs, dtype)
    states = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
    added = bias if has_bias else None
    found = kernel.multiply(states, kernel.pack(weight, RegionTensors()), added, outputs)
    expected = linear(states.float(), weight.float(), bias.float() if has_bias else None)
    assert (found.dtype, found.shape) == (dtype, (rows, outputs))
    torch.testing.assert_close(found.float(), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [301, 2500])
def test_a_rows_product_does_not_depend_on_other_rows(kernel, dtype, inputs):
    """To the bit: so a session's answer is the same beside all others."""
    skip_unless_usable(kernel, dtype)
    weight, bias = make_layer(70, inputs, dtype)
    packed, states = kernel.pack(weight, RegionTensors()), torch.randn(150, inputs).to(dtype)
    whole = kernel.multiply(states, packed, bias, 70)
    for first, count in ((0, 1), (3, 2), (9, 8), (60, 9), (1, 149)):
        part = kernel.multiply(states[first : first + count], packed, bias, 70)
        assert torch.equal(part, whole[first : first + count])


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 150])
def test_more_threads_change_no_bit(kernel, threads, rows):
    weight, bias = make_layer(1000, 600)
    packed, states = kernel.pack(weight, RegionTensors()), torch.randn(rows, 600)
    found = []
    for number in (1, 2, 3):
        threads(number)
        found.append(kernel.multiply(states, packed, bias, 1000))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_may_have_any_shape_and_strides(kernel, dtype):
    """Models hand over slices and transposed tensors."""
    skip_unless_usable(kernel, dtype)
    weight, _ = make_layer(40, 64, dtype)
    packed, base = kernel.pack(weight, RegionTensors()), torch.randn(2, 64, 3, 128).to(dtype)
    for states in (
        base[:, :3, :, :64],
        base[..., ::2],
        base.transpose(1, 3)[:, ::2],
        base[0, 0, 0, 1:65],
    ):
        found = kernel.multiply(states, packed, None, 40)
        expected = linear(states.float(), weight.float())
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
        assert torch.equal(found, kernel.multiply(states.contiguous(), packed, None, 40))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (70, 301), (1, 1)])
def test_unpacked_weights_are_the_same(kernel, dtype, outputs, inputs):
    skip_unless_usable(kernel, dtype)
    weight, _ = make_layer(outputs, inputs, dtype)
    assert torch.equal(kernel.unpack(kernel.pack(weight, RegionTensors()), outputs, inputs), weight)


def test_states_that_do_not_fit_are_refused(kernel):
    """As by torch's product; the kernel itself would read other memory."""
    packed = kernel.pack(make_layer(40, 64)[0], RegionTensors())
    for states in (torch.zeros(2, 63), torch.zeros(2, 65), torch.zeros(2, 64).bfloat16()):
        with pytest.raises(RuntimeError, match=r"do not fit weights of .* 64 inputs"):
            kernel.multiply(states, packed, None, 40)


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_kernel_is_found(factor):
    """A deviation of a thousandth is enough, and so is NaN."""

    class Wrong(ProductKernel):
        def multiply(self, *args):
            return super().multiply(*args) * factor

    wrong = Wrong(load_library())
    assert "off torch's product" in wrong.why_unusable(CPU, torch.float32)


def test_what_it_cannot_compute(kernel):
    assert "float16" in kernel.why_unusable(CPU, torch.float16)
    assert "not a CPU" in kernel.why_unusable(torch.device("meta"), torch.float32)


def test_a_trace_has_it_as_an_operator(kernel):
    """Which gives the same, and its shape without contents."""
    from torch.fx.experimental.proxy_tensor import make_fx

    weight, bias = make_layer(40, 64)
    packed = kernel.pack(weight, RegionTensors())

    def multiply(states):
        return kernel.multiply(states, packed, bias, 40)

    traced = make_fx(multiply, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    graph, states = traced(torch.randn(1, 5, 64)), torch.randn(1, 9, 64)
    assert torch.equal(graph(states), multiply(states))
    operators = [node.target for node in graph.graph.nodes]
    assert operators.count(torch.ops.cachedattention.multiply_packed.default) == 1
