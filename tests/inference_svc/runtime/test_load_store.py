"""Store and load: what comes back is what was there, at its old positions or at new ones."""

import pytest
import torch
from transformers import DynamicCache

from inference_svc.runtime.layer_load import load_spans
from inference_svc.runtime.layer_store import store_blocks
from inference_svc.runtime.model_runner import Chunk

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
)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HISTORY = 40


def tokens(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


def prefilled(model, token_ids, capacity=128):
    slab = model.runner.new_slab(capacity, save=True)
    model.runner.step([Chunk(slab, token_ids, want_logits=False)])
    return slab


def greedy(model, slab, token_ids, num_tokens):
    """Feed token_ids, then decode; return the tokens and the logits they were chosen from."""
    answer, rows = [], []
    fed = token_ids
    for _ in range(num_tokens):
        row = model.runner.step([Chunk(slab, fed, want_logits=True)])[0]
        fed = [int(row.argmax())]
        answer += fed
        rows.append(row)
    return answer, torch.stack(rows)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_reload_continues_as_if_never_gone(tiny, make_arena, rows, name):
    """After store and load, new tokens have the stock model's logits and greedy answer."""
    model = tiny(name)
    history, new = tokens(11, HISTORY), tokens(12, 7)
    arena = make_arena(model.calibration.layout)
    store_blocks(prefilled(model, history), arena, [rows(2, 0, HISTORY)], model.calibration)

    slab = model.runner.new_slab(96, save=True)
    load_spans(slab, arena, [rows(2, 0, HISTORY)], model.calibration)
    answer, logits = greedy(model, slab, new, 8)

    expected = model.stock_logits([*history, *new, *answer[:-1]])[-8:]
    torch.testing.assert_close(logits, expected, **CLOSE)
    assert answer == expected.argmax(dim=-1).tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_load_at_other_positions_equals_stock_run_there(tiny, make_arena, rows, name):
    """Loading all but the oldest tokens from position 0 on equals a stock model there."""
    model = tiny(name)
    history, new, drop = tokens(13, HISTORY), tokens(14, 6), 17
    arena = make_arena(model.calibration.layout)
    store_blocks(prefilled(model, history), arena, [rows(1, 0, HISTORY)], model.calibration)

    slab = model.runner.new_slab(96, save=True)
    load_spans(slab, arena, [rows(1, 0, HISTORY - drop, start=drop)], model.calibration)
    logits = model.runner.step([Chunk(slab, new, want_logits=True)])[0]

    expected = stock_after_dropping(model.stock, history, drop, new)
    torch.testing.assert_close(logits, expected, **CLOSE)


@torch.no_grad()
def stock_after_dropping(stock, history, drop, new):
    """Run the history at positions from -drop on, cut the cache, and go on."""
    cache = DynamicCache()
    positions = torch.arange(-drop, len(history) - drop)
    stock(input_ids=torch.tensor([history]), position_ids=positions[None], past_key_values=cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, drop:], layer.values[:, :, drop:]
    left = len(history) - drop
    positions = torch.arange(left, left + len(new))
    answer = stock(
        input_ids=torch.tensor([new]), position_ids=positions[None], past_key_values=cache
    )
    return answer.logits[0, -1]


def test_stale_positions_would_be_noticed(tiny, make_arena, rows):
    """The shifted load can be told from history left at its old positions."""
    model = tiny("llama")
    history, new, drop = tokens(13, HISTORY), tokens(14, 6), 17
    slab = prefilled(model, history)
    logits = model.runner.step([Chunk(slab, new, want_logits=True)])[0]
    expected = stock_after_dropping(model.stock, history, drop, new)
    assert (logits - expected).abs().max() > 1e-2


def test_slots_hold_keys_before_rope_token_major(tiny, make_arena, rows):
    """A token's first-layer bytes are the same wherever in the sequence it stood."""
    model = tiny("llama")
    layout = model.calibration.layout
    arena = make_arena(layout)
    slab = prefilled(model, [9] * 20)
    store_blocks(slab, arena, [rows(0, 3, 2), rows(1, 11, 2)], model.calibration)
    key_bytes = layout.layers[0].components[0].token_bytes * 2
    value_offset = layout.component_offset(0, 1)
    for begin in (0, value_offset):
        first, second = (bytes(arena.slot(i)[begin : begin + key_bytes]) for i in (0, 1))
        assert first == second
    assert bytes(arena.slot(0)[key_bytes : key_bytes + 8]) == b"\xab" * 8


def test_several_blocks_and_calls(tiny, make_arena, rows):
    """Spans of several calls make one history; a partial block can be stored longer."""
    model = tiny("smollm3")
    history, new = tokens(15, 30), tokens(16, 12)
    arena = make_arena(model.calibration.layout, 4)
    blocks = [rows(0, 0, 16), rows(3, 16, 14)]
    store_blocks(prefilled(model, history), arena, blocks, model.calibration)

    slab = model.runner.new_slab(64, save=True)
    load_spans(slab, arena, blocks[:1], model.calibration)
    load_spans(slab, arena, blocks[1:], model.calibration)
    assert (slab.num_tokens, slab.save_from) == (30, 16)
    model.runner.step([Chunk(slab, new[:-1], want_logits=False)])
    longer = rows(2, 16, 25)
    store_blocks(slab, arena, [longer], model.calibration)

    again = model.runner.new_slab(64, save=True)
    load_spans(again, arena, [blocks[0], longer], model.calibration)
    logits = model.runner.step([Chunk(again, new[-1:], want_logits=True)])[0]
    torch.testing.assert_close(logits, model.stock_logits([*history, *new])[-1], **CLOSE)


def test_full_block_needs_no_keys_before_rope(tiny, make_arena, rows):
    """After a load that ends at a block's end, saving starts there."""
    model = tiny("llama")
    layout = model.calibration.layout
    arena = make_arena(layout)
    slab = model.runner.new_slab(layout.block_tokens + 8, save=True)
    load_spans(slab, arena, [rows(0, 0, layout.block_tokens)], model.calibration)
    assert slab.save_from == slab.num_tokens == layout.block_tokens
    with pytest.raises(ValueError, match="cannot be stored"):
        store_blocks(slab, arena, [rows(0, 0, 16)], model.calibration)


@pytest.mark.parametrize(
    "bad",
    [(0, 1, 8, 0), (0, 0, 0, 0), (0, 0, 8, -1), (0, 0, 100_000, 0), (0, 0, 65, 0)],
    ids=["gap", "empty", "before the slot", "beyond the slot", "beyond the slab"],
)
def test_spans_that_make_no_sense_change_nothing(tiny, make_arena, rows, bad):
    """Spans with a gap or outside slot or slab are refused before any row is written."""
    model = tiny("llama")
    slab = model.runner.new_slab(64, save=True)
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_spans(slab, make_arena(model.calibration.layout), [rows(*bad)], model.calibration)
    assert (slab.num_tokens, slab.save_from) == (0, 0)


def test_store_refuses_rows_that_are_not_there(tiny, make_arena, rows):
    """A block beyond the slab's tokens, or from a slab made without save, writes nothing."""
    model = tiny("llama")
    arena = make_arena(model.calibration.layout)
    unsaved = model.runner.new_slab(32, save=False)
    model.runner.step([Chunk(unsaved, tokens(1, 20), want_logits=False)])
    for slab, block in ((unsaved, rows(0, 0, 16)), (prefilled(model, [5] * 8), rows(0, 0, 9))):
        with pytest.raises(ValueError, match="cannot be stored"):
            store_blocks(slab, arena, [block], model.calibration)
    assert bytes(arena.slot(0)[:16]) == b"\xab" * 16


def test_a_layer_is_read_only_once_it_is_there(tiny, make_arena, rows):
    """Bytes that arrive layer by layer, each just in time, are those of a whole load."""
    model = tiny("qwen3")
    layout, history, new = model.calibration.layout, tokens(18, HISTORY), tokens(19, 5)
    full = make_arena(layout)
    store_blocks(prefilled(model, history), full, [rows(2, 0, HISTORY)], model.calibration)
    arriving, waited = make_arena(layout), []

    def wait_layer(layer_index):
        waited.append(layer_index)
        start = layout.slice_offsets[layer_index]
        end = start + layout.slice_bytes(layer_index)
        arriving.slot(2)[start:end] = full.slot(2)[start:end]

    slab = model.runner.new_slab(96, save=True)
    load_spans(slab, arriving, [rows(2, 0, HISTORY)], model.calibration, wait_layer)
    assert waited == list(range(len(layout.layers)))
    logits = model.runner.step([Chunk(slab, new, want_logits=True)])[0]
    torch.testing.assert_close(logits, model.stock_logits([*history, *new])[-1], **CLOSE)


def test_a_load_that_fails_half_way_leaves_the_rows_before_it(tiny, make_arena, rows):
    """The rest can be loaded again, or computed."""
    model = tiny("llama")
    history, new = tokens(20, 30), tokens(21, 4)
    arena = make_arena(model.calibration.layout, 4)
    blocks = [rows(0, 0, 16), rows(3, 16, 14)]
    store_blocks(prefilled(model, history), arena, blocks, model.calibration)

    def fail(layer_index):
        if layer_index == 1:
            raise OSError("the load failed")

    slab = model.runner.new_slab(64, save=True)
    load_spans(slab, arena, blocks[:1], model.calibration)
    with pytest.raises(OSError, match="failed"):
        load_spans(slab, arena, blocks[1:], model.calibration, fail)
    assert slab.num_tokens == 16
    load_spans(slab, arena, blocks[1:], model.calibration)
    logits = model.runner.step([Chunk(slab, new, want_logits=True)])[0]
    torch.testing.assert_close(logits, model.stock_logits([*history, *new])[-1], **CLOSE)


def test_reset_forgets_an_untrusted_load(tiny, make_arena, rows):
    """After reset the slab computes the whole sequence anew, whatever was loaded into it."""
    model = tiny("llama")
    slab = model.runner.new_slab(64, save=True)
    load_spans(slab, make_arena(model.calibration.layout), [rows(0, 0, 20)], model.calibration)
    slab.reset()
    token_ids = tokens(17, 24)
    logits = model.runner.step([Chunk(slab, token_ids, want_logits=True)])[0]
    torch.testing.assert_close(logits, model.stock_logits(token_ids)[-1], **CLOSE)
