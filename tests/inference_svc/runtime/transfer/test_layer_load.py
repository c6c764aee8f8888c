"""Store and load: the same rows come back, at their old positions or at new ones."""

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.kv.layer_gate import LayerGate, StepClock
from inference_svc.runtime.kv.slot_runs import ScatteredTokens, SlotRun
from inference_svc.runtime.transfer.layer_load import LayerLoader, copy_layer
from inference_svc.runtime.transfer.layer_store import store_blocks
from inference_svc.runtime.transfer.spans import check_spans
from inference_svc.runtime.transfer.token_runs import balanced
from tests.sampled import sampled, sampled_cases

CPU = torch.device("cpu")

ARCHITECTURES = (
    "llama",
    "llama3",
    "llama-yarn",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt-neox",
    "phi",
    "phi3",
    "glm",
    "cohere2",
    "smollm3",
    "mixtral",
    "gpt-oss",
    "hunyuan",
    "nanochat",
    "llama4",
    "deepseek-v3",
    "deepseek-v32",
)
ABSOLUTE_TABLES = ("gptj", "falcon")  # their stock models cannot run at positions before 0
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HISTORY = 40
SOON = 60.0  # seconds that only a broken test takes


def tokens(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


def prefill(model, token_ids, capacity=128):
    """Compute a history; return its KV and its write buffer."""
    kv, buffer = model.new_kv(capacity), model.new_buffer(capacity)
    model.runner.step([Chunk(kv, token_ids, want_logits=False, write_buffer=buffer)])
    return kv, buffer


def load(kv, arena_kv, spans, calibration, tail=None):
    """Load all layers and move the counters, as an engine does."""
    end = check_spans(kv, spans, calibration.layout)
    for layer_index in range(len(calibration.layers)):
        LayerLoader(kv, arena_kv, spans, calibration, tail).load(layer_index)
    kv.num_tokens = end
    if tail is not None:
        tail.end_token = end


def blocks_of(rows, slot_ids, num_tokens, block_tokens):
    """Cut a history into blocks of `block_tokens`, the last one shorter."""
    return [
        rows(slot_id, first, min(block_tokens, num_tokens - first))
        for slot_id, first in zip(slot_ids, range(0, num_tokens, block_tokens), strict=True)
    ]


def greedy(model, kv, token_ids, num_tokens):
    """Feed token_ids, then decode; return the tokens and their logits."""
    answer, logits = [], []
    fed = token_ids
    for _ in range(num_tokens):
        row = model.runner.step([Chunk(kv, fed, want_logits=True)])[0]
        fed = [int(row.argmax())]
        answer += fed
        logits.append(row)
    return answer, torch.stack(logits)


@pytest.mark.parametrize("name", sampled([*ARCHITECTURES, *ABSOLUTE_TABLES], 10, seed=1))
def test_a_reloaded_sequence_continues_unchanged(tiny, make_arena, rows, name):
    """After store and load, new tokens have the stock model's logits and greedy answer."""
    model = tiny(name)
    history, new = tokens(11, HISTORY), tokens(12, 7)
    _, arena_kv = make_arena(model.calibration.layout)
    blocks = blocks_of(rows, [2, 0, 1], HISTORY, 16)
    store_blocks(prefill(model, history)[1], arena_kv, blocks, model.calibration)

    kv = model.new_kv(96)
    load(kv, arena_kv, blocks, model.calibration)
    answer, logits = greedy(model, kv, new, 8)

    expected = model.stock_logits([*history, *new, *answer[:-1]])[-8:]
    torch.testing.assert_close(logits, expected, **CLOSE)
    assert answer == expected.argmax(dim=-1).tolist()


OF_EACH_KIND = [
    "llama",
    "llama-yarn",
    "gpt-neox",
    "cohere",
    "glm",
    "smollm3",
    "gemma3",
    "hunyuan",
    "deepseek-v3",
    "deepseek-v32",
    "gptj",
]


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled_cases(OF_EACH_KIND, [torch.float32, torch.bfloat16], count=11, seed=1),
)
def test_loaded_rows_have_the_models_bits(tiny, make_arena, rows, name, dtype):
    """Keys re-embedded by a load, and values, are bit by bit those of the forward."""
    model = tiny(name, dtype)
    history = tokens(22, 90)
    _, arena_kv = make_arena(model.calibration.layout, 8)
    blocks = blocks_of(rows, [5, 6, 7, 0, 4, 2], 90, 16)
    computed, buffer = prefill(model, history)
    store_blocks(buffer, arena_kv, blocks, model.calibration)
    kv = model.new_kv(100)
    load(kv, arena_kv, blocks, model.calibration)
    for layer_index in range(len(model.calibration.layers)):
        for loaded, made in ((kv.keys, computed.keys), (kv.values, computed.values)):
            assert torch.equal(loaded[layer_index][:, :, :90], made[layer_index][:, :, :90])


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "cohere"])
def test_bits_do_not_depend_on_the_spans(tiny, make_arena, rows, name, monkeypatch):
    """Spans of any sizes, from anywhere in slots in any order, load the same bits as full blocks.

    Pieces are small here, so that spans end within, at and across them.
    """
    model = tiny(name)
    calibration = model.calibration
    block_tokens, end = 32, 120
    history = tokens(23, end)
    _, arena_kv = make_arena(calibration.layout, 16)
    computed, buffer = prefill(model, history)
    store_blocks(buffer, arena_kv, blocks_of(rows, [3, 9, 8, 1], end, block_tokens), calibration)
    slots = {0: 3, 32: 9, 64: 8, 96: 1}
    cuts = {
        "full": [0, 32, 64, 96, 120],
        "ones": list(range(121)),
        "odd": [0, 1, 3, 32, 40, 41, 64, 90, 95, 96, 97, 120],
    }
    for piece_items in (1, 16 * 7, 16 * 33, 1 << 20):
        monkeypatch.setattr("inference_svc.runtime.transfer.layer_load.PIECE_ITEMS", piece_items)
        for bounds in cuts.values():
            spans = [rows(slots[a // 32 * 32], a, b - a, start=a % 32) for a, b in pairwise(bounds)]
            kv = model.new_kv(end)
            for tensor in (*kv.keys.layers, *kv.values.layers):
                tensor.fill_(-1)
            load(kv, arena_kv, spans, calibration)
            for layer_index in range(len(calibration.layers)):
                for loaded, made in ((kv.keys, computed.keys), (kv.values, computed.values)):
                    assert torch.equal(loaded[layer_index], made[layer_index][:, :, :end])
            model.pool.release(kv)


@pytest.mark.parametrize("max_tokens", [1, 16, 50, 64, 100, 1000])
@pytest.mark.parametrize(
    "runs",
    [
        [SlotRun(range(10), 0, 16)],
        [SlotRun(range(9), 0, 16), SlotRun([9], 0, 3)],
        [ScatteredTokens(torch.arange(99), torch.arange(99)), SlotRun([4, 2], 5, 11)],
        [SlotRun([1], 0, 1)],
        [SlotRun([number], 0, 1) for number in range(100)],
    ],
)
def test_pieces_are_few_and_of_about_one_size(runs, max_tokens):
    """A piece ends with a slot: it may have almost one slot more than intended."""
    num_tokens, slot = sum(run.num_tokens for run in runs), max(run.tokens_per_slot for run in runs)
    groups = list(balanced(runs, num_tokens, max_tokens))
    sizes = [sum(part.num_tokens for part in group) for group in groups]
    assert sum(sizes) == num_tokens
    assert max(sizes) <= max_tokens + slot - 1
    assert len(groups) <= -(-num_tokens // max_tokens)
    assert all(size + slot > sizes[0] for size in sizes[:-1])


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "cohere", "smollm3"])
def test_discarded_tokens_leave_no_gap(tiny, make_arena, rows, name):
    """Later tokens move to earlier positions, each key embedded anew."""
    model = tiny(name)
    calibration = model.calibration
    _, arena_kv = make_arena(calibration.layout)
    _, buffer = prefill(model, tokens(24, 48))
    store_blocks(buffer, arena_kv, blocks_of(rows, [2, 1], 48, 32), calibration)
    kept = [*range(3, 9), *range(20, 32), *range(32, 33), *range(40, 48)]
    spans = [rows(2, 0, 6, 3), rows(2, 6, 12, 20), rows(1, 18, 1, 0), rows(1, 19, 8, 8)]
    kv = model.new_kv(len(kept))
    load(kv, arena_kv, spans, calibration)
    for layer_index, recipe in enumerate(calibration.layers):
        keys, values = buffer.keys[layer_index][kept], buffer.values[layer_index][kept]
        turned = recipe.key.embed(keys, 0)
        assert torch.equal(kv.keys[layer_index][0].transpose(0, 1), turned)
        assert torch.equal(kv.values[layer_index][0].transpose(0, 1), values)


@pytest.mark.parametrize("name", sampled(ARCHITECTURES, 10, seed=2))
def test_load_at_other_positions_equals_stock_run_there(tiny, make_arena, rows, name):
    """Loading all but the oldest tokens from position 0 on equals a stock model there."""
    model = tiny(name)
    history, new, drop = tokens(13, HISTORY), tokens(14, 6), 17
    _, arena_kv = make_arena(model.calibration.layout)
    _, buffer = prefill(model, history)
    store_blocks(buffer, arena_kv, [rows(1, 0, HISTORY)], model.calibration)

    kv = model.new_kv(96)
    load(kv, arena_kv, [rows(1, 0, HISTORY - drop, start=drop)], model.calibration)
    logits = model.runner.step([Chunk(kv, new, want_logits=True)])[0]

    expected = stock_after_dropping(model.stock, history, drop, new)
    torch.testing.assert_close(logits, expected, **CLOSE)


@torch.no_grad()
def stock_after_dropping(stock, history, drop, new):
    """Run the history at positions from -drop on, cut the cache, and continue."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = DynamicIndexedLayer
    positions = torch.arange(-drop, len(history) - drop)
    stock(input_ids=torch.tensor([history]), position_ids=positions[None], past_key_values=cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, drop:], layer.values[:, :, drop:]
        if layer.is_indexer_initialized:
            layer.indexer_keys = layer.indexer_keys[:, drop:]
    left = len(history) - drop
    positions = torch.arange(left, left + len(new))
    answer = stock(
        input_ids=torch.tensor([new]), position_ids=positions[None], past_key_values=cache
    )
    return answer.logits[0, -1]


def test_stale_positions_would_be_detected(tiny):
    """The shifted load differs from history left at its old positions."""
    model = tiny("llama")
    history, new, drop = tokens(13, HISTORY), tokens(14, 6), 17
    kv, _ = prefill(model, history)
    logits = model.runner.step([Chunk(kv, new, want_logits=True)])[0]
    expected = stock_after_dropping(model.stock, history, drop, new)
    assert (logits - expected).abs().max() > 1e-2


def test_slots_hold_keys_before_rope_token_major(tiny, make_arena, rows):
    """A token's first-layer bytes do not depend on its place in the sequence."""
    model = tiny("llama")
    layout = model.calibration.layout
    arena, arena_kv = make_arena(layout)
    _, buffer = prefill(model, [9] * 20)
    store_blocks(buffer, arena_kv, [rows(0, 3, 2), rows(1, 11, 2)], model.calibration)
    key_bytes = layout.layers[0].components[0].token_bytes * 2
    value_offset = layout.component_offset(0, 1)
    for begin in (0, value_offset):
        first, second = (bytes(arena.slot(i)[begin : begin + key_bytes]) for i in (0, 1))
        assert first == second
    assert bytes(arena.slot(0)[key_bytes : key_bytes + 8]) == b"\xab" * 8


@pytest.mark.parametrize("name", ["smollm3", "gpt-neox"])
def test_a_partial_block_grows(tiny, make_arena, rows, name):
    """A block loaded to a write buffer's head is stored again, longer, with the same bytes."""
    model = tiny(name)
    calibration = model.calibration
    history, new = tokens(15, 30), tokens(16, 12)
    arena, arena_kv = make_arena(calibration.layout, 4)
    blocks = [rows(0, 0, 16), rows(3, 16, 14)]
    store_blocks(prefill(model, history)[1], arena_kv, blocks, calibration)

    kv, tail = model.new_kv(64), model.new_buffer(48, first_token=16)
    load(kv, arena_kv, blocks[:1], calibration)
    load(kv, arena_kv, blocks[1:], calibration, tail)
    assert (kv.num_tokens, tail.end_token) == (30, 30)
    chunk = Chunk(kv, new[:-1], want_logits=False, write_buffer=tail)
    model.runner.step([chunk])
    longer = rows(2, 16, 25)
    store_blocks(tail, arena_kv, [longer], calibration)
    for layer_index, component_index in ((0, 0), (1, 1)):
        stored = arena_kv.view(layer_index, component_index)
        assert torch.equal(stored[2, :14], stored[3, :14])

    again = model.new_kv(64)
    load(again, arena_kv, [blocks[0], longer], calibration)
    logits = model.runner.step([Chunk(again, new[-1:], want_logits=True)])[0]
    torch.testing.assert_close(logits, model.stock_logits([*history, *new])[-1], **CLOSE)
    assert bytes(arena.slot(1)[:8]) == b"\xab" * 8


def test_the_tail_begins_within_the_last_span(tiny, make_arena, rows):
    """Rows from the tail's first token on are kept raw; an empty tail keeps none."""
    model = tiny("llama")
    calibration = model.calibration
    _, arena_kv = make_arena(calibration.layout)
    history_kv, buffer = prefill(model, tokens(25, 40))
    blocks = [rows(0, 0, 32), rows(1, 32, 8)]
    store_blocks(buffer, arena_kv, blocks, calibration)
    spans = [rows(0, 0, 30, start=2), rows(1, 30, 6, start=2)]
    for first, count, capacity in ((30, 6, 10), (30, 6, 6), (33, 3, 10), (36, 0, 10)):
        kv, tail = model.new_kv(64), model.new_buffer(capacity, first_token=first)
        for tensor in (*tail.keys.layers, *tail.values.layers):
            tensor.fill_(5)
        load(kv, arena_kv, spans, calibration, tail)
        for layer_index in range(len(calibration.layers)):
            for kept, made in ((tail.keys, buffer.keys), (tail.values, buffer.values)):
                expected = made[layer_index][40 - count : 40]
                assert torch.equal(kept[layer_index][:count], expected)
                assert (kept[layer_index][count:] == 5).all()
    for first, capacity in ((29, 12), (37, 12), (30, 5)):
        tail = model.new_buffer(capacity, first_token=first)
        with pytest.raises(AssertionError, match="a tail"):
            LayerLoader(history_kv, arena_kv, spans, calibration, tail)


@pytest.mark.parametrize(
    "bad",
    [(0, 1, 8, 0), (0, 0, 0, 0), (0, 0, 8, -1), (0, 0, 100_000, 0), (0, 0, 65, 0)],
    ids=["gap", "empty", "before the slot", "beyond the slot", "beyond the sequence's KV"],
)
def test_invalid_spans_are_refused(tiny, rows, bad):
    """Those with a gap, or outside slot or sequence KV."""
    model = tiny("llama")
    kv = model.new_kv(64)
    with pytest.raises(ValueError, match="cannot be loaded"):
        check_spans(kv, [rows(*bad)], model.calibration.layout)


def test_a_span_ends_at_the_latest_with_its_slot(tiny, rows):
    """Wherever it begins."""
    model = tiny("llama")
    layout = model.calibration.layout
    kv = model.new_kv(64)
    assert check_spans(kv, [rows(0, 0, 8, layout.block_tokens - 8)], layout) == 8
    with pytest.raises(ValueError, match="cannot be loaded"):
        check_spans(kv, [rows(0, 0, 8, layout.block_tokens - 7)], layout)


@pytest.mark.parametrize(("piece_items", "num_pieces"), [(1, 10), (5 * 16 + 3, 2), (1 << 20, 1)])
def test_a_piece_has_as_many_elements_as_fit_a_cache(
    tiny, make_arena, rows, monkeypatch, piece_items, num_pieces
):
    """At least one token; these ten are scattered."""
    model = tiny("llama")
    assert model.calibration.layers[0].shape.key == (2, 8)
    monkeypatch.setattr("inference_svc.runtime.transfer.layer_load.PIECE_ITEMS", piece_items)
    _, arena_kv = make_arena(model.calibration.layout)
    spans = [rows(0, number, 1, 2 * number) for number in range(10)]
    loader = LayerLoader(model.new_kv(10), arena_kv, spans, model.calibration)
    loader.load(0)
    (source,) = loader._sources
    (pieces,) = source.pieces.values()
    size = 10 // num_pieces
    found = [(piece.first, piece.num_tokens) for piece in pieces]
    assert found == [(first, size) for first in range(0, 10, size)]


def test_spans_continue_a_sequence_kv(tiny, rows):
    """Spans begin at the end of the sequence's KV, and the check returns their end."""
    model = tiny("llama")
    kv = model.new_kv(64)
    assert check_spans(kv, [], model.calibration.layout) == 0
    kv.num_tokens = 10
    spans = [rows(0, 10, 20), rows(1, 30, 34)]
    assert check_spans(kv, spans, model.calibration.layout) == 64
    with pytest.raises(ValueError, match="cannot be loaded"):
        check_spans(kv, [rows(0, 0, 20)], model.calibration.layout)


@pytest.mark.parametrize("block", [(0, 9, 8), (0, 36, 5), (0, 10, 0), (0, 10, 100_000)])
def test_store_refuses_missing_rows(tiny, make_arena, rows, block):
    """A block outside the buffer's tokens, empty or too long, writes nothing at all."""
    model = tiny("llama")
    arena, arena_kv = make_arena(model.calibration.layout)
    kv, buffer = model.new_kv(64), model.new_buffer(54, first_token=10)
    model.runner.step([Chunk(kv, tokens(1, 10), want_logits=False)])
    chunk = Chunk(kv, tokens(2, 30), want_logits=False, write_buffer=buffer)
    model.runner.step([chunk])
    with pytest.raises(ValueError, match="cannot be stored"):
        store_blocks(buffer, arena_kv, [rows(1, 10, 30), rows(*block)], model.calibration)
    assert bytes(arena.memory) == b"\xab" * len(arena.memory)


def test_blocks_in_any_order_of_any_size(tiny, make_arena, rows):
    """Blocks need not be in the order of tokens, nor cover all, nor be of one size."""
    model = tiny("qwen3")
    _, arena_kv = make_arena(model.calibration.layout, 8)
    _, buffer = prefill(model, tokens(26, 100))
    blocks = [
        rows(7, 64, 16),
        rows(2, 80, 20),
        rows(0, 0, 16),
        rows(1, 16, 16),
        rows(5, 48, 16),
        rows(6, 32, 3),
    ]
    store_blocks(buffer, arena_kv, blocks, model.calibration)
    for layer_index in range(len(model.calibration.layers)):
        for component_index, made in enumerate((buffer.keys, buffer.values)):
            stored = arena_kv.view(layer_index, component_index)
            for block in blocks:
                expected = made[layer_index].narrow(0, block.token_offset, block.num_tokens)
                assert torch.equal(stored[block.slot_id, : block.num_tokens], expected)


def test_a_save_follows_a_forward(tiny, make_arena, rows):
    """A save that starts before its forward reads each layer only after it was computed."""
    model = tiny("qwen3")
    calibration = model.calibration
    history, new = tokens(27, HISTORY), tokens(28, 5)
    _, arena_kv = make_arena(calibration.layout)
    kv, buffer = model.new_kv(96), model.new_buffer(HISTORY)
    clock, waited = StepClock(len(calibration.layers), CPU), []

    def wait_layer(layer_index):
        waited.append(layer_index)
        clock.wait(layer_index, SOON)
        return layer_index + 1

    with ThreadPoolExecutor(1) as threads:
        block = rows(2, 0, HISTORY)
        saving = threads.submit(store_blocks, buffer, arena_kv, [block], calibration, wait_layer)
        chunk = Chunk(kv, history, want_logits=False, write_buffer=buffer)
        model.runner.step([chunk], clock)
        saving.result(SOON)
    assert waited == list(range(len(calibration.layers)))
    again = model.new_kv(96)
    load(again, arena_kv, [block], calibration)
    logits = model.runner.step([Chunk(again, new, want_logits=True)])[0]
    torch.testing.assert_close(logits, model.stock_logits([*history, *new])[-1], **CLOSE)


def test_a_save_of_a_failed_forward_fails_too(tiny, make_arena, rows):
    """It raises the clock's error, so that its lease is not completed."""
    model = tiny("llama")
    _, arena_kv = make_arena(model.calibration.layout)
    buffer, clock = model.new_buffer(16), StepClock(len(model.calibration.layers), CPU)
    clock.on_enqueued(1)
    clock.fail(OSError("the step failed"))
    with pytest.raises(OSError, match="the step failed"):
        store_blocks(buffer, arena_kv, [rows(0, 0, 16)], model.calibration, clock.wait)


def test_a_forward_passes_layers_as_they_are_loaded(tiny, make_arena, rows):
    """A step over KV that is still being loaded equals one after the whole load."""
    model = tiny("gemma3")
    calibration = model.calibration
    history, new = tokens(18, HISTORY), tokens(19, 5)
    _, arena_kv = make_arena(calibration.layout)
    _, buffer = prefill(model, history)
    blocks = blocks_of(rows, [1, 2, 0], HISTORY, 16)
    store_blocks(buffer, arena_kv, blocks, calibration)

    kv = model.new_kv(96)
    kv.gate = LayerGate(len(calibration.layers))
    loader = LayerLoader(kv, arena_kv, blocks, calibration)
    kv.num_tokens = check_spans(kv, blocks, calibration.layout)
    with ThreadPoolExecutor(1) as threads:
        stepping = threads.submit(model.runner.step, [Chunk(kv, new, want_logits=True)])
        for layer_index in range(len(calibration.layers)):
            loader.load(layer_index)
            kv.gate.open(layer_index + 1)
        logits = stepping.result(SOON)[0]
    torch.testing.assert_close(logits, model.stock_logits([*history, *new])[-1], **CLOSE)


def test_simultaneous_loads_are_independent(tiny, make_arena, rows):
    """Loaders in several threads, one of them used in two, each have their own scratch."""
    model = tiny("llama", torch.bfloat16)
    calibration = model.calibration
    _, arena_kv = make_arena(calibration.layout, 8)
    _, buffer = prefill(model, tokens(29, 100))
    blocks = blocks_of(rows, range(7), 100, 16)
    store_blocks(buffer, arena_kv, blocks, calibration)

    def num_wrong(drop, loader, kv):
        """Load everything many times; count layers with keys of another load."""
        wrong = 0
        for _ in range(100):
            for layer_index, recipe in enumerate(calibration.layers):
                loader.load(layer_index)
                keys = buffer.keys[layer_index][16 * drop : 100]
                found = kv.keys[layer_index][0, :, : len(keys)].transpose(0, 1)
                wrong += not torch.equal(found, recipe.key.rotary.rotate(keys, 0))
        return wrong

    def prepare(drop):
        spans = [rows(b.slot_id, b.token_offset - 16 * drop, b.num_tokens) for b in blocks[drop:]]
        kv = model.new_kv(100)
        return drop, LayerLoader(kv, arena_kv, spans, calibration), kv

    loads = [prepare(drop) for drop in range(3)]
    assert [num_wrong(*load) for load in loads] == [0, 0, 0]  # in this thread, before the others
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            others = [threads.submit(num_wrong, *load) for load in loads[:2]]
            assert num_wrong(*loads[2]) == 0
            assert [other.result(SOON) for other in others] == [0, 0]
    finally:
        sys.setswitchinterval(before)


def test_a_sequence_kv_moves_to_a_larger_one(tiny):
    """A sequence continues in the new sequence KV as in the old one."""
    model = tiny("gemma2")
    history, new = tokens(30, 20), tokens(31, 9)
    small, _ = prefill(model, history, capacity=22)
    large = model.new_kv(64)
    for layer_index in range(len(model.calibration.layers)):
        copy_layer(small, large, layer_index, 20)
    large.num_tokens = 20
    logits = model.runner.step([Chunk(large, new, want_logits=True)])[0]
    torch.testing.assert_close(logits, model.stock_logits([*history, *new])[-1], **CLOSE)


def test_reset_forgets_an_untrusted_load(tiny, make_arena, rows):
    """The whole sequence is recomputed, whatever was loaded."""
    model = tiny("llama")
    kv = model.new_kv(64)
    _, arena_kv = make_arena(model.calibration.layout)
    load(kv, arena_kv, [rows(0, 0, 20)], model.calibration)
    kv.reset()
    token_ids = tokens(17, 24)
    logits = model.runner.step([Chunk(kv, token_ids, want_logits=True)])[0]
    torch.testing.assert_close(logits, model.stock_logits(token_ids)[-1], **CLOSE)
