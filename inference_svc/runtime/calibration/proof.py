"""Proof that a calibrated model computes what the stock model does, on every path of a turn."""

from collections.abc import Iterator

import torch
from torch import Tensor

from inference_svc.runtime.calibration.stock import (
    NOT_STORED,
    StockLogits,
    is_same,
    logits_distance,
    num_dropped,
    proof_tokens,
)
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.kv.arena_kv import ArenaKv
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.refusals import CalibrationMismatchError
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.transfer.layer_load import LayerLoader, SlotTokens
from inference_svc.runtime.transfer.layer_store import store_blocks


class _PlainArena:
    """An arena in ordinary memory."""

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.memory = memoryview(bytearray(slot_bytes * num_slots))


def prove(loaded: LoadedModel, calibration: Calibration, reference: StockLogits) -> None:
    """Compare the logits of every path with the stock model's.

    Args:
        loaded: the model, set to the attention of the calibration's mode.
        calibration: the calibration to be proven.
        reference: the stock model's logits.

    Raises:
        CalibrationMismatchError: a path's logits are off; the message says which and by how much.
            Or index keys are: logits of so few tokens may not depend on them.
    """
    for path, expected, logits in _Paths(loaded, calibration).run(reference):
        if not is_same(logits, expected, loaded.dtype):
            distance = logits_distance(logits, expected, loaded.dtype)
            raise CalibrationMismatchError(
                f"{path} of {loaded.architecture} is {distance:.1e} off the stock model",
                "serve another model, and report this one",
            )


_Logits = tuple[int, Tensor]  # position of the first token, logits [tokens, vocab]


class _Paths:
    """The ways to compute, over sequences of the same tokens."""

    def __init__(self, loaded: LoadedModel, calibration: Calibration) -> None:
        self._token_ids = proof_tokens(loaded)
        self._calibration = calibration
        self._runner = ModelRunner(loaded, calibration)
        self._stored = len(self._token_ids) - NOT_STORED
        shapes = [layer.shape for layer in calibration.layers]
        total = len(self._token_ids)
        self._pool = KVPool(shapes, 5 * total, device=loaded.device, dtype=loaded.dtype)

    def run(self, reference: StockLogits) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (path, the stock model's logits, ours), [tokens, vocab] both, path by path.

        Index keys likewise, [tokens, index_dim] both, as they were loaded.
        """
        total, stored, whole = len(self._token_ids), self._stored, reference.whole
        long, short, again = (self._pool.new_kv(total) for _ in range(3))
        buffer = self._pool.new_write_buffer(0, total)
        for path, long_end, short_end in (("prefill", 10, 5), ("chunked prefill", stored, 9)):
            ends = {long: long_end, short: short_end}
            yield from self._compared(path, whole, [self._step(ends, {long: buffer})])
        arena, blocks = self._store(buffer)
        self._load(again, arena, blocks)
        decoded = [
            self._step({kv: kv.num_tokens + 1 for kv in (long, again, short)})
            for _ in range(NOT_STORED // 2)
        ]
        yield from self._compared("decode", whole, decoded)
        yield from self._compared("prefill after load", whole, [self._step({again: total})])
        if self._counts_distances and reference.truncated is not None:
            cut = self._pool.new_kv(total)
            self._load(cut, arena, _without_first(blocks, num_dropped(stored)))
            yield from _indexes(cut, reference)
            last = Chunk(cut, self._token_ids[stored:], want_logits=True, want_all=True)
            yield "truncation", reference.truncated, self._runner.step([last])

    def _step(
        self, ends: dict[SequenceKv, int], buffers: dict[SequenceKv, WriteBuffer] | None = None
    ) -> list[_Logits]:
        """Run sequences on to these ends in one step; return the logits of each."""
        firsts = [kv.num_tokens for kv in ends]
        chunks = [
            Chunk(kv, self._token_ids[first:end], True, (buffers or {}).get(kv), want_all=True)
            for first, (kv, end) in zip(firsts, ends.items(), strict=True)
        ]
        logits = self._runner.step(chunks).split_with_sizes(
            [len(chunk.token_ids) for chunk in chunks]
        )
        return list(zip(firsts, logits, strict=True))

    def _compared(
        self, path: str, whole: Tensor, steps: list[list[_Logits]]
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield, per sequence, the path and its expected and actual logits over all steps."""
        for parts in zip(*steps, strict=True):
            expected = [whole[first : first + len(logits)] for first, logits in parts]
            yield path, torch.cat(expected), torch.cat([logits for _, logits in parts])

    @property
    def _counts_distances(self) -> bool:
        """Whether tokens at other positions have a stock model to be compared with.

        A norm after RoPE whose weights differ makes scores depend on more than distances: there
        the stock model has no answer for keys that were computed at other positions.
        """
        components = [part for layer in self._calibration.layers for part in layer.components]
        norms = [part.post.norm for part in components if part.post is not None]
        is_plain = not any(True for norm in norms for _ in norm.parameters())
        return self._calibration.positions == "decoupled" and is_plain

    def _store(self, buffer: WriteBuffer) -> tuple[ArenaKv, list[SlotTokens]]:
        """Store what the buffer holds, in as many blocks as it takes."""
        layout = self._calibration.layout
        firsts = range(0, buffer.end_token, layout.block_tokens)
        blocks = [
            SlotTokens(slot_id, first, min(layout.block_tokens, buffer.end_token - first))
            for slot_id, first in zip(reversed(range(len(firsts))), firsts, strict=True)
        ]
        arena = ArenaKv(_PlainArena(layout.block_bytes, len(blocks)), layout)
        store_blocks(buffer, arena, blocks, self._calibration)
        return arena, blocks

    def _load(self, kv: SequenceKv, arena: ArenaKv, spans: list[SlotTokens]) -> None:
        """Load spans into empty KV."""
        loader = LayerLoader(kv, arena, spans, self._calibration)
        for layer_index in range(len(self._calibration.layers)):
            loader.load(layer_index)
        kv.num_tokens = sum(span.num_tokens for span in spans)


def _indexes(loaded: SequenceKv, reference: StockLogits) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the index keys of each layer that has some, the stock model's and as loaded."""
    for layer_index, expected in reference.indexes.items():
        if loaded.indexes is not None:
            found = loaded.indexes.read(layer_index, 0, loaded.num_tokens)
            yield "an index after truncation", expected, found.flatten(1).float().cpu()


def _without_first(blocks: list[SlotTokens], dropped: int) -> list[SlotTokens]:
    """Return the spans of these blocks from token `dropped` on, which comes to position 0."""
    spans = []
    for block in blocks:
        skipped = max(0, dropped - block.token_offset)
        if skipped < block.num_tokens:
            first = block.token_offset + skipped - dropped
            spans.append(SlotTokens(block.slot_id, first, block.num_tokens - skipped, skipped))
    return spans
