"""Scores are the sums of plain attention weights, however the steps are cut."""

import pytest
import torch

from inference_svc.core.ranges import without
from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.compute import attention_scores
from inference_svc.runtime.compute.attention_scores import ScoreKeeper, add_weights, keeper_for
from inference_svc.runtime.compute.chunk import Chunk

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
# Grouped heads; windows, in some layers or all; softcap; sinks; keys made of latents (gather).
ARCHITECTURES = ("llama", "mistral", "gemma3", "gemma2", "gpt-oss", "phimoe", "deepseek-v3")
NUM_TOKENS, PROMPT_TOKENS, WINDOW_TOKENS = 60, 52, 11


def tokens(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


def plain_scores(model, token_ids, queries):
    """Sum of the eager model's attention weights of these queries, per key."""
    with torch.no_grad():
        weights = model.stock(
            input_ids=torch.tensor([token_ids]), use_cache=False, output_attentions=True
        ).attentions  # per layer [1, heads, queries, keys]
    return sum(layer[0, :, queries].sum(dim=(0, 1)) for layer in weights)


def feed(model, kv, keeper, token_ids, sizes):
    for size in sizes:
        begin = kv.num_tokens
        model.runner.step([Chunk(kv, token_ids[begin : begin + size], True, scores=keeper)])
        keeper.commit()


def keeper(needs):
    return ScoreKeeper(needs, WINDOW_TOKENS, PROMPT_TOKENS)


@pytest.mark.parametrize("sizes", [[52, *[1] * 8], [20, 1, 13, 13, 5, *[1] * 8]])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sums_equal_eager_attention(tiny, name, sizes):
    """All queries, or the prompt's last ones over several chunks: as `output_attentions` has it."""
    model = tiny(name)
    token_ids = tokens(1, NUM_TOKENS)
    everything, window = keeper("accumulated"), keeper("window")
    for each in (everything, window):
        feed(model, model.new_kv(NUM_TOKENS), each, token_ids, sizes)
    expected = plain_scores(model, token_ids, slice(None))
    torch.testing.assert_close(torch.tensor(everything.scores()), expected, **CLOSE)
    expected = plain_scores(
        model, token_ids[:PROMPT_TOKENS], slice(PROMPT_TOKENS - WINDOW_TOKENS, None)
    )
    torch.testing.assert_close(torch.tensor(window.scores()), expected, **CLOSE)


def test_a_model_may_attend_once_per_step():
    """Its next call is the next step's."""
    every = ScoreKeeper("accumulated", 0, 5)
    query, keys = torch.randn(4, 5, 8), torch.randn(2, 5, 8)
    for begin, end in ((0, 3), (3, 5)):
        every.note(0, query[:, begin:end], keys[:, :end], AttentionOptions(), begin)
        every.commit()
    expected = torch.zeros(5)
    add_weights(expected, query, keys, AttentionOptions())
    torch.testing.assert_close(torch.tensor(every.scores()), expected, **CLOSE)


def test_long_chunks_are_scored_in_tiles(tiny):
    """More queries than a tile has add up to the same sums."""
    model = tiny("llama")
    token_ids = tokens(2, 190)
    every = ScoreKeeper("accumulated", 0, 190)
    feed(model, model.new_kv(190), every, token_ids, [190])
    expected = plain_scores(model, token_ids, slice(None))
    torch.testing.assert_close(torch.tensor(every.scores()), expected, **CLOSE)


def test_sequences_of_a_batch_have_separate_scores(tiny):
    """In a ragged batch with one sequence without a keeper."""
    model = tiny("llama")
    parts = [(tokens(seed, 30 + seed), model.new_kv(40)) for seed in range(3)]
    keepers = [ScoreKeeper("accumulated", 0, 40), None, ScoreKeeper("window", 4, 32)]
    model.runner.step(
        [
            Chunk(kv, ids, want_logits=True, scores=each)
            for (ids, kv), each in zip(parts, keepers, strict=True)
        ]
    )
    keepers[0].commit()
    keepers[2].commit()
    expected = plain_scores(model, parts[0][0], slice(None))
    torch.testing.assert_close(torch.tensor(keepers[0].scores()), expected, **CLOSE)
    expected = plain_scores(model, parts[2][0], slice(28, None))
    torch.testing.assert_close(torch.tensor(keepers[2].scores()), expected, **CLOSE)


@pytest.mark.parametrize("needs", ["window", "accumulated"])
def test_a_failed_step_counts_nothing(tiny, needs):
    """Steps that are not committed leave no trace, and a query that is repeated counts once."""
    model = tiny("llama")
    token_ids = tokens(3, NUM_TOKENS)
    once, again = keeper(needs), keeper(needs)
    feed(model, model.new_kv(NUM_TOKENS), once, token_ids, [30, 22, 1])
    kv = model.new_kv(NUM_TOKENS)
    feed(model, kv, again, token_ids, [30])
    model.runner.step([Chunk(kv, token_ids[30:40], want_logits=True, scores=again)])
    kv.num_tokens = 30
    feed(model, kv, again, token_ids, [22])
    kv.num_tokens = 20  # as after a preemption, when the rest was not saved in time
    feed(model, kv, again, token_ids, [32, 1])
    assert again.scores() == pytest.approx(once.scores(), rel=1e-4)


def test_loaded_history_is_scored_by_new_queries(tiny):
    """Only queries of the new turn count."""
    model = tiny("llama")
    token_ids = tokens(4, NUM_TOKENS)
    kv = model.new_kv(NUM_TOKENS)
    model.runner.step([Chunk(kv, token_ids[:40], want_logits=True)])
    every = keeper("accumulated")
    feed(model, kv, every, token_ids, [20])
    expected = plain_scores(model, token_ids, slice(40, None))
    torch.testing.assert_close(torch.tensor(every.scores()), expected, **CLOSE)


def test_a_discard_of_unseen_tokens_changes_nothing(tiny):
    """Neither what is counted so far nor what comes."""
    model = tiny("llama")
    token_ids = tokens(4, NUM_TOKENS)
    plain, cut = keeper("accumulated"), keeper("accumulated")
    for each in (plain, cut):
        kv = model.new_kv(NUM_TOKENS)
        feed(model, kv, each, token_ids, [30])
        if each is cut:
            cut.discard([(30, 32), (40, 44)])
        feed(model, kv, each, token_ids, [22])
    assert cut.scores() == plain.scores()


def test_before_the_prompt_is_computed_there_are_no_scores(tiny):
    """A window has no queries yet."""
    model = tiny("llama")
    assert keeper("accumulated").scores() is None
    window = keeper("window")
    feed(model, model.new_kv(NUM_TOKENS), window, tokens(5, 60), [30])
    assert window.scores() is None


@pytest.mark.parametrize("needs", ["window", "accumulated"])
def test_scores_follow_a_discard(tiny, needs):
    """Dropped rows lose their scores; later queries add to moved rows."""
    model = tiny("llama")
    each, ranges = keeper(needs), ((5, 9), (20, 30))
    feed(model, model.new_kv(NUM_TOKENS), each, tokens(6, NUM_TOKENS), [52])
    before = without(each.scores(), ranges)
    each.discard(ranges)
    assert each.scores() == before
    kv = model.new_kv(NUM_TOKENS)
    model.runner.step([Chunk(kv, tokens(7, 38), want_logits=True)])
    feed(model, kv, each, tokens(7, 39), [1])
    after = each.scores()
    assert len(after) == (38 if needs == "window" else 39)
    assert sum(after) - sum(before) == pytest.approx(0 if needs == "window" else 8, rel=1e-4)


def test_policies_get_their_keeper():
    """None for a policy that uses positions only."""
    assert keeper_for("nothing", 0, 10) is None
    assert keeper_for("window", 4, 10).scores() is None


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(chunk=16),
        AttentionOptions(chunk=33, window=9),
        AttentionOptions(window=20, softcap=3.0, sinks=torch.tensor([0.0, 1, 2, 3]), scale=0.3),
    ],
)
def test_weights_equal_the_plain_formula(options):
    """Chunks, windows, softcaps, sinks and scales, alone and together, over several tiles."""
    generator = torch.Generator().manual_seed(8)
    query, keys = (torch.randn(n, t, 8, generator=generator) for n, t in ((4, 150), (2, 180)))
    sums = torch.zeros(180)
    add_weights(sums, query, keys, options)
    scores = query @ keys.repeat_interleave(2, dim=0).transpose(1, 2) * (options.scale or 8**-0.5)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    for row in range(150):
        scores[:, row, : options.first_visible(30 + row)] = float("-inf")
        scores[:, row, 30 + row + 1 :] = float("-inf")
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks.view(4, 1, 1).expand(-1, 150, 1)), dim=-1)
    expected = torch.softmax(scores, dim=-1)[..., :180].sum(dim=(0, 1))
    torch.testing.assert_close(sums, expected, **CLOSE)


def test_tiles_respect_their_size_limit(monkeypatch):
    """Down to a single token; the sums are the same."""
    generator = torch.Generator().manual_seed(8)
    query, keys = (torch.randn(n, 12, 8, generator=generator) for n in (4, 2))
    expected = torch.zeros(12)
    add_weights(expected, query, keys, AttentionOptions())
    sizes = []
    tile_weights = attention_scores._tile_weights

    def noted(query, keys, options):
        sizes.append(query.shape[1])
        return tile_weights(query, keys, options)

    monkeypatch.setattr(attention_scores, "_tile_weights", noted)
    for most, num_tokens in ((1, 1), (4 * 12 * 3, 3), (4 * 12 * 100, 12)):
        monkeypatch.setattr(attention_scores, "MAX_WEIGHTS", most)
        sizes.clear()
        sums = torch.zeros(12)
        add_weights(sums, query, keys, AttentionOptions())
        assert set(sizes) == {num_tokens}
        torch.testing.assert_close(sums, expected, **CLOSE)
