"""Keeps KV behind the edits of a conversation, as `reuse.edits` says: before its turn is queued.

    for each kept run:  what precedes its seam is computed, and stored; then the store gives it the
                        run's KV, of the session that the conversation resembles (a graft)
    then                the turn itself, which loads all of that

So a turn with kept runs is several requests, one after the other, of the ordinary kind. Whatever
goes wrong on the way is computed by the last one: a turn never fails for it. That the result is not
what recomputation gives is the operator's choice (docs/quality.md).

Invariant: the lineage of the turn's request is that of what the store was heard to have given.
"""

import time
from collections.abc import Awaitable, Callable, Iterator

from inference_svc.core.answers import SamplingParams
from inference_svc.core.context import Context
from inference_svc.core.edits import EditPolicy, KeptRun, runs_to_keep
from inference_svc.core.turn_record import Graft
from inference_svc.runtime.compute.sampling import Sampled, Sampler
from inference_svc.runtime.engine.engine_request import EngineRequest, as_token_bytes
from inference_svc.runtime.store.session_store import SessionStore
from inference_svc.runtime.turns.misses import find_resembled
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turn import Turn
from inference_svc.runtime.turns.turn_prompt import Prompt
from inference_svc.runtime.worker_thread import WorkerThread
from shared.process.log import get_logger
from shared.types.errors import ReportedError
from shared.types.graft_source import GraftSource
from shared.types.lineage import WHOLE
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

NO_ANSWER = SamplingParams(max_tokens=1, ignore_eos=True)

log = get_logger(__name__)


class _Nobody:
    """Takes the token that ends a request whose prompt alone matters."""

    def on_start(self, request: EngineRequest) -> None:
        """See TurnSink."""

    def on_token(self, token: Sampled) -> bool:
        """See TurnSink."""
        del token
        return True

    def on_window_full(self) -> None:
        """See TurnSink."""


class EditKeeper:
    """See the module docstring.

    Args:
        graft: has a request's tokens computed and another session's KV follow: `EngineLoop.graft`.
        store: says whether it offers grafts now.
        transcripts: of all sessions.
        text_thread: where contexts are compared.
        numbers: of requests.
        pays: whether tokens [start, end) of a context are better loaded than computed.
        least_tokens: kept runs are at least so long.

    Attributes:
        policy: what is kept.
    """

    def __init__(
        self,
        graft: Callable[[EngineRequest, GraftSource], Awaitable[int]],
        store: SessionStore,
        transcripts: TranscriptStore,
        text_thread: WorkerThread,
        numbers: Iterator[int],
        pays: Callable[[int, int], bool],
        *,
        policy: EditPolicy,
        least_tokens: int,
    ) -> None:
        self.policy = policy
        self._graft_tokens = graft
        self._store = store
        self._transcripts = transcripts
        self._thread = text_thread
        self._numbers = numbers
        self._pays = pays
        self._least_tokens = least_tokens

    async def keep(self, turn: Turn, prompt: Prompt, request: EngineRequest) -> None:
        """Keep what may be of the context that a turn's request continues, and note it there.

        Args:
            turn: that is about to be computed.
            prompt: of the turn.
            request: the turn's, not queued yet.
        """
        try:
            await self._keep(turn, prompt, request)
        except Exception as error:  # whatever it is, the turn computes what was not kept
            if isinstance(error, ReportedError):
                log.info("edit_not_kept", session=str(request.key), error=error.reason)
            else:
                log.exception("edit_not_kept", session=str(request.key))

    async def _keep(self, turn: Turn, prompt: Prompt, request: EngineRequest) -> None:
        """Do what `keep` says.

        Raises:
            Exception: it ends there; what was noted until then holds.
        """
        old = await self._edited(turn, prompt)
        if old is None:
            return
        source_key, source = old
        runs = await self._thread.run(
            runs_to_keep,
            source,
            prompt.context,
            prompt.window.frame_tokens,
            self.policy,
            self._least_tokens,
        )
        for run in runs:
            if not self._pays(run.start, run.end):
                continue
            began_ns = time.monotonic_ns()
            try:
                await self._graft(turn, request, run, source_key, source)
            finally:
                request.ahead_s += (time.monotonic_ns() - began_ns) / NS_PER_S

    async def _edited(self, turn: Turn, prompt: Prompt) -> tuple[SessionKey, Context] | None:
        """Return the context that a conversation has edited; None: there is nothing to keep of."""
        submission = turn.submission
        resembled, key = submission.resembles, submission.key
        if not self.policy.keeps or resembled is None or prompt.ranges:
            return None
        if not self._store.offers_grafts:
            return None
        other = await find_resembled(self._transcripts, key, resembled)
        if other is None or resembled.session_id == key.session_id:
            return None
        return key._replace(session_id=resembled.session_id), other.context

    async def _graft(
        self,
        turn: Turn,
        request: EngineRequest,
        run: KeptRun,
        source_key: SessionKey,
        source: Context,
    ) -> None:
        """Compute what precedes a seam, and have the run follow it.

        Raises:
            ReportedError: it could not be computed.
        """
        seam, lineage = run.start, request.lineage or WHOLE
        token_ids = request.token_ids[:seam]
        given = GraftSource(
            source_key,
            as_token_bytes(source.computed_ids),
            source.lineage,
            run.source_start,
            run.source_end,
        )
        leading = self._leading(turn, request, seam)
        num_tokens = await self._graft_tokens(leading, given)
        request.ahead_tokens += seam - leading.outcome.tokens
        if not num_tokens:
            return
        lineage = given.lineage_after(as_token_bytes(token_ids), lineage)
        request.lineage = lineage
        request.history_tokens = max(request.history_tokens, seam + num_tokens)
        request.grafts.append(
            Graft(
                seam,
                num_tokens,
                source_key.session_id,
                run.source_start,
                run.healed_tokens,
                lineage,
            )
        )

    def _leading(self, turn: Turn, request: EngineRequest, seam: int) -> EngineRequest:
        """Make the request of the tokens before a seam."""
        return EngineRequest(
            number=next(self._numbers),
            key=request.key,
            token_ids=list(request.token_ids[:seam]),
            max_tokens=1,
            arrived_ns=request.arrived_ns,
            window_tokens=request.window_tokens,
            history_tokens=min(seam - 1, request.history_tokens),
            priority=request.priority,
            deadline_ns=turn.deadline_ns,
            lineage=request.lineage,
            sampler=Sampler(NO_ANSWER, frozenset()),
            sink=_Nobody(),
            input_tokens=seam,
        )
