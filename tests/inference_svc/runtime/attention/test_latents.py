"""Attention over latents equals attention over the keys and values expanded from them."""

import pytest
import torch

from inference_svc.runtime.attention import latents
from inference_svc.runtime.attention.latents import Expansion, attend_absorbed, attend_chosen
from inference_svc.runtime.attention.softmax_attention import AttentionOptions, attend

HEADS, FREE, ROTATED, LATENT, VALUE, LENGTH = 4, 6, 5, 9, 7, 20
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Case:
    """An expansion, latents, and the keys and values that result."""

    def __init__(self, num_tokens, *, is_rotated_first=False):
        generator = torch.Generator().manual_seed(num_tokens)

        def drawn(*sizes):
            return torch.randn(*sizes, generator=generator)

        self.expansion = Expansion(
            drawn(HEADS, FREE, LATENT), drawn(HEADS, LATENT, VALUE), ROTATED, is_rotated_first
        )
        self.query = drawn(1, HEADS, num_tokens, FREE + ROTATED)
        latent, rotated = drawn(LENGTH, LATENT), drawn(LENGTH, ROTATED)
        self.latents = torch.cat((latent, rotated), dim=1)[None, None]
        free = torch.einsum("hfl,tl->htf", self.expansion.keys, latent)
        copied = rotated.expand(HEADS, -1, -1)
        parts = (copied, free) if is_rotated_first else (free, copied)
        self.keys = torch.cat(parts, dim=2)[None]
        self.values = torch.einsum("hlv,tl->htv", self.expansion.values, latent)[None]

    def expected(self, options):
        """Attend to each head's keys and values; of unequal width, so by masks or scores."""
        width = FREE + ROTATED
        values = torch.nn.functional.pad(self.values, (0, width - VALUE))
        return attend(self.query, self.keys, values, options, {})[..., :VALUE]

    def over_latents(self, options):
        """Attend to latents, and expand the result to values."""
        absorbed = self.expansion.absorb(self.query)
        return self.expansion.values_of(attend_absorbed(absorbed, self.latents, options, {}))


@pytest.mark.parametrize("is_rotated_first", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 6])
@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(0.3),
        AttentionOptions(0.3, window=8),
        AttentionOptions(0.3, softcap=2.0),
        AttentionOptions(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    ],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_values_are_expanded_last(num_tokens, options, is_rotated_first):
    """For any call, and wherever a key has its rotated part."""
    case = Case(num_tokens, is_rotated_first=is_rotated_first)
    torch.testing.assert_close(case.over_latents(options), case.expected(options), **CLOSE)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("most_elements", [2**24, 1])
def test_only_chosen_tokens_are_attended_to(monkeypatch, most_elements, sinks):
    """In any tiles; other sequences' and later tokens are hidden even if they are named."""
    monkeypatch.setattr(latents, "MAX_CHOSEN", most_elements)
    num_tokens, num_chosen = 17, 5
    case = Case(num_tokens)
    positions = range(LENGTH - num_tokens, LENGTH)
    generator = torch.Generator().manual_seed(1)
    chosen, visible = [], torch.zeros(num_tokens, LENGTH, dtype=torch.bool)
    for row, position in enumerate(positions):
        seen = torch.randperm(position + 1, generator=generator)[:num_chosen].tolist()
        visible[row, seen] = True
        unseen = [-3, LENGTH + 4, position + 1, LENGTH - 1 if position < LENGTH - 1 else -1]
        chosen.append((seen + unseen)[:num_chosen])
    absorbed = case.expansion.absorb(case.query)
    options = AttentionOptions(0.3, sinks=sinks)
    found = attend_chosen(absorbed, case.latents, torch.tensor(chosen), options)
    scores = (case.query @ case.keys.transpose(2, 3) * 0.3).masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(-1, -1, num_tokens, 1)), dim=-1)
    expected = scores.softmax(-1)[..., :LENGTH] @ case.values
    torch.testing.assert_close(case.expansion.values_of(found), expected, **CLOSE)


def test_few_tokens_behind_many_attend_over_latents():
    """At DeepSeek-V3's widths: an answer and a draft do, a new prompt does not."""
    wide = Expansion(torch.empty(1, 128, 512), torch.empty(1, 512, 128), 64, False)
    for length in (32, 1024, 65536):
        assert wide.pays(1, length)
        assert wide.pays(8, length)
        assert not wide.pays(length, length)
