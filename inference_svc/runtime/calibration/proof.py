"""Proof that a calibrated model computes what the stock model does, on every path of a turn.

A model with states (`kv/states.py`) has more paths: chunks of one and of a few tokens among others,
a prefill of several of the model's own chunks over a state, and a load of KV with its state. It is
also checked that the last path proves anything: with the state of another position the logits have
to differ.

An embedding is proven against the states of the stock model's last layer.
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
    stock_attention,
)
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.compute.pooler import Pooler
from inference_svc.runtime.kv.arena_kv import ArenaKv, SlotTokens
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.model.capture import tap_head
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.pooling import Pooling, UnknownPoolingError
from inference_svc.runtime.model.refusals import CalibrationMismatchError
from inference_svc.runtime.positions.recipes import Calibration
from inference_svc.runtime.transfer.layer_load import LayerLoader
from inference_svc.runtime.transfer.layer_store import store_blocks
from inference_svc.runtime.transfer.spans import windows_beside
from shared.types.granted_slots import GrantedWindow
from shared.types.units import ceil_div

# (path, end of the long sequence's chunk, end of the short one's), step by step, until the long
# sequence is stored; None: the end of what is stored.
ENDS = (("prefill", 10, 5), ("chunked prefill", None, 9))
ENDS_WITH_STATES = (
    ("prefill", 10, 5),
    ("decode over a state", 11, 6),
    ("a short chunk over a state", 14, 8),
    ("chunked prefill", None, 9),
)
LONG_TOKENS = 300  # models with states divide a prefill into chunks of 64 to 256 tokens themselves
LONG_ENDS = (10, -8, -2, -1, None)  # ends of the chunks; the first two have no logits
FIRST_POOLED = 10  # tokens of the first step of a pooling; the second step computes the others


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
            Or index keys are off, on which the logits of so few tokens may not depend.
    """
    for path, expected, logits in _Paths(loaded, calibration).run(reference):
        if not is_same(logits, expected, loaded.dtype, reference.rounding):
            distance = logits_distance(logits, expected, loaded.dtype)
            raise CalibrationMismatchError(
                f"{path} of {loaded.architecture} differs from the stock model by {distance:.1e}",
                "serve another model, and report this as a bug",
            )


def new_pool(loaded: LoadedModel, calibration: Calibration, num_token_slots: int) -> KVPool:
    """Make a pool for sequences of a model."""
    return KVPool(
        [layer.shape for layer in calibration.layers],
        num_token_slots,
        device=loaded.device,
        dtype=loaded.dtype,
        states=calibration.state_shapes,
    )


_Logits = tuple[int, Tensor]  # position of the first token, logits [tokens, vocab]


