"""Proof that a calibrated model computes what the stock model does, on every path of a turn."""

from dataclasses import dataclass

import torch
from torch import Tensor

from inference_svc.runtime.kv_slab import KVSlab
from inference_svc.runtime.layer_load import load_spans
from inference_svc.runtime.layer_store import store_blocks
from inference_svc.runtime.model_loader import LoadedModel
from inference_svc.runtime.model_runner import Chunk, ModelRunner
from inference_svc.runtime.recipes import Calibration
from inference_svc.runtime.refusals import CalibrationMismatchError

PROOF_TOKENS = 48
# Largest relative distance (Frobenius norm) of our logits to the stock model's. Keys one position
# off give 0.2 in a trained model, 0.03 in a small random one; rounding gives 1e-6, 1e-3 and 1e-2.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class _Range:
    """A block and a span at once: rows of the one slot, at the same positions."""

    num_tokens: int
    slot_id: int = 0
    start: int = 0
    token_offset: int = 0


class _OneSlot:
    """An arena of one slot, in ordinary memory."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot = memoryview(bytearray(slot_bytes))

    def slot(self, _slot_id: int) -> memoryview:
        return self._slot


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
    for path, positions, logits in _paths(
        ModelRunner(loaded, calibration), calibration, proof_tokens(loaded)
    ):
        expected = reference[positions]
        distance = float((logits - expected).norm() / expected.norm())
        if not distance <= TOLERANCE[loaded.dtype]:  # written so that NaN is refused too
            raise CalibrationMismatchError(
                f"{path} of {loaded.architecture} is {distance:.1e} off the stock model's logits",
                "serve another model, and report this one",
            )


def _paths(
    runner: ModelRunner, calibration: Calibration, token_ids: list[int]
) -> list[tuple[str, list[int], Tensor]]:
    """Return (path, positions of its logits, logits) of each way to compute."""
    total = len(token_ids)
    stored = total - 3
    long, short, loaded = (runner.new_slab(total, save=True) for _ in range(3))

    def chunk(slab: KVSlab, end: int) -> Chunk:
        return Chunk(slab, token_ids[slab.num_tokens : end], want_logits=True)

    answers = [
        ("prefill", [9, 4], runner.step([chunk(long, 10), chunk(short, 5)])),
        ("chunked prefill", [stored - 1, 5], runner.step([chunk(long, stored), chunk(short, 6)])),
    ]
    one_block = _Range(num_tokens=stored)
    slot = _OneSlot(calibration.layout.block_bytes)
    store_blocks(long, slot, [one_block], calibration)
    load_spans(loaded, slot, [one_block], calibration)
    answers.append(
        (
            "decode",
            [stored, stored, 6],
            runner.step([chunk(long, stored + 1), chunk(loaded, stored + 1), chunk(short, 7)]),
        )
    )
    answers.append(("prefill after load", [total - 1], runner.step([chunk(loaded, total)])))
    return answers
