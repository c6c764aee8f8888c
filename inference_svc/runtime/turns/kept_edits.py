"""Keeps KV behind the edits of a conversation, as `reuse.edits` says, before its turn is queued.

    for each kept run:  the tokens before its seam are computed and stored; then the store grafts
                        the run's KV, of the session that the conversation resembles, behind them
    then                the turn itself, which loads all of that

So a turn with kept runs is several ordinary requests, one after the other. If one of them fails,
the last one computes what is missing: a turn never fails for its kept runs. The result differs from
that of recomputation, which is the operator's choice (docs/quality.md).

Invariant: the lineage of the turn's request is that of the grafts which the store has confirmed.
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


class _NullSink:
    """The sink of a request that is computed for its prompt's KV only."""

    def on_start(self, request: EngineRequest) -> None:
        """See TurnSink."""

    def on_token(self, token: Sampled) -> bool:
        """See TurnSink."""
        del token
        return True

    def on_window_full(self) -> None:
        """See TurnSink."""


class EditKeeper:
    """Keeps KV behind edits: computes seams and has the store graft kept runs.

    Args:
        graft: computes a request's tokens and grafts another session's KV: `EngineLoop.graft`.
        store: the store, asked whether it can graft.
        transcripts: the transcripts of all sessions.
        text_thread: the thread on which contexts are compared.
        numbers: numbers of engine requests, ascending.
        pays: whether loading tokens [start, end) of a context pays against computing them.
        least_tokens: least tokens of a kept run.

    Attributes:
        policy: which runs are kept; a reload sets it.
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
        """Graft the runs that may be kept, and note them in the turn's request. Does not raise.

        Args:
            turn: the turn, about to be computed.
            prompt: the turn's prompt.
            request: the turn's request, not queued yet.
        """
        try:
            await self._keep(turn, prompt, request)
        except Exception as error:  # after any failure the turn computes what was not kept
            if isinstance(error, ReportedError):
                log.info("edit_not_kept", session=str(request.key), error=error.reason)
            else:
                log.exception("edit_not_kept", session=str(request.key))

    async def _keep(self, turn: Turn, prompt: Prompt, request: EngineRequest) -> None:
        """Graft as `keep` does.

        Raises:
            Exception: a graft failed; those before it stay valid.
        """
        edited = await self._find_edited(turn, prompt)
        if edited is None:
            return
        source_key, source = edited
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

    async def _find_edited(self, turn: Turn, prompt: Prompt) -> tuple[SessionKey, Context] | None:
        """Return the session that a conversation has edited, and its context; None: none."""
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
        """Compute the tokens before a seam, and graft the run behind them.

        Args:
            turn: the turn.
            request: the turn's request; the graft is noted there.
            run: the kept run.
            source_key: the session that has the run's KV.
            source: that session's context.

        Raises:
            ReportedError: the tokens could not be computed.
        """
        seam, lineage = run.start, request.lineage or WHOLE
        token_ids = request.token_ids[:seam]
        graft_source = GraftSource(
            source_key,
            as_token_bytes(source.computed_ids),
            source.lineage,
            run.source_start,
            run.source_end,
        )
        leading = self._make_leading_request(turn, request, seam)
        num_tokens = await self._graft_tokens(leading, graft_source)
        request.ahead_tokens += seam - leading.outcome.tokens
        if not num_tokens:
            return
        lineage = graft_source.lineage_after(as_token_bytes(token_ids), lineage)
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

    def _make_leading_request(self, turn: Turn, request: EngineRequest, seam: int) -> EngineRequest:
        """Make the request that computes the tokens before a seam."""
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
            sink=_NullSink(),
            input_tokens=seam,
        )
