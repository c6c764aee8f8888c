"""A program computes what its graph does, and keeps values no longer than they are read."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from inference_svc.runtime.compute.graph_pieces import divide
from inference_svc.runtime.compute.graph_program import GraphProgram


def is_cut(node):
    return node.target is torch.ops.aten.sin.default


def run(first, second):
    """Read the first input again at the end."""
    states = first + second
    for number in range(4):
        states = (states * 2).sin() - number
    return states + first


@pytest.fixture
def whole():
    return make_fx(run, tracing_mode="symbolic")(torch.randn(3), torch.randn(3))


def test_a_program_computes_the_graph(whole):
    program = GraphProgram.of(whole, divide(whole, is_cut))
    inputs = torch.randn(5), torch.randn(5)
    assert torch.equal(program.run(*inputs), run(*inputs))
    assert torch.equal(program.run(*inputs), run(*inputs)), "a second time"


def test_values_are_freed_once_they_were_read_last(whole):
    """A step of many layers would otherwise hold the intermediate results of all of them."""
    results, most = [], []

    def watched(part):
        def compute(*arguments):
            most.append(sum(reference() is not None for reference in results))
            found = part.run(*arguments)
            results.extend(map(weakref.ref, found))
            return found

        return replace(part, run=compute)

    parts = [watched(part) for part in divide(whole, is_cut)]
    GraphProgram.of(whole, parts).run(torch.randn(5), torch.randn(5))
    assert len(most) == 9
    assert max(most) == 1


def test_a_graph_may_be_one_operation():
    whole = make_fx(torch.sin, tracing_mode="symbolic")(torch.randn(3))
    states = torch.randn(5)
    assert torch.equal(GraphProgram.of(whole, divide(whole, is_cut)).run(states), states.sin())
