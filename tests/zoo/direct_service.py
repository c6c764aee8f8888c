"""A calibrated model with a pool and an arena, driven as the engine drives it.

The real calibration, runner, sequences' KV, store and load; only the arena is ordinary memory,
and there is no scheduler.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.kv.arena_kv import ArenaKv
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.model.model_loader import describe_model
from inference_svc.runtime.transfer.layer_load import LayerLoader
from inference_svc.runtime.transfer.layer_store import store_blocks
from inference_svc.runtime.transfer.spans import check_spans, windows_beside
from shared.types.granted_slots import GrantedWindow
from shared.types.kv_layout import KVLayout

POOL_ROWS = 1024
NUM_SLOTS = 8
Range = tuple[int, int]


@dataclass(frozen=True)
class Rows:
    """A block and a span in one object."""

    slot_id: int
    token_offset: int
    num_tokens: int
    start: int = 0


class _Arena:
    """Slots in ordinary memory, filled with garbage at first."""

    def __init__(self, layout: KVLayout) -> None:
        self.slot_bytes = layout.block_bytes
        self.num_slots = NUM_SLOTS * (1 + layout.window_slots)
        self.memory = memoryview(bytearray(b"\xab" * (self.slot_bytes * self.num_slots)))


class Served:
    """See the module docstring."""

    def __init__(self, model: Any, name: str, positions: str = "auto") -> None:
        """Calibrate the model, which must not be used elsewhere afterwards.

        Raises:
            UnsupportedModelError: why it cannot be served.
        """
        self.loaded = describe_model(model, tokenizer=None, name=name, fingerprint="0" * 32)
        self.calibration = calibrate(self.loaded, *(() if positions == "auto" else (positions,)))
        shapes = [layer.shape for layer in self.calibration.layers]
        self._pool = KVPool(
            shapes,
            POOL_ROWS,
            device=self.loaded.device,
            dtype=self.loaded.dtype,
            states=self.calibration.state_shapes,
        )
        self._runner = ModelRunner(self.loaded, self.calibration)
        self._rows = ArenaKv(_Arena(self.calibration.layout), self.calibration.layout)

    @property
    def positions(self) -> str:
        """Return how stored keys depend on positions: decoupled, coupled or naive."""
        return self.calibration.layout.position_mode

    @property
    def embeds_positions(self) -> bool:
        """Return whether loading embeds stored keys at the positions they are loaded at."""
        layers = self.calibration.layers
        return any(part.rotary is not None for layer in layers for part in layer.components)

    def new_kv(self, capacity: int) -> SequenceKv:
        """Lend an empty sequence KV."""
        return self._pool.new_kv(capacity)

    def new_buffer(self, capacity: int) -> WriteBuffer:
        """Lend an empty write buffer for tokens from 0 on."""
        return self._pool.new_write_buffer(0, capacity)

    def step(self, *pieces: tuple[SequenceKv, Sequence[int]]) -> Tensor:
        """Append tokens to sequences in one forward; return a row of logits for each."""
        return self._runner.step(
            [Chunk(kv, list(token_ids), want_logits=True) for kv, token_ids in pieces]
        )

    def feed(
        self,
        kv: SequenceKv,
        token_ids: Sequence[int],
        sizes: Sequence[int],
        buffer: WriteBuffer | None = None,
    ) -> Tensor:
        """Append tokens in chunks of these sizes; return the logits after each chunk."""
        logits = []
        begin = 0
        for size in sizes:
            piece = list(token_ids[begin : begin + size])
            chunk = Chunk(kv, piece, want_logits=True, write_buffer=buffer)
            logits.append(self._runner.step([chunk])[0])
            begin += size
        return torch.stack(logits)

    def store(self, buffer: WriteBuffer) -> list[Rows]:
        """Store the buffer's rows in blocks, scattered over the arena; return where they are."""
        block_tokens = self.calibration.layout.block_tokens
        firsts = range(0, buffer.end_token, block_tokens)
        blocks = [
            Rows(NUM_SLOTS - 1 - index, first, min(block_tokens, buffer.end_token - first))
            for index, first in enumerate(firsts)
        ]
        windows = [window for block in blocks for window in self._windows([block])]
        store_blocks(buffer, self._rows, blocks, self.calibration, windows=windows)
        return blocks

    def _windows(self, spans: Sequence[Rows]) -> list[GrantedWindow]:
        return windows_beside(spans, self.calibration.layout, NUM_SLOTS)

    def load(
        self,
        blocks: Sequence[Rows],
        kept: Sequence[Range],
        capacity: int,
        packed: Tensor | None = None,
    ) -> SequenceKv:
        """Load runs of stored rows into new KV, one after another from position 0 on.

        Args:
            blocks: where it is.
            kept: the runs.
            capacity: tokens of the KV.
            packed: the state behind the last run, of a model with states.
        """
        spans: list[Rows] = []
        end = 0
        for begin, run_end in kept:
            for block in blocks:
                first = max(begin, block.token_offset)
                count = min(run_end, block.token_offset + block.num_tokens) - first
                if count > 0:
                    spans.append(Rows(block.slot_id, end, count, first - block.token_offset))
                    end += count
        kv = self.new_kv(capacity)
        windows = self._windows(spans)
        loader = LayerLoader(kv, self._rows, spans, self.calibration, windows=windows)
        for layer_index in range(len(self.calibration.layers)):
            loader.load(layer_index)
        kv.num_tokens = check_spans(kv, spans, self.calibration.layout)
        if kv.states is not None and packed is not None:
            kv.states.restore(packed)
        return kv
