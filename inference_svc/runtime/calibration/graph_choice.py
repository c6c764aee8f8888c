"""Graph choice: whether decode steps are replayed from graphs, by device and by proof.

Steps of every shape are captured and then compared with the same steps computed without a graph:
over pages in any order, with sequences of different lengths, twice with different ones. Their
logits are compared, and what they have written to working KV and to the write ring. If a step
cannot be captured, or its results differ, all steps are computed without graphs. All of this
happens before the service is ready.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import structlog
import torch
from torch import Tensor

from inference_svc.core.scheduling.held_slots import PageCopy
from inference_svc.runtime.attention.attention import AttentionBackend
from inference_svc.runtime.attention.paged_attention import PagedAttention
from inference_svc.runtime.calibration.kernels import reason_of
from inference_svc.runtime.calibration.stock import tolerance
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.decode_graphs import (
    Capture,
    DecodeGraphs,
    DecodeStep,
    StepShape,
    step_shapes,
)
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_tensors import SlotTensors
from inference_svc.runtime.kv.page_pool import PagePool
from inference_svc.runtime.kv.paged_kv import PagedKv
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.kv.write_ring import WriteRing
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration
from shared.types.units import ceil_div

GraphsName = Literal["auto", "off"]
PROOF_TOKENS = 600  # tokens of the longest sequence: more than two splits of attention

log = structlog.get_logger()


@dataclass(frozen=True)
class StepMemory:
    """The memory of an engine's steps, and their size.

    Attributes:
        pool: the pool of sequences' KV, from which nothing is lent yet.
        ring: the write ring, from which nothing is lent yet.
        most_rows: most sequences of a step.
        window_tokens: most tokens of a sequence.
    """

    pool: KVPool
    ring: WriteRing
    most_rows: int
    window_tokens: int


def choose_graphs(
    name: GraphsName,
    capture: Capture | None,
    loaded: LoadedModel,
    calibration: Calibration,
    attention: AttentionBackend,
    memory: StepMemory,
) -> DecodeGraphs | None:
    """Capture decode steps, and prove them.

    Args:
        name: "auto", or "off" for no graphs.
        capture: captures on the device; None: it has no graphs.
        loaded: the model, set to the attention of the calibration's mode.
        calibration: the model's calibration.
        attention: the attention back-end of the steps.
        memory: the memory of the steps.

    Returns:
        The graphs; None: steps are computed each time, and the log has the reason.
    """
    if name == "off" or capture is None:
        return None
    pool = memory.pool
    if not isinstance(attention, PagedAttention) or not isinstance(pool, PagePool):
        log.warning("graphs_chosen", graphs=0, reason="attention does not use pages")
        return None
    if calibration.state_shapes:  # a graph reads fixed addresses, and states have new ones
        log.warning("graphs_chosen", graphs=0, reason="the model has states")
        return None
    shapes = step_shapes(memory.most_rows, memory.window_tokens)
    try:
        step = DecodeStep(loaded, calibration, attention, (pool, memory.ring), shapes)
        graphs = DecodeGraphs(step, capture, shapes, len(calibration.layers))
        proof = _Proof(ModelRunner(loaded, calibration, attention), pool, memory, loaded.vocab_size)
        distance = proof.distance(graphs)
    except Exception as error:  # noqa: BLE001 - models and drivers may raise anything
        log.warning("graphs_chosen", graphs=0, reason=reason_of(error))
        return None
    if not distance <= tolerance(loaded.dtype, calibration.rounding):  # true for NaN, too
        reason = f"replayed results differ from computed ones by {distance:.1e}"
        log.warning("graphs_chosen", graphs=0, reason=reason)
        return None
    log.info(
        "graphs_chosen",
        graphs=len(shapes),
        most_turns=shapes[0].rows,
        most_tokens=max(shape.reach for shape in shapes),
        bytes=graphs.num_bytes,
        distance=distance,
    )
    return graphs


class _Row(NamedTuple):
    """One sequence of a step that is compared.

    Attributes:
        history: index of the history that it begins with.
        length: number of its tokens, the new one included.
        token_id: id of the new token.
        pages: by group its last page, which it does not share.
        write_slot: its slot in the write ring; None: it will not be stored.
    """

    history: int
    length: int
    token_id: int
    pages: Sequence[int]
    write_slot: int | None


class _Proof:
    """The comparison: two histories on pages in any order, and sequences that begin with them."""

    def __init__(
        self, runner: ModelRunner, pool: PagePool, memory: StepMemory, vocab_size: int
    ) -> None:
        """Compute the histories, which are as long as there is room for.

        Raises:
            ValueError: there is no room.
        """
        self._runner, self._pool, self._ring = runner, pool, memory.ring
        self._vocab_size = vocab_size
        self._most_rows = memory.most_rows
        self._page_tokens = size = pool.groups.page_tokens
        self._chance = torch.Generator().manual_seed(7)
        pages = torch.randperm(pool.num_pages, generator=self._chance).tolist()
        self._groups = groups = pool.groups.pages
        num_own = memory.most_rows * groups.num_groups
        self._own_pages, pages = pages[:num_own], pages[num_own:]
        longest = groups.count_in(len(pages) // 2) * size
        longest = min(PROOF_TOKENS, memory.window_tokens, longest)
        if groups.num_windowed:  # no token's slot may be overwritten by a later token
            longest = min(longest, groups.window_pages * size)
        if not longest:
            raise ValueError("there are too few pages to prove them")
        count = groups.num_pages(ceil_div(longest, size))
        self._histories = [pool.new_kv(longest, pages[first::2][:count]) for first in (0, 1)]
        self._runner.step(
            [
                Chunk(kv, [(37 * i + offset) % vocab_size for i in range(longest)], False)
                for kv, offset in zip(self._histories, (11, 29), strict=True)
            ]
        )

    @torch.inference_mode()
    def distance(self, graphs: DecodeGraphs) -> float:
        """Return the largest relative distance of a row between a replayed and a computed step.

        Each shape is replayed with all its rows, and with the fewest rows for which it is chosen.
        """
        found = []
        for shape in graphs.shapes:
            fewer = [smaller.rows for smaller in graphs.shapes if smaller.rows < shape.rows]
            for num_rows in (shape.rows, max(fewer, default=0) + 1):
                rows = list(self._rows(num_rows, shape))
                computed = self._outcome(rows, self._runner.step)
                replayed = self._outcome(rows, partial(graphs.replay, shape))
                found += [
                    (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
                    for ours, theirs in zip(replayed, computed, strict=True)
                ]
        return float(torch.cat(found).max())

    def _rows(self, num_rows: int, shape: StepShape) -> Iterator[_Row]:
        """Draw sequences; the first is as long as possible, and some will not be stored."""
        longest = min(shape.reach, self._histories[0].num_tokens)
        drawn = torch.randint(1, longest + 1, (num_rows,), generator=self._chance).tolist()
        for row, length in enumerate([longest, *drawn[1:]]):
            is_stored = row % 3 < 2 and row < self._ring.num_slots
            yield _Row(
                row % 2,
                length,
                (41 * row + length) % self._vocab_size,
                self._own_pages[row :: self._most_rows],
                self._ring.num_slots - 1 - row if is_stored else None,
            )

    def _outcome(
        self, rows: Sequence[_Row], run: Callable[[Sequence[Chunk]], Tensor]
    ) -> list[Tensor]:
        """Return a step's logits, and the KV that it has written, each [rows, n] float32."""
        chunks = [self._chunk(row) for row in rows]
        logits = run(chunks)
        kv, buffer = self._pool.spare_kv(), self._ring.spare_buffer()
        ends = [_slots(chunk.kv, row.length - 1) for chunk, row in zip(chunks, rows, strict=True)]
        slots = list(zip(*ends, strict=True))
        by_layer = [slots[group] for group in self._pool.groups.group_of]
        found = [
            logits,
            *(_tokens(tensors, by_layer) for tensors in (kv.keys.slots, kv.values.slots)),
        ]
        stored = [row.write_slot for row in rows if row.write_slot is not None]
        if stored:
            everywhere = [stored] * len(by_layer)
            found += [_tokens(tensors, everywhere) for tensors in (buffer.keys, buffer.values)]
        return found

    def _chunk(self, row: _Row) -> Chunk:
        """Return a sequence's chunk: its last token, whose slots are still empty."""
        history, last = self._histories[row.history], (row.length - 1) // self._page_tokens
        groups = self._groups
        pages = history.tables.pages[: groups.num_pages(last + 1)]
        kv = self._pool.new_kv(row.length, pages)
        places = [groups.position(group, last) for group in range(groups.num_groups)]
        kv.copy_shared_pages(
            [PageCopy(at, pages[at], page) for at, page in zip(places, row.pages, strict=True)]
        )
        kv.num_tokens = row.length - 1
        buffer = None
        if row.write_slot is not None:
            spare = self._ring.spare_buffer()
            buffer = WriteBuffer(spare.keys, spare.values, kv.num_tokens, [row.write_slot])
            for layer in (*buffer.keys.layers, *buffer.values.layers):
                layer[row.write_slot].zero_()
        return Chunk(kv, [row.token_id], want_logits=True, write_buffer=buffer)


def _slots(kv: SequenceKv, token: int) -> list[int]:
    """Return the slots of a sequence's token, by group of layers."""
    assert isinstance(kv, PagedKv)  # noqa: S101 - the pool is of pages
    return [table.slot_of(token) for table in kv.tables.by_group]


def _tokens(tensors: SlotTensors, slots: Sequence[Sequence[int]]) -> Tensor:
    """Return the contents of some slots in all layers, [slots, n] float32 on the CPU.

    Args:
        tensors: the tensors of all layers.
        slots: the slots by layer.
    """
    found = [
        layer[torch.tensor(layer_slots, device=tensors.device)].flatten(1).float()
        for layer, layer_slots in zip(tensors.layers, slots, strict=True)
    ]
    return torch.cat(found, dim=1).cpu()
