"""A turn inside the engine: its request, its slab, and where its tokens go."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from inference_svc.core.request import Request
from inference_svc.runtime.kv_slab import KVSlab
from inference_svc.runtime.sampling import Sampled, Sampler
from inference_svc.runtime.session_store import LoadOutcome
from shared.session_key import SessionKey


class TurnSink(Protocol):
    """Receives what the engine makes of a request; called on the event loop."""

    def started(self, request: Request, outcome: LoadOutcome) -> None:
        """History is loaded as far as it was stored."""

    def sampled(self, token: Sampled) -> bool:
        """Take the next token; return whether the answer ends with it."""


@dataclass(eq=False)
class EngineJob:
    """See the module docstring.

    Attributes:
        history_tokens: of the session, for the queue snapshot.
        is_final: the session ends with this turn.
        done: set when the answer is complete; its exception is why there is none.
        slab: from the start of loading until the job is released.
        is_kept: its KV is being saved; the save releases it.
    """

    request: Request
    key: SessionKey
    history_tokens: int
    is_final: bool
    sampler: Sampler
    sink: TurnSink
    done: asyncio.Future[None]
    slab: KVSlab | None = None
    outcome: LoadOutcome = field(default_factory=LoadOutcome)
    is_kept: bool = False

    def end(self, error: Exception | None = None) -> None:
        """Wake who waits for the answer, if somebody still does."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
