"""Embeds texts beside the turns: in the same batches, under the same limits of tenants.

An input is computed like a prompt; where an answer would begin, its tokens' hidden states have been
pooled. It belongs to no session: nothing is stored of it, and kvd does not know of it. A prefix
that is in the engine's memory is shared if only the last token is pooled.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inference_svc.core.counters import Counters
from inference_svc.core.errors import (
    EmbeddingsUnsupportedError,
    EmptyTurnError,
    InputTooLongError,
    InvalidTurnError,
)
from inference_svc.core.submission import TextInput, TokenInput
from inference_svc.core.tenant_limits import TenantLimits
from inference_svc.runtime.compute.pooler import Pooler
from inference_svc.runtime.compute.sampling import Sampled
from inference_svc.runtime.engine.engine_request import Engine, EngineRequest
from inference_svc.runtime.model.pooling import Pooling, PoolingMode
from inference_svc.runtime.turns.turn_prompt import PromptMaker
from shared.types.session_key import SessionKey

MOST_AT_ONCE = 16  # inputs of one caller that are in the engine at a time


@dataclass(frozen=True)
class Embedding:
    """The embedding of one input.

    Attributes:
        values: [dimensions], float32.
        num_tokens: number of the input's tokens.
    """

    values: npt.NDArray[np.float32]
    num_tokens: int


class _Sink:
    """The sink of a request that is pooled: its answer ends where it would begin."""

    def on_start(self, request: EngineRequest) -> None:
        """See TurnSink."""

    def on_token(self, _token: Sampled) -> bool:
        """See TurnSink."""
        return True

    def on_window_full(self) -> None:
        """See TurnSink."""


class Embedder:
    """Embeds texts and token ids with the model.

    Args:
        engine: computes the inputs.
        prompts: encodes texts.
        check_limits: raises if a tenant's work may not begin now.
        limits: the tenants' limits; a call counts as a turn.
        counters: the service's counters.
        numbers: numbers of engine requests, shared with the turns'.
        window_tokens: most tokens of an input.
        size: number of values of the last layer's hidden states.
        pooling: how hidden states are pooled; None: the model makes no embeddings.
        problem: why the model makes none.

    Attributes:
        idle: set while nothing is being embedded.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: PromptMaker,
        check_limits: Callable[[str], None],
        limits: TenantLimits,
        counters: Counters,
        numbers: Iterator[int],
        window_tokens: int,
        size: int,
        pooling: Pooling | None,
        problem: str,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._check_limits = check_limits
        self._limits = limits
        self._counters = counters
        self._numbers = numbers
        self._window_tokens = window_tokens
        self._size = size
        self._pooling = pooling
        self._problem = problem
        self._num_callers = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def size(self) -> int:
        """Number of values of an embedding; 0: the model makes none."""
        return 0 if self._pooling is None else self._size

    async def embed(
        self,
        tenant: str,
        model: str,
        inputs: Sequence[TextInput | TokenInput],
        dimensions: int | None = None,
    ) -> list[Embedding]:
        """Embed inputs, all or none.

        Args:
            tenant: the tenant that asks for it.
            model: the model's fingerprint.
            inputs: the inputs, at least one.
            dimensions: number of leading values to return of each embedding; None: all.

        Returns:
            An embedding for each input, in order.

        Raises:
            EmbeddingsUnsupportedError: the model makes no embeddings.
            EmptyTurnError: an input has no token.
            InputTooLongError: an input is longer than the window.
            InvalidTurnError: the embeddings have fewer values than `dimensions`.
            ReportedError: an input cannot be encoded or computed, or a limit is reached.
        """
        pooling = self._pooling
        if pooling is None:
            raise EmbeddingsUnsupportedError(
                f"this model makes no embeddings: {self._problem}",
                "use a service whose model does, or set model.pooling",
            )
        if dimensions is not None and dimensions > self._size:
            raise InvalidTurnError(
                f"an embedding has {self._size} values, not {dimensions}",
                "send a smaller number of dimensions",
            )
        self._check_limits(tenant)
        encoded = [
            await self._encode(item, index, pooling.prompt) for index, item in enumerate(inputs)
        ]
        num_tokens = sum(map(len, encoded))
        reservation = self._limits.enter(tenant, num_tokens, "", time.monotonic_ns())
        self._num_callers += 1
        self.idle.clear()
        try:
            found = await self._embed_all(SessionKey(tenant, model, ""), encoded, pooling)
        except BaseException:
            num_tokens = 0
            raise
        finally:
            self._limits.leave(reservation, num_tokens, time.monotonic_ns())
            self._num_callers -= 1
            if not self._num_callers:
                self.idle.set()
        self._counters.add("embeddings", len(found))
        self._counters.add("embedded_tokens", num_tokens)
        is_normalized = pooling.is_normalized
        return [_cut(each, dimensions, is_normalized=is_normalized) for each in found]

    async def _encode(self, item: TextInput | TokenInput, index: int, prompt: str) -> list[int]:
        """Return an input's tokens; a text is encoded behind the model's prompt for embeddings."""
        if isinstance(item, TextInput):
            item = TextInput(prompt + item.text)
            await self._prompts.check_length(item)
        token_ids = await self._prompts.encode_embedded(item)
        if not token_ids:
            raise EmptyTurnError(f"input {index} has no token", "leave it out")
        if len(token_ids) > self._window_tokens:
            raise InputTooLongError(
                f"input {index} has {len(token_ids)} tokens, but at most {self._window_tokens} "
                "are possible",
                "send it in parts",
            )
        return token_ids

    async def _embed_all(
        self, key: SessionKey, encoded: Sequence[list[int]], pooling: Pooling
    ) -> list[Embedding]:
        """Embed all inputs, MOST_AT_ONCE at a time; cancel the others if one fails."""
        places = asyncio.Semaphore(MOST_AT_ONCE)

        async def embed(token_ids: list[int]) -> Embedding:
            async with places:
                return await self._embed(key, token_ids, pooling)

        tasks = [asyncio.create_task(embed(token_ids)) for token_ids in encoded]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _embed(self, key: SessionKey, token_ids: list[int], pooling: Pooling) -> Embedding:
        """Compute one input in the engine, and return its pooled embedding."""
        number, pooler = next(self._numbers), Pooler(pooling, len(token_ids))
        request = EngineRequest(
            number=number,
            # A client's session id cannot contain a blank: this one cannot be a client's.
            key=key._replace(session_id=f"embedding {number}"),
            token_ids=list(token_ids),
            max_tokens=1,
            arrived_ns=time.monotonic_ns(),
            window_tokens=self._window_tokens,
            may_share=pooling.mode is PoolingMode.LAST,
            is_stored=False,
            sink=_Sink(),
            pooler=pooler,
        )
        try:
            await self._engine.generate(request)
            return Embedding(pooler.vector().numpy(), len(token_ids))
        finally:
            self._engine.drop(request)


def _cut(embedding: Embedding, dimensions: int | None, *, is_normalized: bool) -> Embedding:
    """Keep the first values only, scaled to length 1 again if embeddings are normalized."""
    values = embedding.values[:dimensions]
    length = float(np.linalg.norm(values)) if is_normalized else 1.0
    return Embedding(values / np.float32(length or 1.0), embedding.num_tokens)
