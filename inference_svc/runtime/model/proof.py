"""Proof that a calibrated model computes what the stock model does, on every path of a turn."""

from dataclasses import dataclass

import torch
from torch import Tensor

from inference_svc.runtime.compute.model_runner import Chunk, ModelRunner
from inference_svc.runtime.kv.arena_rows import ArenaRows
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.kv_slab import KVSlab, WriteBuffer
from inference_svc.runtime.kv.layer_load import LayerLoader
from inference_svc.runtime.kv.layer_store import store_blocks
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.recipes import Calibration
from inference_svc.runtime.model.refusals import CalibrationMismatchError

PROOF_TOKENS = 48
# Largest relative distance (Frobenius norm) of our logits to the stock model's. Keys one position
# off give 0.2 in a trained model, 0.03 in a small random one; rounding gives 1e-6, 1e-3 and 1e-2.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class _Range:
    """A block and a span at once: the first rows of a slot, at the same positions."""

    slot_id: int
    token_offset: int
    num_tokens: int
    start: int = 0


class _PlainArena:
    """An arena in ordinary memory."""

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.memory = memoryview(bytearray(slot_bytes * num_slots))


def proof_tokens(loaded: LoadedModel) -> list[int]:
    """Return token ids that repeat only after the vocabulary is through."""
    num_tokens = min(PROOF_TOKENS, loaded.context_window - 1)
    return [(37 * i + 11) % loaded.vocab_size for i in range(num_tokens)]


@torch.inference_mode()
def stock_logits(loaded: LoadedModel) -> Tensor:
    """Run the stock model with its own eager attention; returns [PROOF_TOKENS, vocab] float32."""
    loaded.model.set_attn_implementation("eager")
    token_ids = torch.tensor([proof_tokens(loaded)], device=loaded.device)
    logits: Tensor = loaded.model(input_ids=token_ids, use_cache=False).logits[0]
    return logits.float().cpu()


def prove(loaded: LoadedModel, calibration: Calibration, reference: Tensor) -> None:
    """Compare with `reference`, which `stock_logits` returned.

    Raises:
        CalibrationMismatchError: naming the path that went wrong and by how much.
    """
    runner = ModelRunner(loaded, calibration)
    for path, positions, logits in _paths(runner, loaded, calibration):
        expected = reference[positions]
        distance = float((logits - expected).norm() / expected.norm())
        if not distance <= TOLERANCE[loaded.dtype]:  # written so that NaN is refused too
            raise CalibrationMismatchError(
                f"{path} of {loaded.architecture} is {distance:.1e} off the stock model's logits",
                "serve another model, and report this one",
            )


def _paths(
    runner: ModelRunner, loaded: LoadedModel, calibration: Calibration
) -> list[tuple[str, list[int], Tensor]]:
    """Return (path, positions of its logits, logits) of each way to compute."""
    token_ids = proof_tokens(loaded)
    total = len(token_ids)
    stored = total - 3
    shapes = [layer.shape for layer in calibration.layers]
    pool = KVPool(shapes, 4 * total, device=loaded.device, dtype=loaded.dtype)
    long, short, again = (pool.new_slab(total) for _ in range(3))
    buffer = pool.new_write_buffer(0, total)

    def chunk(slab: KVSlab, end: int, buffer: WriteBuffer | None = None) -> Chunk:
        return Chunk(slab, token_ids[slab.num_tokens : end], want_logits=True, write_buffer=buffer)

    answers = [
        ("prefill", [9, 4], runner.step([chunk(long, 10, buffer), chunk(short, 5)])),
        (
            "chunked prefill",
            [stored - 1, 5],
            runner.step([chunk(long, stored, buffer), chunk(short, 6)]),
        ),
    ]
    _store_and_load(calibration, buffer, again)
    answers.append(
        (
            "decode",
            [stored, stored, 6],
            runner.step([chunk(long, stored + 1), chunk(again, stored + 1), chunk(short, 7)]),
        )
    )
    answers.append(("prefill after load", [total - 1], runner.step([chunk(again, total)])))
    return answers


def _store_and_load(calibration: Calibration, buffer: WriteBuffer, slab: KVSlab) -> None:
    """Store what the buffer holds, in as many blocks as it takes, and load it into the slab."""
    block_tokens = calibration.layout.block_tokens
    firsts = range(0, buffer.end_token, block_tokens)
    blocks = [
        _Range(slot_id, first, min(block_tokens, buffer.end_token - first))
        for slot_id, first in zip(reversed(range(len(firsts))), firsts, strict=True)
    ]
    rows = ArenaRows(_PlainArena(calibration.layout.block_bytes, len(blocks)), calibration.layout)
    store_blocks(buffer, rows, blocks, calibration)
    loader = LayerLoader(slab, rows, blocks, calibration)
    for layer_index in range(len(calibration.layers)):
        loader.load(layer_index)
    slab.num_tokens = buffer.end_token
