"""The layers of a model's own cache are restored as they were stored."""

from types import SimpleNamespace

import pytest
import torch

from inference_svc.runtime.kv.own_layers import OwnLayer, OwnTensor, state_shapes

WIDTH, WINDOW = 6, 5  # of an entry, and tokens of the window
WINDOW_PART, COUNT_PART, FLAG_PART = ("window", None), ("seen", None), ("is_long", None)
ENTRIES_PART, BUFFER_PART = ("entries", "of"), ("buffer", "of")


def describe_layer(stride):
    """Describe a layer with entries of so many tokens, a window and a buffer."""
    most = max(1, stride - 1)
    return OwnLayer(
        3,
        (COUNT_PART, FLAG_PART),
        (
            OwnTensor(WINDOW_PART, (1, 2, WINDOW, 4), 2, torch.float32),
            OwnTensor(ENTRIES_PART, (1, 1, WIDTH), 1, torch.float32, stride),
            OwnTensor(BUFFER_PART, (1, most, 3), 1, torch.float64),
        ),
        ((("values", None), WINDOW_PART),),
        ((("rate", None), stride),),
    )


def make_layer(stride, num_tokens, *, fresh=False):
    """Make such a layer behind so many tokens, with all values different."""
    generator = torch.Generator().manual_seed(1)
    entries = torch.randn(1, 99, WIDTH, generator=generator)
    window = torch.randn(1, 2, 99, 4, generator=generator)
    layer = SimpleNamespace(window=None, values=None, seen=0, is_long=False, rate=stride)
    layer.entries, layer.buffer = {"of": None}, {"of": None}
    if not fresh:
        layer.seen, layer.is_long = num_tokens, num_tokens > WINDOW
        layer.window = layer.values = window[:, :, max(0, num_tokens - WINDOW) : num_tokens]
        layer.entries["of"] = entries[:, : num_tokens // stride]
        left = num_tokens % stride
        layer.buffer["of"] = torch.full((1, left, 3), 0.5, dtype=torch.float64) if left else None
    return layer


def narrow_window(layer):
    layer.window = layer.values = layer.window[..., :3]


def all_rows(own, layer, first, end):
    return torch.cat(list(own.rows(layer, first, end)), 1)


@pytest.mark.parametrize("stride", [1, 2, 4, 7])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 7, 8, 23, 28])
def test_a_layer_is_restored(stride, num_tokens):
    """From rows that were written chunk by chunk, and the last chunk's state."""
    own, layer = describe_layer(stride), make_layer(stride, num_tokens)
    ends = [end for end in (1, 2, 9, 20, 21) if end < num_tokens] + [num_tokens]
    firsts = [0, *ends[:-1]]
    pieces = [
        all_rows(own, make_layer(stride, end), first, end)
        for first, end in zip(firsts, ends, strict=True)
    ]
    rows = torch.cat(pieces)
    assert rows.shape == (num_tokens, own.row_width)
    assert rows.equal(all_rows(own, layer, 0, num_tokens))
    states = dict(own.states(layer))
    shapes = {shape.place: shape for shape in state_shapes([own])}
    assert {place: tuple(state.shape) for place, state in states.items()} == {
        place: shape.shape for place, shape in shapes.items()
    }
    again = make_layer(stride, 0, fresh=True)
    own.fill(again, states.__getitem__, rows)
    assert (again.seen, again.is_long, again.rate) == (num_tokens, num_tokens > WINDOW, stride)
    assert again.values is again.window
    assert again.window.equal(layer.window)
    assert again.entries["of"].equal(layer.entries["of"])
    left = layer.buffer["of"]
    assert again.buffer["of"] is None if left is None else again.buffer["of"].equal(left)


def test_a_row_is_final_once_its_token_is_computed():
    """Though it is the first of an entry that is known later."""
    own = describe_layer(4)
    early, late = all_rows(own, make_layer(4, 9), 0, 9), all_rows(own, make_layer(4, 30), 0, 30)
    assert late[:9].equal(early)
    assert not late[:4].any()
    assert late[4:7].any(1).all()  # of four, the last of which is padding


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda layer: setattr(layer, "more", 1), "more"),
        (lambda layer: setattr(layer, "rate", 5), "rate"),
        (lambda layer: setattr(layer, "values", layer.values.clone()), "values"),
        (narrow_window, "window"),
        (lambda layer: layer.buffer.update(of=torch.zeros(1, 4, 3, dtype=torch.float64)), "buffer"),
    ],
)
def test_unknown_parts_are_refused(change, complaint):
    """Another part, shape or size would be lost."""
    layer = make_layer(4, 9)
    change(layer)
    with pytest.raises(AssertionError, match=complaint):
        list(describe_layer(4).states(layer))


def test_a_state_must_match_the_position_of_the_rows():
    """Rows of too few entries are refused, too."""
    own = describe_layer(4)
    states = dict(own.states(make_layer(4, 9)))
    rows = all_rows(own, make_layer(4, 12), 0, 12)
    with pytest.raises(AssertionError, match="2 entries"):
        own.fill(make_layer(4, 0, fresh=True), states.__getitem__, rows)
    with pytest.raises(AssertionError, match="2 entries of 12"):
        list(own.rows(make_layer(4, 9), 9, 12))
