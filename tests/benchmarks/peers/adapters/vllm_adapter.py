"""Adapter of vLLM's build for CPUs: its engine with prefix caching, step by step."""

import os

from adapter import OnToken, kv_token_bytes, serve

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
from vllm import LLM, SamplingParams  # reads the environment


class Vllm:
    """See `adapter.Engine`."""

    def load(self, model: str, kv_tokens: int, turn_tokens: int, store: str, dtype: str) -> None:
        llm = LLM(
            model,
            dtype=dtype,
            max_model_len=turn_tokens,
            enforce_eager=True,  # compiling takes a minute at every start, and gains 5 %
            kv_cache_memory_bytes=kv_tokens * kv_token_bytes(model),
            max_num_seqs=8,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
        )
        self._engine = llm.llm_engine
        self._number = 0

    def generate(
        self,
        names: list[str],
        prompts: list[list[int]],
        num_tokens: int,
        keep_tokens: int,
        on_token: OnToken,
    ) -> None:
        sampling = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        seen: dict[int, int] = {}
        base = self._number
        for prompt in prompts:
            self._engine.add_request(str(self._number), {"prompt_token_ids": prompt}, sampling)
            self._number += 1
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                index, ids = int(output.request_id) - base, output.outputs[0].token_ids
                for token_id in ids[seen.get(index, 0) :]:
                    on_token(index, token_id)
                seen[index] = len(ids)

    def settle(self) -> None:
        pass


serve(Vllm())
