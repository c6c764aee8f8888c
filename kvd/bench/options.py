"""The options of the bench: what and how much to measure, and the shapes of its blocks. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shared.measuring.options import ignore_progress
from shared.types.kv_layout import Component, KVLayout, Layer

MIB = 1 << 20
Part = Literal["arena", "ssd", "encryption", "control", "queue", "restart"]
PARTS: tuple[Part, ...] = ("arena", "ssd", "encryption", "control", "queue", "restart")

MODEL = "be" * 16  # the fingerprint of no model
BLOCKS_PER_SESSION = 8  # of the sessions in a filled index
MIN_PASS_BYTES = 64 * MIB  # a smaller pass would measure latency, not bandwidth
BLOCK_TOKENS = 16


def layout_with(slice_bytes: int, num_layers: int) -> KVLayout:
    """Return a layout with K and V in equal halves, and `slice_bytes` per layer and block."""
    width = slice_bytes // (2 * BLOCK_TOKENS * 4)
    components = (Component("k", (1, width), "float32"), Component("v", (1, width), "float32"))
    return KVLayout(MODEL, (Layer(components),) * num_layers, BLOCK_TOKENS)


# The smallest slice that a real layout has (D6), and one of a large model.
NUM_LAYERS = 16
DATA_LAYOUTS = (layout_with(64 << 10, NUM_LAYERS), layout_with(MIB, NUM_LAYERS))
# As small as possible: where only the number of sessions matters, bytes cost time.
SMALL_LAYOUT = layout_with(4 << 10, 1)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        name: the scale's name.
        arena_bytes, arena_pairs: bytes of one pass in the arena, and number of pairs.
        ssd_pass_s: the wanted time of a pass on SSD; its bytes follow from the disk's speed.
        ssd_max_bytes: the most bytes of such a pass.
        ssd_pairs: number of pairs on SSD.
        layouts: layouts of the arena's and the SSD's blocks.
        session_counts: a small number of sessions, and the two whose costs are compared.
        rounds: the session counts take turns this often, with calls_per_round calls each.
        restarts: starts over the fullest index.
        blocks_per_session: blocks of each session in a filled index.
        queue_jobs: requests in the queue that is reported to kvd.
    """

    name: str
    arena_bytes: int
    arena_pairs: int
    ssd_pass_s: float
    ssd_max_bytes: int
    ssd_pairs: int
    session_counts: tuple[int, int, int]
    rounds: int
    calls_per_round: int
    restarts: int
    queue_jobs: int = 10_000
    blocks_per_session: int = BLOCKS_PER_SESSION
    layouts: tuple[KVLayout, ...] = DATA_LAYOUTS


FULL = Scale(
    name="full",
    arena_bytes=1024 * MIB,
    arena_pairs=11,
    ssd_pass_s=1.0,
    ssd_max_bytes=2048 * MIB,
    ssd_pairs=7,
    session_counts=(10, 10_000, 200_000),
    rounds=9,
    calls_per_round=200,
    restarts=3,
)
QUICK = Scale(
    name="quick",
    arena_bytes=256 * MIB,
    arena_pairs=5,
    ssd_pass_s=0.3,
    ssd_max_bytes=256 * MIB,
    ssd_pairs=3,
    session_counts=(10, 1_000, 20_000),
    rounds=3,
    calls_per_round=100,
    restarts=1,
)


def fitted(scale: Scale, memory_bytes: int, disk_bytes: int) -> Scale:
    """Reduce a scale to a quarter of a small machine's memory, or less, and to its disk."""
    return replace(
        scale,
        arena_bytes=min(scale.arena_bytes, max(MIN_PASS_BYTES, memory_bytes // 8)),
        ssd_max_bytes=min(
            scale.ssd_max_bytes, max(MIN_PASS_BYTES, min(memory_bytes // 6, disk_bytes // 16))
        ),
    )


def resized(scale: Scale, num_sessions: int | None, num_blocks: int | None) -> Scale:
    """Set the number of sessions and their blocks in the fullest index; None: as in the scale."""
    small, middle, largest = scale.session_counts
    largest = num_sessions or largest
    return replace(
        scale,
        session_counts=(small, min(middle, largest), largest),
        blocks_per_session=num_blocks or scale.blocks_per_session,
    )


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of one run.

    Attributes:
        directory: on the file system to measure; a new directory in it is used, and removed.
        parts: the parts to measure.
        scale: how much is measured.
        copy_threads: number of threads that copy into and out of the arena.
        io_threads: kvd's ssd.io_threads, and the floor's.
        command: the command line.
        on_progress: called with the name of the next measurement.
    """

    directory: Path
    parts: tuple[Part, ...] = PARTS
    scale: Scale = FULL
    copy_threads: int = 2
    io_threads: int = 4
    command: tuple[str, ...] = ()
    on_progress: Callable[[str], None] = ignore_progress