class _Paths:
    """The paths to prove, computed over sequences of the same tokens."""

    def __init__(self, loaded: LoadedModel, calibration: Calibration) -> None:
        self._token_ids = proof_tokens(loaded)
        self._calibration = calibration
        self._runner = ModelRunner(loaded, calibration)
        self._stored = len(self._token_ids) - NOT_STORED
        self._loaded = loaded
        self._pool = new_pool(loaded, calibration, 5 * len(self._token_ids))

    def run(self, reference: StockLogits) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (path, the stock model's logits, our logits), [tokens, vocab] both.

        Loaded index keys are compared in the same way, [tokens, index_dim] both.
        """
        total, stored, whole = len(self._token_ids), self._stored, reference.whole
        long, short, again = (self._pool.new_kv(total) for _ in range(3))
        buffer = self._pool.new_write_buffer(0, total)
        packed = []
        for path, long_end, short_end in ENDS if long.states is None else ENDS_WITH_STATES:
            ends = {long: long_end or stored, short: short_end}
            yield from self._compare(path, whole, [self._step(ends, {long: buffer})])
            if long.states is not None:
                packed.append(long.states.snapshot())
        arena, blocks = self._store(buffer)
        self._load(again, arena, blocks, *packed[-1:])
        # States of own layers do not fit the rows of another position: these need no such check.
        if packed and not self._calibration.own_layers:
            self._check_states_matter(arena, blocks, packed)
        decoded = [
            self._step({kv: kv.num_tokens + 1 for kv in (long, again, short)})
            for _ in range(NOT_STORED // 2)
        ]
        yield from self._compare("decode", whole, decoded)
        alone = self._step({long: long.num_tokens + 1})  # models may treat a lone token differently
        yield from self._compare("decode of a lone token", whole, [alone])
        yield from self._compare("prefill after load", whole, [self._step({again: total})])
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
        """Run sequences up to these ends in one step; return the logits of each."""
        firsts = [kv.num_tokens for kv in ends]
        chunks = [
            Chunk(kv, self._token_ids[first:end], True, (buffers or {}).get(kv), want_all=True)
            for first, (kv, end) in zip(firsts, ends.items(), strict=True)
        ]
        logits = self._runner.step(chunks).split_with_sizes(
            [len(chunk.token_ids) for chunk in chunks]
        )
        return list(zip(firsts, logits, strict=True))

    def _compare(
        self, path: str, whole: Tensor, steps: list[list[_Logits]]
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield for each sequence the path, and its expected and actual logits over all steps."""
        for parts in zip(*steps, strict=True):
            expected = [whole[first : first + len(logits)] for first, logits in parts]
            yield path, torch.cat(expected), torch.cat([logits for _, logits in parts])

    @property
    def _counts_distances(self) -> bool:
        """Whether scores depend on distances only, so that a truncation can be compared.

        With a norm after RoPE whose weights differ scores depend on more than distances: then the
        stock model has no answer for keys that were computed at other positions.
        """
        components = [part for layer in self._calibration.layers for part in layer.components]
        norms = [part.post.norm for part in components if part.post is not None]
        is_plain = not any(True for norm in norms for _ in norm.parameters())
        return self._calibration.positions == "decoupled" and is_plain

    def _store(self, buffer: WriteBuffer) -> tuple[ArenaKv, list[SlotTokens]]:
        """Store the buffer's tokens in blocks, in reverse order of slots."""
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
        """Return the windows of spans, in slots behind those of all blocks."""
        layout = self._calibration.layout
        return windows_beside(spans, layout, ceil_div(self._stored, layout.block_tokens))

    def _load(
        self, kv: SequenceKv, arena: ArenaKv, spans: list[SlotTokens], packed: Tensor | None = None
    ) -> None:
        """Load spans into empty KV, and the packed state at their end."""
        windows = self._windows(spans)
        loader = LayerLoader(kv, arena, spans, self._calibration, windows=windows)
        for layer_index in range(len(self._calibration.layers)):
            loader.load(layer_index)
        kv.num_tokens = sum(span.num_tokens for span in spans)
        if kv.states is not None and packed is not None:
            kv.states.restore(packed)

    def _check_states_matter(
        self, arena: ArenaKv, blocks: list[SlotTokens], packed: Sequence[Tensor]
    ) -> None:
        """Check that the next token's logits differ between the last of these states and the first.

        Raises:
            CalibrationMismatchError: they do not: so no compared logits depend on states.
        """
        logits = []
        for state in (packed[-1], packed[0]):
            kv = self._pool.new_kv(len(self._token_ids))
            self._load(kv, arena, blocks, state)
            if kv.states is not None:
                kv.states.commit(kv.num_tokens)  # overrides the position in its header
            logits += [found for _, found in self._step({kv: kv.num_tokens + 1})]
            self._pool.release(kv)
        if not logits_distance(logits[1], logits[0], torch.float32) > SAME:
            raise CalibrationMismatchError(
                f"logits of {self._loaded.architecture} do not depend on its states",
                "serve another model, and report this as a bug",
            )

    def _long(self) -> tuple[str, Tensor, Tensor]:
        """Compute a chunk over a state that is longer than the model's own chunks."""
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
    """Yield the index keys of each layer that has some: the stock model's and the loaded ones."""
    for layer_index, expected in reference.indexes.items():
        if loaded.indexes is not None:
            found = loaded.indexes.read(layer_index, 0, loaded.num_tokens)
            yield "an index after truncation", expected, found.flatten(1).float().cpu()


def _without_first(blocks: list[SlotTokens], dropped: int) -> list[SlotTokens]:
    """Return the spans of these blocks from token `dropped` on, which moves to position 0."""
    spans = []
    for block in blocks:
        skipped = max(0, dropped - block.token_offset)
        if skipped < block.num_tokens:
            first = block.token_offset + skipped - dropped
            spans.append(SlotTokens(block.slot_id, first, block.num_tokens - skipped, skipped))
    return spans


# ---------------------------------------------------------------------------------- embeddings


def prove_pooling(loaded: LoadedModel, calibration: Calibration, pooling: Pooling) -> None:
    """Tap the head of a calibrated model, and compare its embedding with the stock model's.

    Args:
        loaded: the model, set to the attention of the calibration's mode.
        calibration: the model's calibration.
        pooling: how its embeddings are made.

    Raises:
        UnknownPoolingError: the embeddings differ, or cannot be computed.
    """
    if not tap_head(loaded.model):
        raise UnknownPoolingError("the hidden states after its last layer are not accessible")
    try:
        found, expected = _pool(loaded, calibration, pooling), _pool_stock(loaded, pooling)
    except Exception as error:
        raise UnknownPoolingError(
            f"its hidden states cannot be pooled ({type(error).__name__})"
        ) from error
    if not is_same(found[None], expected[None], loaded.dtype, calibration.rounding):
        raise UnknownPoolingError(
            "its head is given something else than the output of its last layer"
        )


def _pool(loaded: LoadedModel, calibration: Calibration, pooling: Pooling) -> Tensor:
    """Compute the embedding of the proof's tokens in two steps, [hidden]."""
    token_ids, runner = proof_tokens(loaded), ModelRunner(loaded, calibration)
    pool = new_pool(loaded, calibration, len(token_ids))
    kv, pooler = pool.new_kv(len(token_ids)), Pooler(pooling, len(token_ids))
    for part in (token_ids[:FIRST_POOLED], token_ids[FIRST_POOLED:]):
        runner.step([Chunk(kv, part, want_logits=False, pooler=pooler)])
        pooler.commit()
    return pooler.vector()


@torch.inference_mode()
def _pool_stock(loaded: LoadedModel, pooling: Pooling) -> Tensor:
    """Compute the embedding of the proof's tokens by the stock model's last layer, [hidden]."""
    token_ids = proof_tokens(loaded)
    with stock_attention(loaded.model):
        input_ids = torch.tensor([token_ids], device=loaded.device)
        answer = loaded.model.base_model(input_ids=input_ids, use_cache=False)
    pooler, states = Pooler(pooling, len(token_ids)), answer.last_hidden_state[0]
    pooler.note(states[len(token_ids) - pooler.num_rows(0, len(token_ids)) :], len(token_ids))
    pooler.commit()
    return pooler.vector()
