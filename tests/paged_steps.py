"""A model whose sequences lie on pages, a write ring beside them, and decode steps over both."""

import torch

from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.core.scheduling.write_slots import WriteSlots
from inference_svc.runtime.attention.paged_attention import PagedAttention
from inference_svc.runtime.calibration.graph_choice import StepMemory
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.decode_graphs import DecodeGraphs, DecodeStep
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.kv.page_pool import PagePool
from inference_svc.runtime.kv.write_ring import WriteRing
from tests.split_attention import attend_pages

NUM_PAGES, PAGE_TOKENS, WRITE_SLOTS = 120, 4, 400


class PagedSteps:
    """See the module docstring; pages are assigned in a shuffled order."""

    def __init__(
        self, loaded, calibration, kernel=attend_pages, num_pages=NUM_PAGES, write_slots=WRITE_SLOTS
    ):
        self.model = loaded, calibration
        self.attention = PagedAttention(kernel)
        options = {"device": loaded.device, "dtype": loaded.dtype}
        shapes = [layer.shape for layer in calibration.layers]
        self.pool = PagePool(shapes, PagedSlots(num_pages, PAGE_TOKENS), 40, **options)
        self.ring = WriteRing(shapes, WriteSlots(write_slots), **options)
        self.runner = ModelRunner(*self.model, self.attention)
        chance = torch.Generator().manual_seed(5)
        self._pages = torch.randperm(num_pages, generator=chance).tolist()

    def memory(self, most_rows, window_tokens=192):
        """Return the memory for which graphs are chosen."""
        return StepMemory(self.pool, self.ring, most_rows, window_tokens)

    def step(self, shapes):
        """Return decode steps of these shapes."""
        return DecodeStep(*self.model, self.attention, (self.pool, self.ring), shapes)

    def replaying(self, capture, shapes):
        """Return a runner that replays steps of these shapes, the largest first."""
        graphs = DecodeGraphs(self.step(shapes), capture, shapes, len(self.model[1].layers))
        return ModelRunner(*self.model, self.attention, graphs)

    def sequence(self, token_ids, capacity, *, is_stored=True):
        """Return a sequence with these tokens, and its write buffer."""
        kv = self.pool.new_kv(capacity, [self._pages.pop() for _ in range(-(-capacity // 4))])
        buffer = self.ring.lend(0, 0) if is_stored else None
        if buffer is not None:
            self.ring.extend(buffer, capacity)
        self.runner.step([Chunk(kv, token_ids, False, buffer)])
        return kv, buffer

    def everything(self):
        """Return views of all layers' slots: of working KV, and of the write ring."""
        kv, buffer = self.pool.spare_kv(), self.ring.spare_buffer()
        on_pages = (*kv.keys.slots.layers, *kv.values.slots.layers)
        return on_pages, (*buffer.keys.layers, *buffer.values.layers)


def decode_each(runner, sequences, token_ids, clock=None):
    """Compute one new token of each sequence; return the logits."""
    chunks = [
        Chunk(kv, [token_id], True, buffer)
        for (kv, buffer), token_id in zip(sequences, token_ids, strict=True)
    ]
    return runner.step(chunks, clock)


def kept_contents(sequences):
    """Return the contents of working KV and write buffers of sequences, layer by layer."""
    found = []
    for kv, buffer in sequences:
        for tokens in (kv.keys, kv.values):
            found += [layer.clone() for layer in tokens.cut(0, kv.num_tokens)]
        if buffer is not None:
            places = buffer.places(buffer.first_token, buffer.end_token - buffer.first_token)
            found += [places.read(layer).clone() for layer in buffer.keys.layers]
            found += [places.read(layer).clone() for layer in buffer.values.layers]
    return found
