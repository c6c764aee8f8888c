"""Products of the same rows become one where their weights lie side by side, with the same bits."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from inference_svc.runtime.compute.joined_products import join_products
from inference_svc.runtime.cpu.product_kernel import ProductKernel
from inference_svc.runtime.memory import RegionTensors

KERNEL = ProductKernel.load()
INPUTS = 96
PANEL = KERNEL.pack(torch.zeros(1, 1), RegionTensors()).shape[2]


@pytest.fixture
def joined():
    """Return a function that packs weights, and traces and joins products with them."""
    torch.manual_seed(0)
    regions = RegionTensors()

    def make(columns, biases=(None, None, None), between=0):
        layers = []
        for number, bias in zip(columns, biases, strict=True):
            packed = KERNEL.pack(torch.randn(number, INPUTS), regions)
            layers.append((packed, bias, number))
            if between:
                regions.take((between,), torch.uint8)

        def run(states):
            return [KERNEL.multiply(states.cos(), *layers[0]).sin()] + [
                KERNEL.multiply(states, *layer).sin() for layer in layers
            ]

        trace = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        return trace(torch.randn(5, INPUTS)), trace(torch.randn(5, INPUTS))

    return make


def columns_of(graph):
    """Return the numbers of columns of a graph's products."""
    multiply = torch.ops.cachedattention.multiply_packed.default
    return [node.args[3] for node in graph.graph.nodes if node.target is multiply]


def check_same(graph, before):
    for rows in (1, 2, 5, 70):
        states = torch.randn(rows, INPUTS)
        for found, expected in zip(graph(states), before(states), strict=True):
            assert torch.equal(found, expected)


def test_products_of_the_same_rows_are_one(joined):
    """That of others is another."""
    graph, before = joined((PANEL, 3 * PANEL, PANEL + 1))
    join_products(graph)
    assert columns_of(before) == [PANEL, PANEL, 3 * PANEL, PANEL + 1]
    assert columns_of(graph) == [PANEL, 5 * PANEL + 1]
    graph.recompile()
    check_same(graph, before)


def test_biases_are_joined(joined):
    """If all have one."""
    graph, before = joined((PANEL, PANEL, PANEL), (torch.randn(PANEL), torch.randn(PANEL), None))
    join_products(graph)
    assert columns_of(graph) == [PANEL, 2 * PANEL, PANEL]
    graph.recompile()
    check_same(graph, before)


@pytest.mark.parametrize(
    ("columns", "between", "expected"),
    [
        ((PANEL + 1, PANEL, PANEL), 0, [PANEL + 1, PANEL + 1, 2 * PANEL]),
        ((PANEL,) * 3, 1, [PANEL] * 4),
    ],
)
def test_weights_with_a_gap_between_them_are_not_joined(joined, columns, between, expected):
    """Be it within a panel, or in memory."""
    graph, before = joined(columns, between=between)
    join_products(graph)
    assert columns_of(graph) == expected
    graph.recompile()
    check_same(graph, before)
