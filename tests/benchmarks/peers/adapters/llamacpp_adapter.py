"""Adapter of llama.cpp by llama-cpp-python's C bindings: one sequence per session.

A session without room, and every session when the engine settles, goes into a file
(`llama_state_seq_save_file`, as llama-server's slots do), if there is a store.
"""

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from adapter import OnToken, Sessions, serve

BATCH_TOKENS = 512


class LlamaCpp:
    """See `adapter.Engine`."""

    def load(self, model: str, kv_tokens: int, turn_tokens: int, store: str, dtype: str) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        params = llama_cpp.llama_context_default_params()
        # Each sequence has cells of its own: if they are shared, attention reads all of them.
        num_sequences = kv_tokens // turn_tokens
        params.n_ctx, params.n_seq_max, params.kv_unified = kv_tokens, num_sequences, False
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._store = Path(store) if store else None
        self._free = list(range(num_sequences))
        self._sessions = Sessions(kv_tokens, self._release)

    def generate(
        self,
        names: list[str],
        prompts: list[list[int]],
        num_tokens: int,
        keep_tokens: int,
        on_token: OnToken,
    ) -> None:
        num_kv = sum(len(prompt) + num_tokens for prompt in prompts)
        if len(prompts) == 1:
            sequence, first = self._taken(names[0], prompts[0], num_kv)
            sequences, firsts = [sequence], [first]
        else:
            self._sessions.take("", [], num_kv)
            sequences, firsts = [self._new_sequence() for _ in prompts], [0] * len(prompts)
        last = []
        for index, (prompt, sequence, first) in enumerate(
            zip(prompts, sequences, firsts, strict=True)
        ):
            for begin in range(first, len(prompt), BATCH_TOKENS):
                piece = prompt[begin : begin + BATCH_TOKENS]
                self._decode([(token, begin + at, sequence) for at, token in enumerate(piece)])
            last.append(self._chosen(-1))
            on_token(index, last[-1])
        for number in range(num_tokens - 1):
            self._decode(
                [
                    (token, len(prompt) + number, sequence)
                    for token, prompt, sequence in zip(last, prompts, sequences, strict=True)
                ],
                all_logits=True,
            )
            for index in range(len(prompts)):
                last[index] = self._chosen(index)
                on_token(index, last[index])
        if len(prompts) == 1 and keep_tokens:
            llama_cpp.llama_memory_seq_rm(self._memory, sequences[0], keep_tokens, -1)
            self._sessions.keep(names[0], prompts[0][:keep_tokens], sequences[0])
        else:
            for sequence in sequences:
                self._clear(sequence)

    def settle(self) -> None:
        for name, ids, sequence in self._sessions.all():
            self._save(name, ids, sequence)

    def _taken(self, name: str, prompt: list[int], num_kv: int) -> tuple[int, int]:
        """Return the session's sequence, restored if necessary, and its part of the prompt."""
        sequence, first = self._sessions.take(name, prompt, num_kv)
        if sequence is None:
            sequence = self._new_sequence()
            first = self._restore(name, sequence, prompt)
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, first, -1)
        return sequence, first

    def _new_sequence(self) -> int:
        if not self._free:
            self._sessions.release_oldest()
        return self._free.pop()

    def _release(self, name: str, ids: list[int], sequence: int) -> None:
        self._save(name, ids, sequence)
        self._clear(sequence)

    def _clear(self, sequence: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, 0, -1)
        self._free.append(sequence)

    def _save(self, name: str, ids: list[int], sequence: int) -> None:
        if self._store is not None:
            tokens = (llama_cpp.llama_token * len(ids))(*ids)
            llama_cpp.llama_state_seq_save_file(
                self._context, str(self._store / name).encode(), sequence, tokens, len(ids)
            )

    def _restore(self, name: str, sequence: int, prompt: list[int]) -> int:
        if self._store is None or not (self._store / name).exists():
            return 0
        tokens = (llama_cpp.llama_token * len(prompt))()
        number = ctypes.c_size_t(0)
        llama_cpp.llama_state_seq_load_file(
            self._context,
            str(self._store / name).encode(),
            sequence,
            tokens,
            len(prompt),
            ctypes.byref(number),
        )
        return min(number.value, len(prompt) - 1)

    def _decode(self, tokens: list[tuple[int, int, int]], all_logits: bool = False) -> None:
        """Compute tokens, given as (token, position, sequence)."""
        batch = self._batch
        for index, (token, position, sequence) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = all_logits or index == len(tokens) - 1
        batch.n_tokens = len(tokens)
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")

    def _chosen(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


serve(LlamaCpp())
