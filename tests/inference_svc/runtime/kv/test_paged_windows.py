"""Windows on pages: layers in groups, of which those with a window write over what is behind it."""

import random
from dataclasses import replace

import pytest
import torch

from inference_svc.core.discards import kept_runs
from inference_svc.core.scheduling.held_slots import PageCopy
from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.core.scheduling.write_slots import WriteSlots
from inference_svc.runtime.attention.paged_attention import PagedAttention
from inference_svc.runtime.calibration.graph_choice import StepMemory, choose_graphs
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.cuda import page_attention
from inference_svc.runtime.kv.layer_groups import LayerGroups, group_size
from inference_svc.runtime.kv.layer_tensors import LayerShape, token_items_of
from inference_svc.runtime.kv.paged_kv import PagePool
from inference_svc.runtime.kv.windowed_kv import HeldWindows
from inference_svc.runtime.kv.write_ring import WriteRing
from inference_svc.runtime.transfer.compaction import compact_in_place
from inference_svc.runtime.transfer.layer_load import copy_layer
from tests.recorded_graph import RecordedGraphs
from tests.split_attention import attend_pages

# Softcap; two rotations; pairs; sinks; a window in all layers.
NAMES = ("gemma2", "gemma3", "cohere2", "gpt-oss", "mistral")
CAPACITY, STEP, PAGE_TOKENS, NUM_PAGES = 120, 16, 4, 400


class Windowed:
    """A model, and sequences on pages that hold its windows only; memory is no numbers yet."""

    def __init__(self, model):
        self.model, self.layers = model, model.calibration.layers
        shapes = [layer.shape for layer in self.layers]
        held = HeldWindows.of(model.calibration.layout, shapes, STEP)
        rows = replace(held.rows, spare_tokens=4, step_tokens=STEP)
        self.windows = held._replace(rows=rows)
        self.groups = LayerGroups.of(self.windows, shapes, PAGE_TOKENS)
        self.slots = PagedSlots(NUM_PAGES, PAGE_TOKENS, self.groups.pages)
        loaded = model.loaded
        options = {"device": loaded.device, "dtype": loaded.dtype, "groups": self.groups}
        self.pool = PagePool(shapes, self.slots, 40, **options)
        self.pool._page_region.fill_(float("nan"))
        self._pages = random.Random(5).sample(range(NUM_PAGES), NUM_PAGES)  # noqa: S311  # test data
        self.runner = model.runner

    @property
    def rows(self):
        return self.windows.rows

    def page(self):
        return self._pages.pop()

    def new_kv(self, capacity=CAPACITY):
        count = self.slots.needed_for(capacity) // PAGE_TOKENS
        return self.pool.new_kv(capacity, [self.page() for _ in range(count)])

    def feed(self, kv, tokens):
        """Compute tokens at once, as an engine does; returns the last one's logits."""
        kv.keep_from(self.rows.first_held(kv.window_from, kv.num_tokens, len(tokens)))
        return self.runner.step([Chunk(kv, tokens, want_logits=True)])[0]

    def feed_all(self, kv, tokens):
        for first in range(kv.num_tokens, len(tokens), STEP):
            logits = self.feed(kv, tokens[first : first + STEP])
        return logits


