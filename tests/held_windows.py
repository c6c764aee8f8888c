"""Sequences that hold windows only, side by side or on pages, and the expected answers.

Their memory is NaN before it is written: reading a row that is not held shows in the answers.
"""

import random
from dataclasses import replace

import torch

from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_groups import HeldWindows, LayerGroups
from inference_svc.runtime.kv.page_pool import PagePool

# Softcap; two rotations; pairs; sinks; a window in all layers; …
NAMES = ("gemma2", "gemma3", "cohere2", "gpt-oss", "mistral")
# … full layers of longer rows, whose KV others share, or of shorter ones; unequal widths; chunks.
NAMES += ("gemma4", "gemma4-wide", "mimo", "llama4-ragged")
CAPACITY, STEP, PAGE_TOKENS, NUM_PAGES = 120, 16, 4, 400


def token_ids(seed, length):
    """Draw tokens of the tiny models."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


class HoldsAll:
    """Sequences of a model that hold all of their tokens."""

    def __init__(self, model):
        self.model, self.runner = model, model.runner

    def new_kv(self, capacity=CAPACITY):
        return self.model.new_kv(capacity)

    def feed(self, kv, tokens, scores=None):
        """Compute tokens at once, as an engine does; return the last one's logits."""
        chunk = Chunk(kv, tokens, want_logits=True, scores=scores)
        return self.runner.step([chunk])[0]

    def feed_all(self, kv, tokens):
        for first in range(kv.num_tokens, len(tokens), STEP):
            logits = self.feed(kv, tokens[first : first + STEP])
        return logits


class SideBySide(HoldsAll):
    """Sequences that hold windows, in rows; every block is longer than these sequences."""

    def __init__(self, model, spare_tokens=4, num_slots=1000):
        super().__init__(model)
        self.shapes = [layer.shape for layer in model.calibration.layers]
        held = HeldWindows.of(
            model.calibration.layout, self.shapes, step_tokens=STEP, scored_tokens=STEP
        )
        self.rows = replace(held.rows, spare_tokens=spare_tokens, step_tokens=STEP)
        self.windows = held._replace(rows=self.rows)
        self.pool = self._new_pool(num_slots)

    def _new_pool(self, num_slots):
        options = {"device": self.model.loaded.device, "dtype": self.model.loaded.dtype}
        pool = KVPool(self.shapes, num_slots, windows=self.windows, **options)
        pool._region.fill_(float("nan"))
        return pool

    def new_kv(self, capacity=CAPACITY):
        return self.pool.new_kv(capacity)

    def feed(self, kv, tokens, scores=None):
        kv.keep_from(self.rows.first_held(kv.window_from, kv.num_tokens, len(tokens)))
        return super().feed(kv, tokens, scores)


class OnPages(SideBySide):
    """The same on scattered pages."""

    def _new_pool(self, _num_slots):
        self.groups = LayerGroups.of(self.windows, self.shapes, PAGE_TOKENS)
        self.slots = PagedSlots(NUM_PAGES, PAGE_TOKENS, self.groups.pages)
        options = {"device": self.model.loaded.device, "dtype": self.model.loaded.dtype}
        pool = PagePool(self.shapes, self.slots, 40, groups=self.groups, **options)
        pool._page_region.fill_(float("nan"))
        self._pages = random.Random(5).sample(range(NUM_PAGES), NUM_PAGES)  # noqa: S311  # test data
        return pool

    def page(self):
        return self._pages.pop()

    def new_kv(self, capacity=CAPACITY):
        count = self.slots.needed_for(capacity) // PAGE_TOKENS
        return self.pool.new_kv(capacity, [self.page() for _ in range(count)])


KINDS = {"all": HoldsAll, "side by side": SideBySide, "on pages": OnPages}


def check_answers(holding, seed, tolerance, sizes=(1, 1, 1, 1, 5, STEP)):
    """Feed chunks and single tokens beside another sequence; compare with KV that holds all."""
    model, die = holding.model, random.Random(seed)  # noqa: S311  # test data
    kv, whole, other = holding.new_kv(), model.new_kv(CAPACITY), holding.new_kv()
    tokens = token_ids(seed, CAPACITY)
    while kv.num_tokens < CAPACITY:
        new = tokens[kv.num_tokens :][: die.choice(sizes)]
        logits, expected = holding.feed(kv, new), HoldsAll(model).feed(whole, new)
        torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
        if other.num_tokens < 60:
            holding.feed(other, new)
    assert CAPACITY - kv.window_from <= holding.rows.num_rows < CAPACITY
    expected = model.stock_logits(tokens)[-1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
