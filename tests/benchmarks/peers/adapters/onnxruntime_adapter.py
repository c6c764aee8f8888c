"""Adapter of ONNX Runtime GenAI: one generator per session, rewound to the common prompt."""

import json

import numpy as np
import onnxruntime_genai
from adapter import OnToken, Sessions, serve

ONE_THREAD = {"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}


class OnnxRuntime:
    """See `adapter.Engine`."""

    def load(self, model: str, kv_tokens: int, turn_tokens: int, store: str, dtype: str) -> None:
        config = onnxruntime_genai.Config(model)
        config.overlay(json.dumps(ONE_THREAD))
        self._model = onnxruntime_genai.Model(config)
        self._turn_tokens = turn_tokens
        self._sessions = Sessions(kv_tokens, lambda _name, _ids, _generator: None)

    def generate(
        self,
        names: list[str],
        prompts: list[list[int]],
        num_tokens: int,
        keep_tokens: int,
        on_token: OnToken,
    ) -> None:
        num_kv = sum(len(prompt) + num_tokens for prompt in prompts)
        generator, first = self._sessions.take(names[0], prompts[0], num_kv)
        if generator is None or len(prompts) > 1:
            generator, first = self._new_generator(len(prompts)), 0
        elif generator.token_count() > first:
            generator.rewind_to(first)
        generator.append_tokens(np.array([prompt[first:] for prompt in prompts], dtype=np.int32))
        for _ in range(num_tokens):
            generator.generate_next_token()
            for index, token_id in enumerate(generator.get_next_tokens()):
                on_token(index, token_id)
        if len(prompts) == 1 and keep_tokens:
            self._sessions.keep(names[0], prompts[0][:keep_tokens], generator)

    def settle(self) -> None:
        pass

    def _new_generator(self, batch: int) -> onnxruntime_genai.Generator:
        most = self._turn_tokens  # which every generator reserves
        params = onnxruntime_genai.GeneratorParams(self._model)
        params.set_search_options(
            max_length=most, min_length=most, batch_size=batch, do_sample=False
        )
        return onnxruntime_genai.Generator(self._model, params)


serve(OnnxRuntime())
