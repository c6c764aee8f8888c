"""Proof that a calibrated model computes what the stock model does, on every path of a turn.

Of a model with states (`kv/states.py`) some paths more: chunks of one and of a few tokens between
others, a prefill as long as several of its own chunks on top of a state, and a load of KV with the
state behind it. And that the latter proves something: with the state of another position logits
must be others.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inference_svc.runtime.calibration.stock import (
    NOT_STORED,
    SAME,
    StockLogits,
    is_same,
    last_logits,
    logits_distance,
    num_dropped,
    proof_tokens,
)
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.kv.arena_kv import ArenaKv, SlotTokens
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.refusals import CalibrationMismatchError
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.transfer.layer_load import LayerLoader
from inference_svc.runtime.transfer.layer_store import store_blocks
from inference_svc.runtime.transfer.spans import windows_beside
from shared.types.granted_slots import GrantedWindow
from shared.types.units import ceil_div

# Ends of the chunks of two sequences beside each other, before the longer one is stored.
ENDS = (("prefill", 10, 5), ("chunked prefill", None, 9))
ENDS_WITH_STATES = (
    ("prefill", 10, 5),
    ("decode over a state", 11, 6),
    ("a short chunk over a state", 14, 8),
    ("chunked prefill", None, 9),
)
LONG_TOKENS = 300  # models with states have chunks of their own, of 64 to 256 tokens
LONG_ENDS = (10, -8, -2, -1, None)  # of its chunks; the first two have no logits


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
        if not is_same(logits, expected, loaded.dtype, reference.rounding):
            distance = logits_distance(logits, expected, loaded.dtype)
            raise CalibrationMismatchError(
                f"{path} of {loaded.architecture} is {distance:.1e} off the stock model",
                "serve another model, and report this one",
            )


def new_pool(loaded: LoadedModel, calibration: Calibration, num_token_slots: int) -> KVPool:
    """Make memory for sequences of a model: KV of its layers, and states if it has some."""
    return KVPool(
        [layer.shape for layer in calibration.layers],
        num_token_slots,
        device=loaded.device,
        dtype=loaded.dtype,
        states=calibration.state_shapes,
    )


_Logits = tuple[int, Tensor]  # position of the first token, logits [tokens, vocab]


class _Paths:
    """The ways to compute, over sequences of the same tokens."""

    def __init__(self, loaded: LoadedModel, calibration: Calibration) -> None:
        self._token_ids = proof_tokens(loaded)
        self._calibration = calibration
        self._runner = ModelRunner(loaded, calibration)
        self._stored = len(self._token_ids) - NOT_STORED
        self._loaded = loaded
        self._pool = new_pool(loaded, calibration, 5 * len(self._token_ids))

    def run(self, reference: StockLogits) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (path, the stock model's logits, ours), [tokens, vocab] both, path by path.

        Index keys likewise, [tokens, index_dim] both, as they were loaded.
        """
        total, stored, whole = len(self._token_ids), self._stored, reference.whole
        long, short, again = (self._pool.new_kv(total) for _ in range(3))
        buffer = self._pool.new_write_buffer(0, total)
        packed = []
        for path, long_end, short_end in ENDS if long.states is None else ENDS_WITH_STATES:
            ends = {long: long_end or stored, short: short_end}
            yield from self._compared(path, whole, [self._step(ends, {long: buffer})])
            if long.states is not None:
                packed.append(long.states.snapshot())
        arena, blocks = self._store(buffer)
        self._load(again, arena, blocks, *packed[-1:])
        if packed and not self._calibration.own_layers:  # these do not fit another position's rows
            self._check_noticed(arena, blocks, packed)
        decoded = [
            self._step({kv: kv.num_tokens + 1 for kv in (long, again, short)})
            for _ in range(NOT_STORED // 2)
        ]
        yield from self._compared("decode", whole, decoded)
        alone = self._step({long: long.num_tokens + 1})  # models may treat a lone token otherwise
        yield from self._compared("decode of a lone token", whole, [alone])
        yield from self._compared("prefill after load", whole, [self._step({again: total})])
        if packed and not self._calibration.is_one_by_one:
            yield self._long()
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
        num_slots = len(blocks) * (1 + layout.window_slots)
        arena = ArenaKv(_PlainArena(layout.block_bytes, num_slots), layout)
        windows = self._windows(blocks)
        store_blocks(buffer, arena, blocks, self._calibration, windows=windows)
        return arena, blocks

    def _windows(self, spans: Sequence[SlotTokens]) -> list[GrantedWindow]:
        """Return where windows are, in slots behind those of all blocks."""
        layout = self._calibration.layout
        return windows_beside(spans, layout, ceil_div(self._stored, layout.block_tokens))

    def _load(
        self, kv: SequenceKv, arena: ArenaKv, spans: list[SlotTokens], packed: Tensor | None = None
    ) -> None:
        """Load spans into empty KV, and the state behind them."""
        windows = self._windows(spans)
        loader = LayerLoader(kv, arena, spans, self._calibration, windows=windows)
        for layer_index in range(len(self._calibration.layers)):
            loader.load(layer_index)
        kv.num_tokens = sum(span.num_tokens for span in spans)
        if kv.states is not None and packed is not None:
            kv.states.restore(packed)

    def _check_noticed(
        self, arena: ArenaKv, blocks: list[SlotTokens], packed: Sequence[Tensor]
    ) -> None:
        """Raise unless the next token's logits tell the last of these states from the first.

        Raises:
            CalibrationMismatchError: they do not: so nothing that is compared depends on states.
        """
        logits = []
        for state in (packed[-1], packed[0]):
            kv = self._pool.new_kv(len(self._token_ids))
            self._load(kv, arena, blocks, state)
            if kv.states is not None:
                kv.states.commit(kv.num_tokens)  # wherever it was packed
            logits += [found for _, found in self._step({kv: kv.num_tokens + 1})]
            self._pool.release(kv)
        if not logits_distance(logits[1], logits[0], torch.float32) > SAME:
            raise CalibrationMismatchError(
                f"logits of {self._loaded.architecture} do not depend on its states",
                "serve another model, and report this one",
            )

    def _long(self) -> tuple[str, Tensor, Tensor]:
        """Compute more tokens than a chunk of the model's own, over a state."""
        token_ids = proof_tokens(self._loaded, LONG_TOKENS)
        kv = self._pool.new_kv(len(token_ids))
        logits, first = [], 0
        for end in LONG_ENDS:
            piece = token_ids[first:end]
            is_last = first > LONG_ENDS[0]
            chunk = Chunk(kv, piece, want_logits=is_last, want_all=is_last)
            logits.append(self._runner.step([chunk]))
            first += len(piece)
        self._pool.release(kv)
        expected = last_logits(self._loaded, token_ids, -LONG_ENDS[1])
        return "a long chunk over a state", expected, torch.cat(logits)


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
