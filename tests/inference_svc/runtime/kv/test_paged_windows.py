"""Windows on pages: layers in groups, where those with a window overwrite old rows."""

import pytest
import torch

from inference_svc.core.scheduling.held_slots import PageCopy
from inference_svc.core.scheduling.write_slots import WriteSlots
from inference_svc.runtime.attention.paged_attention import PagedAttention
from inference_svc.runtime.calibration.graph_choice import StepMemory, choose_graphs
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.cuda import page_attention
from inference_svc.runtime.kv.layer_tensors import token_items_of
from inference_svc.runtime.kv.write_ring import WriteRing
from tests.held_windows import (
    CAPACITY,
    NAMES,
    PAGE_TOKENS,
    STEP,
    HoldsAll,
    OnPages,
    check_answers,
    token_ids,
)
from tests.recorded_graph import RecordedGraphs
from tests.sampled import sampled
from tests.split_attention import attend_pages


@pytest.fixture(params=NAMES)
def model(tiny, request):
    return tiny(request.param, has_windows=True)


@pytest.fixture
def windowed(model):
    return OnPages(model)


def test_a_sequence_takes_fewer_pages_and_less_memory(windowed):
    """As many as are counted: for layers with a window only the rows that exist, and a page."""
    shapes, groups = windowed.shapes, windowed.groups
    num_bytes, kv = 4 * token_items_of(shapes), windowed.new_kv()
    held = len(kv.tables.pages) * PAGE_TOKENS * 4 * token_items_of(groups.places)
    has_window = windowed.windows.layers.__contains__
    in_windows = [shape for index, shape in enumerate(shapes) if has_window(index)]
    share = token_items_of(in_windows) / token_items_of(shapes)
    most = (windowed.rows.num_rows + 2 * PAGE_TOKENS) * share + CAPACITY * (1 - share)
    assert held < num_bytes * most * 1.3 < num_bytes * CAPACITY  # some groups lack a layer
    assert kv.capacity_tokens == CAPACITY


def kernels():
    """Return the kernels for attention; Triton's interpreter takes a minute for each."""
    tried = ("gpt-oss", "mimo")
    for name in NAMES:
        marks = () if name in tried else pytest.mark.long
        yield pytest.param(name, attend_pages, id=f"{name}-split")
        yield pytest.param(name, page_attention.attend_pages, id=f"{name}-triton", marks=marks)


@pytest.mark.parametrize(("name", "kernel"), list(kernels()))
def test_kernels_agree_with_kv_that_keeps_all(tiny, name, kernel):
    """Chunk by chunk and token by token, however often the window's pages are reused."""
    model = tiny(name, has_windows=True)
    windowed = OnPages(model)
    windowed.runner = ModelRunner(model.loaded, model.calibration, PagedAttention(kernel))
    # A step takes Triton's interpreter as long with one token as with many.
    sizes = (1, 5, STEP) if kernel is attend_pages else (1, STEP, STEP)
    check_answers(windowed, 1, 1e-4, sizes)


def test_a_sequence_continues_on_pages_of_another(model, windowed):
    """A writer gets another page; rows behind the other's window may be overwritten."""
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
            if slots.make_window_private(mine, kv.num_tokens, end):
                num_moved += 1
                kv.grow(mine.pages)
            windowed.feed(kv, text[kv.num_tokens : end])
            slots.check([holding, shared])
    assert num_moved > 1
    for kv, (_, text) in texts.items():
        more = [11, 12]
        whole = HoldsAll(model).feed(model.new_kv(CAPACITY + 2), [*text[: kv.num_tokens], *more])
        if kv.num_tokens + 2 <= CAPACITY:
            logits = windowed.feed(kv, more)
            torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


def test_a_page_is_copied_in_whatever_group_it_is(windowed):
    """The sequence continues with the copies."""
    kv = windowed.new_kv()
    windowed.feed_all(kv, token_ids(8, 10))
    kept = [layer.clone() for layer in kv.keys.cut(0, 10)]
    copies = [PageCopy(at, kv.tables.pages[at], windowed.page()) for at in range(6)]
    kv.copy_shared_pages(copies)
    assert kv.tables.pages[:6] == [copy.target for copy in copies]
    for copy in copies:
        for layer in kv.keys.slots.layers:
            layer[copy.source * PAGE_TOKENS :][:PAGE_TOKENS].zero_()
    for old, new in zip(kept, kv.keys.cut(0, 10), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize(
    "model", sampled(NAMES, 4, seed=1, always=("gpt-oss", "gemma4")), indirect=True
)
def test_a_replayed_step_equals_the_computed_one(model, windowed):
    """A sheet has the pages of each group; its proof holds."""
    loaded, calibration = model.loaded, model.calibration
    windowed.pool._page_region.zero_()
    ring = WriteRing(windowed.shapes, WriteSlots(30), device=loaded.device, dtype=loaded.dtype)
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
