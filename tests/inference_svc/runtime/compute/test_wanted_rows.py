"""Graphs compute the tokens whose logits are wanted, and of the others only keys and values."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from inference_svc.runtime.compute.traced_forward import ATTEND, TracedForward
from inference_svc.runtime.compute.wanted_rows import take_rows_early
from tests.inference_svc.runtime.compute.test_compiled_forward import FAMILIES
from tests.sampled import sampled

WIDTH = 6
EMBEDDED = torch.linspace(0.5, 2.0, 50 * WIDTH).view(50, WIDTH).sin()
WEIGHT = torch.linspace(-1.0, 1.0, WIDTH * WIDTH).view(WIDTH, WIDTH)
# Experts of a mixture are computed over tokens that are chosen: not row by row.
WITH_EXPERTS = {"llama4-ragged"}


def changed(states_of):
    """Trace a function of [1, tokens, WIDTH] states; returns it changed, as it was, and how much.

    Behind it the wanted rows are taken and multiplied, as a model's head does.
    """

    def run(token_ids, positions, row_indices):
        states = states_of(EMBEDDED[token_ids] + positions.unsqueeze(-1))
        return states[:, row_indices, :] @ WEIGHT

    inputs = (torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))
    trace = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    graph = trace(*inputs, torch.zeros(3, dtype=torch.long))
    num_changed = take_rows_early(graph)
    graph.recompile()
    return graph, run, num_changed


def check_same(graph, run):
    """Compare them, for rows in any order, also more than there are tokens."""
    token_ids = torch.tensor([[7, 3, 49, 20, 11]])
    for rows in ([4, 0], [1, 2, 4], [3, 3, 0, 1, 2, 4, 4]):
        inputs = (token_ids, torch.arange(5).unsqueeze(0), torch.tensor(rows))
        torch.testing.assert_close(graph(*inputs), run(*inputs))


def taken(graph):
    """Return the shapes of which a graph takes wanted rows, without the tokens."""
    return [
        [size for size in node.args[0].meta["val"].shape if isinstance(size, int)]
        for node in graph.graph.nodes
        if node.target in (torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor)
        and node.args[0].op != "get_attr"
    ]


@pytest.mark.parametrize(
    "name", sampled(FAMILIES, 3, seed=8, always=("llama", "gemma4-wide", "gpt2"))
)
def test_the_last_layer_attends_for_wanted_tokens_only(tiny, name):
    """The others need the attention of all tokens."""
    traced = TracedForward(tiny(name).loaded, tiny(name).calibration, 2)
    take_rows_early(traced.graph)
    traced.check()
    wanted = [len(node.args) == 10 for node in traced.graph.graph.nodes if node.target is ATTEND]
    assert not any(wanted[:-1])
    assert wanted[-1] == (name not in WITH_EXPERTS)


def test_rows_are_taken_before_what_handles_each_token_by_itself():
    """Products, norms, gates, views and heads; a tensor's rows are taken once."""

    def states_of(states):
        before = states.cumsum(1)  # of all tokens
        one, other = (before @ WEIGHT).chunk(2, -1)
        heads = torch.cat((one.sigmoid() * other, -one), -1).view(1, states.shape[1], 2, -1)
        mixed = heads.transpose(1, 2).softmax(-1).transpose(1, 2).reshape(1, states.shape[1], -1)
        scale = before.pow(2).mean(-1, keepdim=True).rsqrt()
        return mixed + before * scale

    graph, run, num_changed = changed(states_of)
    assert num_changed > 12
    assert taken(graph) == [[1, WIDTH]]
    check_same(graph, run)


@pytest.mark.parametrize(
    "mix",
    [
        lambda states: states.softmax(1),
        lambda states: states.flip(1),
        lambda states: states.roll(1, 1),
        lambda states: states.view(1, WIDTH, -1).transpose(1, 2),
    ],
    ids=["softmax", "flip", "roll", "view"],
)
def test_rows_are_taken_behind_what_mixes_tokens(mix):
    """What follows computes fewer rows."""
    graph, run, num_changed = changed(lambda states: mix(states).cos().sin())
    assert num_changed >= 2
    assert len(taken(graph)) == 1
    check_same(graph, run)


def test_what_is_also_needed_of_all_tokens_is_computed_for_all():
    """And its rows are taken of the result."""

    def states_of(states):
        shared = states.cos()
        return shared.sin() + shared.exp().sum(1, keepdim=True)

    graph, run, num_changed = changed(states_of)
    assert num_changed == 2  # the sine and the sum
    check_same(graph, run)


def test_one_of_several_results_is_taken_as_a_tensor():
    """As the query of fused products, of which keys and values are of all tokens."""

    def states_of(states):
        query, key = torch.cat((states, states.exp()), -1).split(WIDTH, -1)
        return query.sin() + key.sum(1, keepdim=True)

    graph, run, _ = changed(states_of)
    assert taken(graph) == [[1, WIDTH]]
    check_same(graph, run)


def test_a_graph_that_draws_numbers_is_left_as_it_is():
    """Others would be drawn for fewer tokens."""
    graph, _, num_changed = changed(lambda states: states * torch.rand(WIDTH))
    assert num_changed == 0
    assert graph(torch.tensor([[7, 3]]), torch.zeros(1, 2), torch.tensor([1])).shape == (
        1,
        1,
        WIDTH,
    )


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_tensor_that_is_changed_in_place(is_shared):
    """If others read it, too, the graph is left as it is."""

    def states_of(states):
        doubled = states * 2.0
        seen = doubled.view(-1, WIDTH) if is_shared else doubled
        seen.mul_(3.0)
        return doubled.sin()

    graph, run, num_changed = changed(states_of)
    assert num_changed == (0 if is_shared else 3)
    check_same(graph, run)
