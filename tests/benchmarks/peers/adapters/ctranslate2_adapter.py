"""Adapter of CTranslate2: it generates from whole prompts and keeps no KV between calls."""

import json
from pathlib import Path

import ctranslate2
from adapter import OnToken, serve


class CTranslate2:
    """See `adapter.Engine`."""

    def load(self, model: str, kv_tokens: int, turn_tokens: int, store: str, dtype: str) -> None:
        self._generator = ctranslate2.Generator(
            model, device="cpu", compute_type=dtype, inter_threads=1, intra_threads=1
        )
        self._words = json.loads((Path(model) / "vocabulary.json").read_text(encoding="utf-8"))

    def generate(
        self,
        names: list[str],
        prompts: list[list[int]],
        num_tokens: int,
        keep_tokens: int,
        on_token: OnToken,
    ) -> None:
        def on_step(step: ctranslate2.GenerationStepResult) -> bool:
            on_token(step.batch_id, step.token_id)
            return False

        self._generator.generate_batch(
            [[self._words[token_id] for token_id in prompt] for prompt in prompts],
            max_length=num_tokens,
            min_length=num_tokens,
            include_prompt_in_result=False,
            end_token=[],
            callback=on_step,
        )

    def settle(self) -> None:
        pass


serve(CTranslate2())
