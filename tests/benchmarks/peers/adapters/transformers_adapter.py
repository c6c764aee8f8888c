"""Adapter of Transformers: the stock model with sdpa, and a DynamicCache per session."""

import torch
from adapter import OnToken, Sessions, serve
from transformers import AutoModelForCausalLM, DynamicCache


class Transformers:
    """See `adapter.Engine`; a simple chat program over Transformers keeps such a cache."""

    def load(self, model: str, kv_tokens: int, turn_tokens: int, store: str, dtype: str) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self._sessions = Sessions(kv_tokens, lambda _name, _ids, _cache: None)

    @torch.inference_mode()
    def generate(
        self,
        names: list[str],
        prompts: list[list[int]],
        num_tokens: int,
        keep_tokens: int,
        on_token: OnToken,
    ) -> None:
        num_kv = sum(len(prompt) + num_tokens for prompt in prompts)
        cache, first = self._sessions.take(names[0], prompts[0], num_kv)
        if cache is None or len(prompts) > 1:
            cache, first = DynamicCache(), 0
        elif cache.get_seq_length() > first:
            cache.crop(first - cache.get_seq_length())
        last = torch.tensor([prompt[first:] for prompt in prompts])
        for _ in range(num_tokens):
            answer = self._model(
                input_ids=last, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            last = answer.logits[:, -1:].argmax(dim=2)
            for index, token_id in enumerate(last[:, 0].tolist()):
                on_token(index, token_id)
        if len(prompts) == 1 and keep_tokens:
            cache.crop(keep_tokens - cache.get_seq_length())
            self._sessions.keep(names[0], prompts[0][:keep_tokens], cache)

    def settle(self) -> None:
        pass


serve(Transformers())
