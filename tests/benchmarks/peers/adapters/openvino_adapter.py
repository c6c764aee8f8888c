"""Adapter of OpenVINO GenAI: its continuous batching with prefix caching, step by step."""

import numpy as np
import openvino
import openvino_genai
from adapter import OnToken, serve

BLOCK_TOKENS = 32  # of its KV cache, on CPUs


class OpenVino:
    """See `adapter.Engine`."""

    def load(self, model: str, kv_tokens: int, turn_tokens: int, store: str, dtype: str) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = kv_tokens // BLOCK_TOKENS
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model,
            scheduler,
            "CPU",
            {
                "INFERENCE_NUM_THREADS": 1,
                "INFERENCE_PRECISION_HINT": "f32",
                "KV_CACHE_PRECISION": "f32",
            },
        )
        self._number = 0

    def generate(
        self,
        names: list[str],
        prompts: list[list[int]],
        num_tokens: int,
        keep_tokens: int,
        on_token: OnToken,
    ) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
        handles = []
        for prompt in prompts:
            self._number += 1
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._number, ids, config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        for token_id in output.generated_ids:
                            on_token(index, token_id)

    def settle(self) -> None:
        pass


serve(OpenVino())
