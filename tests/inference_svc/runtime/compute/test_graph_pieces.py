"""A graph's pieces compute what the graph does, and equal ones have one key."""

from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from inference_svc.runtime.compute.graph_pieces import divide
from inference_svc.runtime.compute.graph_program import GraphProgram

WIDTH = 8


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return [torch.randn(WIDTH, WIDTH) for _ in range(4)]


def traced(run, *inputs):
    """Trace with sizes that are symbols, as `TracedForward` does."""
    return make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)


def is_cut(node):
    return node.target is torch.ops.aten.sin.default


def keys_of(parts):
    return [part.key for part in parts if part.key]


def layers(weights, positions, states):
    """Layers that are equal but for their weights; what they share is computed before them."""
    shared = positions.float().cos().unsqueeze(1)
    for weight in weights:
        new = (states @ weight).sin()
        states = states + new.view(positions.shape[0], -1) * shared
    return states


def test_pieces_compute_what_the_graph_does(weights):
    """For other numbers of rows than that of the trace, too, and for one."""
    whole = traced(partial(layers, weights), torch.arange(5), torch.randn(5, WIDTH))
    parts = divide(whole, is_cut)
    assert [bool(part.key) for part in parts] == [True, False] * 4 + [True]
    for rows in (1, 2, 5, 9):
        inputs = torch.arange(rows), torch.randn(rows, WIDTH)
        assert torch.equal(GraphProgram.of(whole, parts).run(*inputs), layers(weights, *inputs))


def test_layers_have_one_key(weights):
    """The first and the last piece have others."""
    whole = traced(partial(layers, weights), torch.arange(5), torch.randn(5, WIDTH))
    parts = divide(whole, is_cut)
    first, *inner, last = keys_of(parts)
    assert len(inner) == 3
    assert len({first, last, *inner}) == 3


def test_pieces_of_other_shapes_have_other_keys(weights):
    """And so have those of another dtype, and of other constants."""

    def run(states):
        for weight in weights:
            states = (states @ weight.to(states.dtype)).sin()
        return states

    def keys(states):
        return set(keys_of(divide(traced(run, states), is_cut)))

    assert len(keys(torch.randn(5, WIDTH))) == 1
    weights[1] = torch.randn(WIDTH, 2 * WIDTH)
    weights[2] = torch.randn(2 * WIDTH, WIDTH)
    assert len(keys(torch.randn(5, WIDTH))) == 3
    assert len(keys(torch.randn(5, WIDTH)) | keys(torch.randn(5, WIDTH).double())) == 6

    def scaled(states):
        return ((states * 2).sin() * 3).sin()

    parts = divide(traced(scaled, torch.randn(5, WIDTH)), is_cut)
    assert len(set(keys_of(parts))) == 2


def test_what_nobody_reads_is_dropped():
    def run(states):
        states.exp()
        return states.sin() + 1

    _, piece = divide(traced(run, torch.randn(5, WIDTH)), is_cut)
    called = [node.target for node in piece.run.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.aten.add.Tensor]


def test_a_size_is_read_from_an_argument():
    """Also where a piece needs nothing else of that tensor."""

    def run(states, other):
        return states.sin().new_ones(other.shape[0]) + 1

    whole = traced(run, torch.randn(5, WIDTH), torch.randn(3))
    parts = divide(whole, is_cut)
    inputs = torch.randn(5, WIDTH), torch.randn(7)
    assert torch.equal(GraphProgram.of(whole, parts).run(*inputs), torch.full((7,), 2.0))
