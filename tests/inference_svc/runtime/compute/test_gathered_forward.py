"""Steps over latents: which are expanded, and that results are the model's."""

import pytest
import torch

from inference_svc.runtime.compute.attention_scores import ScoreKeeper
from inference_svc.runtime.compute.chunk import Chunk
from tests.inference_svc.runtime.compute.test_modes import CLOSE, tokens

MODELS = ["deepseek-v3", "deepseek-v32"]


@pytest.fixture
def expanded(tiny):
    """Return a function that runs a step; it returns tokens expanded by each layer, and logits."""

    def run(name, chunks):
        model, sizes = tiny(name), []
        handles = [
            layer.self_attn.kv_b_proj.register_forward_pre_hook(
                lambda _module, args: sizes.append(args[0].shape[2])
            )
            for layer in model.loaded.model.model.layers
        ]
        try:
            return sizes, model.runner.step(chunks)
        finally:
            for handle in handles:
                handle.remove()

    return run


@pytest.mark.parametrize("name", MODELS)
def test_only_new_prompts_are_expanded(tiny, expanded, name):
    """Answers and drafts are not; without a prompt one unused token is."""
    model = tiny(name)
    texts = [tokens(1, 30), tokens(2, 20), tokens(3, 9)]
    kvs = [model.new_kv(40) for _ in texts]
    for kv, text, size in zip(kvs[:2], texts, (29, 16), strict=False):
        sizes, _ = expanded(name, [Chunk(kv, text[:size], want_logits=False)])
        assert sizes[0] == size
    chunks = [
        Chunk(kvs[0], texts[0][29:], want_logits=True),
        Chunk(kvs[2], texts[2], want_logits=True),
        Chunk(kvs[1], texts[1][16:], want_logits=True, want_all=True),
    ]
    sizes, logits = expanded(name, chunks)
    assert sizes[0] == 9
    expected = [model.stock_logits(text) for text in texts]
    expected = torch.cat((expected[0][-1:], expected[2][-1:], expected[1][-4:]))
    torch.testing.assert_close(logits, expected, **CLOSE)
    sizes, logits = expanded(name, [Chunk(kvs[2], [7], want_logits=True)])
    assert sizes == [1, 1]
    torch.testing.assert_close(logits[0], model.stock_logits([*texts[2], 7])[-1], **CLOSE)


def test_sequences_longer_than_the_choice_are_expanded_at_most_once(tiny, expanded):
    """The first layer shows how many tokens are chosen (4); its expansion is not used."""
    model = tiny("deepseek-v32")
    texts = [tokens(4, 12), tokens(5, 4)]
    chunks = [Chunk(model.new_kv(16), text, want_logits=True, want_all=True) for text in texts]
    sizes, logits = expanded("deepseek-v32", chunks)
    assert sizes == [16, 4]
    expected = torch.cat([model.stock_logits(text) for text in texts])
    torch.testing.assert_close(logits, expected, **CLOSE)


def test_scores_do_not_depend_on_the_steps_path(tiny, expanded):
    """Some of a window's queries were computed over latents, and some over keys."""
    model, text = tiny("deepseek-v3"), tokens(6, 20)
    keeper, kv = ScoreKeeper("window", 16, 20), model.new_kv(20)
    ways = []
    for end in (10, 15, 20):
        chunk = Chunk(kv, text[kv.num_tokens : end], want_logits=False, scores=keeper)
        ways.append(expanded("deepseek-v3", [chunk])[0][0])
        keeper.commit()
    assert ways == [10, 1, 1]
    with torch.no_grad():
        weights = model.stock(
            input_ids=torch.tensor([text]), use_cache=False, output_attentions=True
        ).attentions
    expected = sum(layer[0, :, -16:].sum(dim=(0, 1)) for layer in weights)
    torch.testing.assert_close(torch.tensor(keeper.scores()), expected, rtol=1e-4, atol=1e-4)
