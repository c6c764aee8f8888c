"""Attention over sequences' KV: each part sees its own rows, whatever the other parts are."""

import pytest
import torch

from inference_svc.runtime.attention.attention import Part, TorchAttention
from inference_svc.runtime.attention.softmax_attention import AttentionOptions, attend
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_tensors import LayerShape

HEADS, KV_HEADS, DIM, NUM_LAYERS = 4, 2, 8, 2
CPU = torch.device("cpu")
OPTIONS = {
    "plain": AttentionOptions(),
    "window": AttentionOptions(window=5),
    "chunk": AttentionOptions(chunk=8),
    "softcap": AttentionOptions(softcap=1.5),
    "sinks": AttentionOptions(sinks=torch.linspace(-1, 2, HEADS), window=9),
}


def filled_parts(sizes, value_dim=DIM):
    """Return parts of these (tokens before, new tokens), their KV full of random rows."""
    shapes = [LayerShape((KV_HEADS, DIM), (KV_HEADS, value_dim))] * NUM_LAYERS
    pool = KVPool(shapes, 500, device=CPU, dtype=torch.float32)
    torch.manual_seed(4)
    parts = []
    for num_past, num_tokens in sizes:
        kv = pool.new_kv(num_past + num_tokens + 3)
        for tensor in (*kv.keys.layers, *kv.values.layers):
            tensor.normal_()
        kv.num_tokens = num_past
        parts.append(Part(kv, num_tokens))
    return parts


def query_for(parts):
    """Return a query as models give it: a view of token-major memory."""
    return torch.randn(1, sum(part.num_tokens for part in parts), HEADS, DIM).transpose(1, 2)


@pytest.mark.parametrize("value_dim", [DIM, DIM + 4])
@pytest.mark.parametrize("sizes", [[(20, 1), (0, 1), (7, 1)], [(20, 1), (0, 6), (9, 4)]])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_part_has_the_same_bits_alone_and_in_a_batch(name, sizes, value_dim):
    """Of decodes or mixed."""
    parts = filled_parts(sizes, value_dim)
    query = query_for(parts)
    step = TorchAttention().prepare(parts)
    for layer_index in reversed(range(NUM_LAYERS)):
        together = step.attend(query, layer_index, OPTIONS[name])
        assert together.shape == (1, query.shape[2], HEADS, value_dim)
        assert together.is_contiguous()
        begin = 0
        for part in parts:
            own = query[:, :, begin : begin + part.num_tokens]
            alone = TorchAttention().prepare([part]).attend(own, layer_index, OPTIONS[name])
            assert torch.equal(together[:, begin : begin + part.num_tokens], alone)
            begin += part.num_tokens


@pytest.mark.parametrize("name", OPTIONS)
def test_a_part_sees_exactly_its_rows(name):
    """Up to its length."""
    parts = filled_parts([(6, 3), (11, 1)])
    query = query_for(parts)
    attended = TorchAttention().prepare(parts).attend(query, 1, OPTIONS[name])
    for part, own, piece in zip(
        parts, query.split([3, 1], 2), attended.split([3, 1], 1), strict=True
    ):
        rows = [
            tensors[1][:, :, : part.length].clone() for tensors in (part.kv.keys, part.kv.values)
        ]
        expected = attend(own, *rows, OPTIONS[name], {}).transpose(1, 2)
        torch.testing.assert_close(piece, expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_last_tokens_of_a_part_may_attend_alone(name):
    """They see what they see beside those before them."""
    parts = filled_parts([(6, 5), (11, 3), (0, 4)])
    query = query_for(parts)
    whole = TorchAttention().prepare(parts).attend(query, 1, OPTIONS[name])
    last = [Part(parts[0].kv, 2, 3), Part(parts[2].kv, 1, 3)]
    rows = [3, 4, 11]
    found = TorchAttention().prepare(last).attend(query[:, :, rows], 1, OPTIONS[name])
    torch.testing.assert_close(found, whole[:, rows])
