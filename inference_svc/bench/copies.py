"""Part `copies`: loads and saves, compared with plain copies over the same bus or memory.

    load, save     all layers of a history, between scattered slots and pages, as turns have them;
                   keys are embedded on the way
    load by torch  the same, where a kernel embeds keys: by torch instead (`model.rotation`)
    both           one of each at the same time
    … floor        as many bytes in one piece, between page-locked memory and the device

Slots are page-locked for the device before anything is measured (`docs/gpu.md`).
"""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from inference_svc.bench.bench_session import take_rounds
from inference_svc.bench.copied_slots import slots_for
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.options import CopiesOptions, RunOptions
from inference_svc.bench.workspace import Workspace
from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.runtime.calibration.rotation_choice import choose_rotation
from inference_svc.runtime.kv.arena_kv import ArenaKv, SlotTokens
from inference_svc.runtime.kv.copy_stream import CopyStream
from inference_svc.runtime.kv.page_pool import PagePool
from inference_svc.runtime.positions.rotation import BY_TORCH, LoadKernels
from inference_svc.runtime.transfer.layer_load import LayerLoader
from inference_svc.runtime.transfer.layer_store import store_blocks
from shared.types.units import ceil_div

METRIC = "gb_per_s"
WARM_UP = 2
PAGE_TOKENS = 16
LEAST_ALONE, LEAST_OF_BOTH = 0.9, 0.8


def window_tokens(options: CopiesOptions) -> int:
    """Return the length of the longest history, in tokens."""
    return max(options.histories)


async def measure_copies(
    options: CopiesOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Measure every length of history."""
    found = []
    for num_tokens in options.histories:
        async with slots_for(work, options.transport, num_tokens) as arena:
            found.append(await _Copies(work, arena, num_tokens).measure(options, run))
    return tuple(found)


class _Copies:
    """One history, in scattered slots and on pages, and plain memory of the same size."""

    def __init__(self, work: Workspace, arena: ArenaKv, num_tokens: int) -> None:
        self._arena = arena
        loaded, self._calibration = work.model.loaded, work.model.calibration
        layout, self._device = work.layout, loaded.device
        self._num_tokens = num_tokens
        # Windows are stored apart, and have few tokens.
        self.num_bytes = num_tokens * sum(layer.token_bytes for layer in layout.token_layers)
        firsts = range(0, num_tokens, layout.block_tokens)
        slot_ids = random.Random(1).sample(range(arena.num_slots), len(firsts))  # noqa: S311  # where slots lie
        self._blocks = [
            SlotTokens(slot_id, first, min(layout.block_tokens, num_tokens - first))
            for slot_id, first in zip(slot_ids, firsts, strict=True)
        ]
        num_pages = ceil_div(num_tokens, PAGE_TOKENS)
        shapes = [layer.shape for layer in self._calibration.layers]
        pool = PagePool(
            shapes,
            PagedSlots(num_pages, PAGE_TOKENS),
            num_tokens,
            device=self._device,
            dtype=loaded.dtype,
        )
        pool.prefault()
        self._kv = pool.new_kv(num_tokens, range(num_pages))
        self._buffer = pool.new_write_buffer(0, num_tokens)
        self._buffer.end_token = num_tokens
        self._kernels = choose_rotation("auto", loaded, self._calibration)
        self._threads = ThreadPoolExecutor(2, "copy")  # kept: torch prepares each for itself
        self._plain = [(_locked(self.num_bytes, self._device), self._on_device()) for _ in range(2)]

    async def measure(self, options: CopiesOptions, run: RunOptions) -> Case:
        """Measure all rounds, and compare the ways."""
        facts = {"history_tokens": self._num_tokens, "bytes": self.num_bytes}
        found = Interleaved(f"{self._num_tokens} tokens", facts)
        ways: dict[str, Sequence[Callable[[], None]]] = {
            "load": (partial(self._load, self._kernels),),
            "save": (self._save,),
            "both": (partial(self._load, self._kernels), self._save),
            "load floor": (self._load_floor,),
            "save floor": (self._save_floor,),
            "both floor": (self._load_floor, self._save_floor),
        }
        if self._kernels != BY_TORCH:
            ways["load by torch"] = (partial(self._load, BY_TORCH),)

        async def take(name: str) -> dict[str, float]:
            began_s = time.process_time()
            seconds = _seconds(ways[name], self._threads)
            gigabytes = len(ways[name]) * self.num_bytes / 1e9
            used_s = time.process_time() - began_s
            return {METRIC: gigabytes / seconds, "cpu_s_per_gb": used_s / gigabytes}

        await take_rounds(
            found,
            lambda _: list(ways),
            range(-WARM_UP, options.pairs),
            take,
            lambda what: run.on_progress(f"copies of {self._num_tokens} tokens: {what}"),
        )
        # On a CPU the threads that copy also embed keys, so that there is no goal.
        alone, both = (LEAST_ALONE, LEAST_OF_BOTH) if self._device.type == "cuda" else (0.0, 0.0)
        found.compare(METRIC, "load", "load floor", at_least=alone)
        found.compare(METRIC, "load", "load by torch")
        found.compare(METRIC, "save", "save floor", at_least=alone)
        found.compare(METRIC, "both", "both floor", at_least=both)
        self._threads.shutdown()
        return found.case()

    def _on_device(self) -> Tensor:
        return torch.zeros(self.num_bytes, dtype=torch.uint8, device=self._device)

    def _load(self, kernels: LoadKernels) -> None:
        with CopyStream(self._device).copies(behind_computing=True):
            loader = LayerLoader(
                self._kv, self._arena, self._blocks, self._calibration, kernels=kernels
            )
            for layer_index in range(len(self._calibration.layers)):
                loader.load(layer_index)

    def _save(self) -> None:
        with CopyStream(self._device).copies(behind_computing=True):
            store_blocks(self._buffer, self._arena, self._blocks, self._calibration)

    def _load_floor(self) -> None:
        locked, there = self._plain[0]
        with CopyStream(self._device).copies(behind_computing=False):
            there.copy_(locked, non_blocking=True)

    def _save_floor(self) -> None:
        locked, there = self._plain[1]
        with CopyStream(self._device).copies(behind_computing=False):
            locked.copy_(there, non_blocking=True)


def _locked(num_bytes: int, device: torch.device) -> Tensor:
    """Return host memory with its pages present, page-locked if the device is a GPU."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _seconds(calls: Sequence[Callable[[], None]], threads: ThreadPoolExecutor) -> float:
    """Run calls, each on its own thread, and return the seconds until all are done."""
    began_s = time.perf_counter()
    for running in [threads.submit(call) for call in calls]:
        running.result()
    return time.perf_counter() - began_s
