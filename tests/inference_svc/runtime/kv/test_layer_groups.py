"""Groups of layers: which share pages, and where each has its tokens."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.attention_window import HeldRows
from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.runtime.kv.layer_groups import MOST_PADDING, HeldWindows, LayerGroups, group_size
from inference_svc.runtime.kv.layer_tensors import LayerShape, token_items_of
from inference_svc.runtime.kv.page_pool import PagePool

PAGE_TOKENS, NUM_PAGES = 8, 60
NARROW = LayerShape((2, 4), (2, 3))
SHAPES = {  # by how many rows of the first one a token takes
    1: (NARROW, LayerShape((1, 8), (1, 6))),
    2: (LayerShape((4, 4), (4, 3)), LayerShape((1, 16), (2, 6))),
    4: (LayerShape((2, 16), (4, 6)),),
}
ALL = [shape for shapes in SHAPES.values() for shape in shapes]
LAYERS = st.lists(st.tuples(st.booleans(), st.sampled_from(ALL)), min_size=2, max_size=24).filter(
    lambda layers: len({has_window for has_window, _ in layers}) == 2
)


def windows_of(layers):
    """Give every other layer a window of 20 tokens."""
    return HeldWindows(HeldRows(9, 5, 6, 1, 1), frozenset(layers))


def test_scored_tokens_and_a_block_stay_behind_the_window(tiny):
    """As many tokens as the longer of the two, beside the window and a step's."""
    model = tiny("gemma3", has_windows=True)
    shapes, layout = [layer.shape for layer in model.calibration.layers], model.calibration.layout
    for scored_tokens in (layout.block_tokens - 1, layout.block_tokens + 1):
        held = HeldWindows.of(layout, shapes, step_tokens=7, scored_tokens=scored_tokens)
        assert held.rows.spare_tokens == max(scored_tokens, layout.block_tokens)
        assert held.rows.num_rows == layout.window + held.rows.spare_tokens + 7


def grouped(layers):
    """Return groups of layers, given as (has a window, shape), with their shapes."""
    shapes = [shape for _, shape in layers]
    windows = windows_of(at for at, (has_window, _) in enumerate(layers) if has_window)
    return LayerGroups.of(windows, shapes, PAGE_TOKENS), shapes


def test_groups_are_as_large_as_few_empty_places_allow():
    """One layer in eight may be missing."""
    sizes = {(5, 29): 5, (8, 40): 8, (12, 12): 12, (10, 52): 6, (5, 6): 3, (20, 5): 5, (1, 5): 1}
    found = {
        (full, windowed): group_size({(False, 1): full, (True, 1): windowed})
        for full, windowed in sizes
    }
    assert found == sizes


def test_layers_of_longer_rows_count_several_times():
    """Gemma 4: ten layers of 4 x 512 without a window, fifty of 16 x 256 with one."""
    full, windowed = LayerShape((4, 512), (4, 512)), LayerShape((16, 256), (16, 256))
    shapes = ([windowed] * 5 + [full]) * 10
    windows = windows_of(at for at in range(60) if at % 6 < 5)
    groups = LayerGroups.of(windows, shapes, 16)
    assert groups.places == (full,) * 10
    assert groups.widths == (1, 2, 2, 2, 2, 2)
    assert groups.tokens_on_page == (16, 8, 8, 8, 8, 8)
    assert (groups.pages.num_full, groups.pages.num_windowed) == (1, 10)


@given(layers=LAYERS)
def test_groups_have_layers_of_one_kind(layers):
    """Each layer is in exactly one; and few places of a page are empty."""
    groups, shapes = grouped(layers)
    narrow = min(map(token_items_of, ([shape] for shape in shapes)))
    assert sorted(index for group in groups.layers for index in group) == list(range(len(layers)))
    for group, (indexes, width) in enumerate(zip(groups.layers, groups.widths, strict=True)):
        assert {layers[index][0] for index in indexes} == {groups.has_window(group)}
        assert {token_items_of([shapes[index]]) for index in indexes} == {width * narrow}
    has_windows = list(map(groups.has_window, range(len(groups.layers))))
    assert has_windows == sorted(has_windows)
    room = groups.pages.num_groups * token_items_of(groups.places)
    items = token_items_of(shapes)
    assert items <= room <= items + items // MOST_PADDING


@given(layers=LAYERS, count=st.integers(1, 6), seed=st.integers(0, 1000))
def test_no_two_tokens_share_memory(layers, count, seed):
    """Of any layers of two sequences; except those behind a window of another."""
    groups, shapes = grouped(layers)
    slots = PagedSlots(NUM_PAGES * groups.pages.num_groups, PAGE_TOKENS, groups.pages)
    pool = PagePool(
        shapes, slots, 1, device=torch.device("cpu"), dtype=torch.float64, groups=groups
    )
    pool._page_region.fill_(-1.0)
    order = torch.randperm(pool.num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    num_pages, num_tokens = groups.pages.num_pages(count), count * PAGE_TOKENS
    kvs = [pool.new_kv(num_tokens, order[begin : begin + num_pages]) for begin in (0, num_pages)]
    held = min(num_tokens, groups.pages.window_pages * PAGE_TOKENS)
    places = [
        (component, layer, num_tokens - held if layers[layer][0] else 0)
        for kv in kvs
        for component in kv.components
        for layer in range(len(layers))
    ]
    written = 0
    for component, layer, first in places:
        with component.filling(layer, first, num_tokens - first) as tokens:
            tokens.copy_(torch.arange(written, written + tokens.numel()).view(tokens.shape))
            written += tokens.numel()
    number = 0
    for component, layer, first in places:
        tokens = component.read(layer, first, num_tokens - first)
        expected = torch.arange(number, number + tokens.numel(), dtype=torch.float64)
        assert torch.equal(tokens, expected.view(tokens.shape))
        index = component.slot_index(layer, first, num_tokens - first)
        assert torch.equal(component.region(layer)[index], tokens)
        number += tokens.numel()
    assert int((pool._page_region >= 0).sum()) == written
    assert written == sum(
        (num_tokens - first) * prod(component.region(layer).shape[1:])
        for component, layer, first in places
    )


@given(layers=LAYERS, count=st.integers(1, 6))
def test_groups_that_keep_all_tokens_have_a_page_for_each(layers, count):
    """Proofs of kernels read all tokens; layers lie as they do with windows."""
    groups, _ = grouped(layers)
    plain = groups.holding_all()
    assert (plain.layers, plain.widths, plain.places) == (
        groups.layers,
        groups.widths,
        groups.places,
    )
    tables = plain.tables(range(plain.pages.num_pages(count)))
    assert not any(map(plain.has_window, range(len(tables))))
    assert [len(table) for table in tables] == [count * width for width in plain.widths]
    pages = [page for table in tables for page in table]
    assert len(set(pages)) == len(pages)


@pytest.mark.parametrize(
    "other",
    [
        LayerShape((2, 8), (2, 3)),  # keys twice as wide, values as they are
        LayerShape((6, 4), (6, 3)),  # three rows: a page is not three times as many tokens
        LayerShape((3, 4), (3, 3)),  # one and a half
        LayerShape((2, 4), (2, 3), index=(1, 4)),
        LayerShape((1, 8), (1, 6), is_latent=True),
    ],
)
def test_layers_that_fit_no_page_have_no_groups(other):
    """Their sequences keep all tokens."""
    assert LayerGroups.of(windows_of([0]), [NARROW, NARROW, other], PAGE_TOKENS) is None
