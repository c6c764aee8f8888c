"""Pooling proof: checks that a model's embeddings equal those of its stock forward."""

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

FIRST_CHUNK = 10  # tokens of the first step; the second one computes the remaining tokens


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
    for part in (token_ids[:FIRST_CHUNK], token_ids[FIRST_CHUNK:]):
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