def token_ids(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


def feed_whole(model, kv, tokens):
    return model.runner.step([Chunk(kv, tokens, want_logits=True)])[0]


@pytest.fixture(params=NAMES)
def model(tiny, request):
    return tiny(request.param, has_windows=True)


@pytest.fixture
def windowed(model):
    return Windowed(model)


def test_a_sequence_takes_fewer_pages_and_less_memory(windowed):
    """As many as are counted: of layers with a window no more than there are rows, and a page."""
    shapes = [layer.shape for layer in windowed.layers]
    num_bytes = 4 * token_items_of(shapes)
    kv, groups = windowed.new_kv(), windowed.groups
    held = len(kv.tables.pages) * PAGE_TOKENS * 4 * token_items_of(shapes[: groups.size])
    share = len(windowed.windows.layers) / len(shapes)
    most = (windowed.rows.num_rows + 2 * PAGE_TOKENS) * share + CAPACITY * (1 - share)
    assert held < num_bytes * most * 1.3 < num_bytes * CAPACITY  # some groups lack a layer
    assert kv.capacity_tokens == CAPACITY


@pytest.mark.parametrize(
    ("kernel", "seed"),
    [
        (None, 1),
        (None, 2),
        (attend_pages, 1),
        (page_attention.attend_pages, 1),
        pytest.param(page_attention.attend_pages, 2, marks=pytest.mark.long),
    ],
)
def test_answers_are_those_of_kv_that_holds_all(model, windowed, kernel, seed):
    """Chunk by chunk and token by token, however often the window's pages come round."""
    if kernel is not None:
        windowed.runner = ModelRunner(model.loaded, model.calibration, PagedAttention(kernel))
    kv, whole, other = windowed.new_kv(), model.new_kv(CAPACITY), windowed.new_kv()
    tokens, die = token_ids(seed, CAPACITY), random.Random(seed)  # noqa: S311  # test data
    while kv.num_tokens < CAPACITY:
        new = tokens[kv.num_tokens :][: die.choice([1, 1, 1, 5, STEP])]
        logits = windowed.feed(kv, new)
        torch.testing.assert_close(logits, feed_whole(model, whole, new), rtol=1e-4, atol=1e-4)
        if other.num_tokens < 60:
            windowed.feed(other, new)
    assert CAPACITY - kv.window_from <= windowed.rows.num_rows < CAPACITY
    expected = model.stock_logits(tokens)[-1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


RANGES = {
    "the oldest": [(0, 50)],
    "behind what models lean on": [(4, 60)],
    "here and there": [(first, first + 2) for first in range(3, 95, 5)],
    "of the window, too": [(10, 40), (103, 105)],
    "nothing before it": [(106, 108)],
}


@pytest.mark.parametrize("what", list(RANGES))
def test_what_a_discard_leaves_is_moved_as_in_kv_that_holds_all(model, windowed, what):
    """Whatever page of a window's it goes to; after that the turn goes on."""
    kv, whole, ranges = windowed.new_kv(), model.new_kv(CAPACITY), RANGES[what]
    tokens = token_ids(3, 110)
    windowed.feed_all(kv, tokens)
    feed_whole(model, whole, tokens)
    before = kv.window_from
    assert before > 60
    for each in (kv, whole):
        compact_in_place(each, kept_runs(ranges, 110), model.calibration)
    gone = sum(max(0, min(end, before) - start) for start, end in ranges)
    assert (kv.num_tokens, kv.window_from) == (whole.num_tokens, before - gone)
    for layer_index in range(len(windowed.layers)):
        first = kv.keys.first_token(layer_index)
        assert first == (kv.window_from if layer_index in windowed.windows.layers else 0)
        for ours, theirs in zip(kv.components, whole.components, strict=True):
            held, all_of_it = (
                c.read(layer_index, first, kv.num_tokens - first) for c in (ours, theirs)
            )
            torch.testing.assert_close(held, all_of_it, rtol=1e-5, atol=3e-6)
    if kv.window_from <= kv.num_tokens - windowed.rows.window:
        new = token_ids(4, 9)
        logits, expected = windowed.feed(kv, new), feed_whole(model, whole, new)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_one_goes_on_from_pages_of_another(model, windowed):
    """Who writes gets another page; what is behind the window of the other may be written over."""
    slots, tokens = windowed.slots, token_ids(5, 80)
    holding = slots.take(slots.needed_for(CAPACITY))
    leader = windowed.pool.new_kv(CAPACITY, holding.pages)
    windowed.feed_all(leader, tokens)
    num_common = 76
    first = windowed.rows.first_held(leader.window_from, num_common, STEP)
    shared = slots.share(holding, num_common, first)
    slots.extend(shared, slots.needed_for(CAPACITY) - shared.num_slots)
    follower = windowed.pool.new_kv(CAPACITY, shared.pages)
    follower.num_tokens = num_common
    follower.begin_at(first)
    texts = {
        leader: (holding, [*tokens, *token_ids(6, 40)]),
        follower: (shared, [*tokens[:num_common], *token_ids(7, 44)]),
    }
    num_moved = 0
    while follower.num_tokens < 116:
        for kv, (mine, text) in texts.items():
            end = min(len(text), kv.num_tokens + 6)
            if slots.own_window(mine, kv.num_tokens, end):
                num_moved += 1
                kv.grow(mine.pages)
            windowed.feed(kv, text[kv.num_tokens : end])
            slots.check([holding, shared])
    assert num_moved > 1
    for kv, (_, text) in texts.items():
        more = [11, 12]
        whole = feed_whole(model, model.new_kv(CAPACITY + 2), [*text[: kv.num_tokens], *more])
        if kv.num_tokens + 2 <= CAPACITY:
            logits = windowed.feed(kv, more)
            torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("from_pages", [True, False])
def test_a_copy_has_what_both_hold(model, windowed, from_pages):
    """To KV that holds all, and back."""
    source = windowed.new_kv() if from_pages else model.new_kv(CAPACITY)
    target = model.new_kv(CAPACITY) if from_pages else windowed.new_kv()
    windowed.feed_all(source, token_ids(5, 80))
    target.num_tokens = 80
    target.begin_at(80 - windowed.rows.window)
    for layer_index in range(len(windowed.layers)):
        copy_layer(source, target, layer_index, 80)
    whole = model.new_kv(CAPACITY)
    expected = feed_whole(model, whole, [*token_ids(5, 80), 7])
    torch.testing.assert_close(windowed.feed(target, [7]), expected, rtol=1e-4, atol=1e-4)


def test_a_page_is_copied_in_whatever_group_it_is(windowed):
    """The sequence goes on with the copies."""
    kv = windowed.new_kv()
    windowed.feed_all(kv, token_ids(8, 10))
    kept = [layer.clone() for layer in kv.keys.cut(0, 10)]
    copies = [PageCopy(at, kv.tables.pages[at], windowed.page()) for at in range(6)]
    kv.own(copies)
    assert kv.tables.pages[:6] == [copy.target for copy in copies]
    for copy in copies:
        for layer in kv.keys.slots.layers:
            layer[copy.source * PAGE_TOKENS :][:PAGE_TOKENS].zero_()
    for old, new in zip(kept, kv.keys.cut(0, 10), strict=True):
        assert torch.equal(old, new)


def test_a_replayed_step_is_the_computed_one(model, windowed):
    """A sheet has the pages of each group; what is proved of them holds."""
    loaded, calibration = model.loaded, model.calibration
    windowed.pool._page_region.zero_()
    shapes = [layer.shape for layer in windowed.layers]
    ring = WriteRing(shapes, WriteSlots(30), device=loaded.device, dtype=loaded.dtype)
    attention, memory = PagedAttention(attend_pages), StepMemory(windowed.pool, ring, 2, CAPACITY)
    graphs = choose_graphs("auto", RecordedGraphs(), loaded, calibration, attention, memory)
    assert graphs is not None
    replaying = ModelRunner(loaded, calibration, attention, graphs)
    computing = ModelRunner(loaded, calibration, attention)
    texts, logits = [token_ids(9, 70), token_ids(10, 33)], []
    for runner in (replaying, computing):
        windowed.runner = runner
        kvs, found = [windowed.new_kv(), windowed.new_kv()], []
        for kv, text in zip(kvs, texts, strict=True):
            windowed.feed_all(kv, text)
        for number in range(30):
            for kv in kvs:
                kv.keep_from(windowed.rows.first_held(kv.window_from, kv.num_tokens, 1))
            found.append(runner.step([Chunk(kv, [20 + number], want_logits=True) for kv in kvs]))
        logits.append(torch.cat(found))
    assert replaying.num_replayed >= 30
    assert torch.equal(*logits)


def test_groups_are_as_large_as_few_empty_places_allow():
    """A layer in eight may be missing."""
    sizes = {(5, 29): 5, (8, 40): 8, (12, 12): 12, (10, 52): 6, (5, 6): 3, (20, 5): 5, (1, 5): 1}
    assert {counts: group_size(*counts) for counts in sizes} == sizes


@pytest.mark.parametrize(
    "other", [LayerShape((1, 8), (2, 4)), LayerShape((2, 4), (2, 4), index=(1, 4))]
)
def test_layers_of_several_shapes_have_no_groups(windowed, other):
    """Their tokens could not lie in the same tensors."""
    shapes = [layer.shape for layer in windowed.layers]
    assert LayerGroups.of(windowed.windows, [*shapes[:-1], other], PAGE_TOKENS) is None


def test_what_is_given_back_is_not_read(windowed):
    """A bug ends here, not in an answer."""
    kv = windowed.new_kv()
    kv.begin_at(30)
    with pytest.raises(AssertionError, match="token 29"):
        kv.keys.read(min(windowed.windows.layers), 29, 4)
