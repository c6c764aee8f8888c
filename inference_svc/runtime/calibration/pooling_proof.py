"""Proof that a model's embeddings are what its stock forward makes of the same tokens."""

import torch
from torch import Tensor

from inference_svc.runtime.calibration.proof import new_pool
from inference_svc.runtime.calibration.stock import is_same, proof_tokens, stock_attention
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.compute.pooler import Pooler
from inference_svc.runtime.model.capture import tap_head
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.pooling import Pooling, UnknownPoolingError
from inference_svc.runtime.positions.recipes import Calibration

FIRST_CHUNK = 10  # tokens; the rest is another step


def prove_pooling(loaded: LoadedModel, calibration: Calibration, pooling: Pooling) -> None:
    """Tap the head of a calibrated model, and compare what is pooled with the stock model's.

    Args:
        loaded: the model, set to the attention of the calibration's mode.
        calibration: the model's.
        pooling: how its embeddings are made.

    Raises:
        UnknownPoolingError: they would be others.
    """
    if not tap_head(loaded.model):
        raise UnknownPoolingError("the states behind its last layer cannot be had")
    try:
        found, expected = _pooled(loaded, calibration, pooling), _stock_pooled(loaded, pooling)
    except Exception as error:
        raise UnknownPoolingError(f"it cannot be pooled ({type(error).__name__})") from error
    if not is_same(found[None], expected[None], loaded.dtype, calibration.rounding):
        raise UnknownPoolingError("what its head gets is not what its last layer gives")


def _pooled(loaded: LoadedModel, calibration: Calibration, pooling: Pooling) -> Tensor:
    """Pool the proof's tokens in two steps, [hidden]."""
    token_ids, runner = proof_tokens(loaded), ModelRunner(loaded, calibration)
    pool = new_pool(loaded, calibration, len(token_ids))
    kv, pooler = pool.new_kv(len(token_ids)), Pooler(pooling, len(token_ids))
    for part in (token_ids[:FIRST_CHUNK], token_ids[FIRST_CHUNK:]):
        runner.step([Chunk(kv, part, want_logits=False, pooler=pooler)])
        pooler.commit()
    return pooler.vector()


@torch.inference_mode()
def _stock_pooled(loaded: LoadedModel, pooling: Pooling) -> Tensor:
    """Pool what the stock model's last layer gives for them, [hidden]."""
    token_ids = proof_tokens(loaded)
    with stock_attention(loaded.model):
        given = torch.tensor([token_ids], device=loaded.device)
        answer = loaded.model.base_model(input_ids=given, use_cache=False)
    pooler, states = Pooler(pooling, len(token_ids)), answer.last_hidden_state[0]
    pooler.note(states[len(token_ids) - pooler.num_rows(0, len(token_ids)) :], len(token_ids))
    pooler.commit()
    return pooler.vector()
