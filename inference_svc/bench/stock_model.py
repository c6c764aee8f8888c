"""The model as Transformers runs it, for comparison: with its own attention and cache."""

import copy
import time
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.packed_linear import PackedLinear

ATTENTION = "sdpa"


class _Clock(StoppingCriteria):
    """Records when each token is sampled; never stops the answer."""

    def __init__(self, device: torch.device) -> None:
        self.token_s: list[float] = []
        self._device = device

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_options: Any) -> torch.Tensor:
        """Record the time of a token, once the device has computed it; the answer continues."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.token_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class StockModel:
    """The model with its own attention and cache; it shares all weights except packed ones."""

    def __init__(self, loaded: LoadedModel) -> None:
        shared: dict[int, Any] = {id(weights): weights for weights in loaded.model.parameters()}
        shared |= {
            id(layer): layer.unpack()
            for layer in loaded.model.modules()
            if isinstance(layer, PackedLinear)
        }
        self._model = copy.deepcopy(loaded.model, shared)
        self._model.set_attn_implementation(ATTENTION)
        self._device = loaded.device

    def decode_s(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Generate from prompts of equal length; return the seconds from first to last token."""
        clock = _Clock(self._device)
        input_ids = torch.tensor(prompts, device=self._device)
        self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return clock.token_s[-1] - clock.token_s[0]

    @torch.inference_mode()
    def prefill_s(self, prompt: list[int]) -> float:
        """Compute a prompt; return the seconds until the logits of its last token are there."""
        began_s = time.perf_counter()
        input_ids = torch.tensor([prompt], device=self._device)
        self._model(input_ids=input_ids, use_cache=True, logits_to_keep=1).logits.float().cpu()
        return time.perf_counter() - began_s
