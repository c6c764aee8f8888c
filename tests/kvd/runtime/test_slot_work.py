"""Rows are compacted exactly, whatever their sources; verified slots are ready for loads."""

import asyncio

import numpy as np
import pytest

from kvd.core.records.actions import (
    CompactTokens,
    DenseBlock,
    SourceSlot,
    TokenRun,
    TrackLoad,
    VerifySlot,
)
from kvd.runtime.slot_work import RowCopier
from kvd.tiers.slot_rows import BlockHasher
from shared.kvd_client.arena_map import FAILED_BIT, LAYERS_MASK, ProgressWords
from shared.types.kv_layout import Component, KVLayout, Layer
from tests.kvd.runtime.performer_world import DEADLINE_S, ENGINE_ID, LEASE

BLOCK_TOKENS = 16
ORDINARY = Layer((Component("k", (2, 8), "float32"), Component("v", (2, 8), "float32")))
LATENT = Layer((Component("latent", (24,), "bfloat16"), Component("k_rot", (3,), "float16")))
LAYOUTS = {
    "ordinary": (ORDINARY, ORDINARY),
    "mixed": (ORDINARY, LATENT, Layer(())),  # an empty layer that shares another one's KV
}


class Slots:
    """Slots with random bytes."""

    def __init__(self, layers: tuple[Layer, ...], num_slots: int = 4) -> None:
        self.layout = KVLayout("0f", layers, BLOCK_TOKENS)
        random = np.random.default_rng(7)
        shape = (num_slots, self.layout.block_bytes)
        self.memory = random.integers(0, 256, shape, np.uint8)
        self.hasher = BlockHasher(self.layout)
        self.copier = RowCopier(self.layout, self.slot)

    def slot(self, slot_id: int) -> memoryview:
        return memoryview(self.memory[slot_id])

    def source(self, slot_id: int, num_tokens: int = BLOCK_TOKENS) -> SourceSlot:
        checksums = self.hasher.checksums(self.slot(slot_id), num_tokens)
        return SourceSlot(slot_id, num_tokens, checksums)

    def row(self, slot_id: int, row: int) -> bytes:
        """Return all components of a token, of all layers."""
        pieces = []
        for layer_index, layer in enumerate(self.layout.layers):
            for component_index, component in enumerate(layer.components):
                start = self.layout.component_offset(layer_index, component_index)
                start += row * component.token_bytes
                pieces.append(self.slot(slot_id)[start : start + component.token_bytes].tobytes())
        return b"".join(pieces)


@pytest.mark.parametrize("layers", LAYOUTS.values(), ids=LAYOUTS)
def test_runs_of_several_slots_follow_each_other(layers):
    """Single rows, runs, and rows of a slot that appears twice; the rest stays as it was."""
    slots = Slots(layers)
    runs = [(0, 3, 1), (0, 5, 4), (1, 0, 2), (0, 15, 1)]
    expected = [slots.row(slot, row) for slot, first, n in runs for row in range(first, first + n)]
    behind = slots.row(3, len(expected))
    block = DenseBlock(3, len(expected), tuple(TokenRun(*run) for run in runs))
    sources = (slots.source(0), slots.source(1, num_tokens=2))
    checksums = slots.copier.compact(CompactTokens(1, sources, (block,)))
    assert [slots.row(3, row) for row in range(len(expected))] == expected
    assert slots.row(3, len(expected)) == behind
    assert checksums == [slots.hasher.checksums(slots.slot(3), len(expected))]


def test_a_corrupt_source_is_not_copied():
    """A flipped bit anywhere in the used rows of a source, even in an unwanted row."""
    slots = Slots(LAYOUTS["ordinary"])
    source = slots.source(0)
    before = slots.memory[3].copy()
    slots.memory[0, 9] ^= 1
    block = DenseBlock(3, 1, (TokenRun(0, 8, 1),))
    assert slots.copier.compact(CompactTokens(1, (source,), (block,))) is None
    assert np.array_equal(slots.memory[3], before)


# ------------------------------------------------------------------------- verifying


async def test_a_verification_announces_all_layers(world):
    """A load that waits for an adopted slot is ready when it is verified."""
    words = ProgressWords(world.arena.progress.fd, 4)
    stored = world.fill(0)
    world.performer.perform(VerifySlot(11, 0, 16, stored.checksums, urgent=True))
    world.performer.perform(TrackLoad(LEASE, ENGINE_ID, (11,)))
    index = world.performer.loads.index_of(LEASE)
    await world.until_idle()
    assert words.word(index) & (LAYERS_MASK | FAILED_BIT) == 8


async def test_a_load_speeds_up_a_background_verification(world):
    """The load does not wait behind the writes."""
    words = ProgressWords(world.arena.progress.fd, 4)
    stored = world.fill(0)
    world.faults.hold.clear()
    for slot_id in (1, 2, 3, 4):  # more than there are threads
        world.performer.perform(world.write_action(slot_id, slot_id, slot_id)[0])
    world.performer.perform(VerifySlot(11, 0, 16, stored.checksums, urgent=False))
    world.performer.perform(TrackLoad(LEASE, ENGINE_ID, (11,)))
    index = world.performer.loads.index_of(LEASE)
    async with asyncio.timeout(DEADLINE_S):
        while words.word(index) & LAYERS_MASK < 8:  # noqa: ASYNC110  # the word is what counts
            await asyncio.sleep(0.001)
    assert [entry[:2] for entry in world.engine.done] in ([], [("verify_done", 11)])
    world.faults.hold.set()
    done = await world.until_idle()
    assert sorted(entry[1] for entry in done) == [1, 2, 3, 4, 11]
