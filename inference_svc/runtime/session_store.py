"""Loads a session's KV into a slab and saves it back, through kvd; any failure is a miss.

Owns the talk with kvd about one slab at a time. Invariants:
    1. `load` and `save` never raise: the turn is recomputed, or not saved, and that is counted;
    2. after a load the slab holds only rows whose lease kvd confirmed after they were copied;
    3. every lease that was granted is completed, however the copy ends.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from inference_svc.core.counters import Counters
from inference_svc.runtime.calibration import Calibration
from inference_svc.runtime.kv_slab import KVSlab
from inference_svc.runtime.layer_load import load_spans, no_wait
from inference_svc.runtime.layer_store import store_blocks
from inference_svc.runtime.worker_thread import WorkerThread
from shared.errors import ReportedError
from shared.grants import LoadGrant, Lookup, QueuedJob, StoreGrant
from shared.kvd_client import KvdClient
from shared.log import get_logger
from shared.progress_words import LoadFailedError, LoadProgress
from shared.session_key import SessionKey

StoreState = Literal["attached", "detached", "off"]

log = get_logger(__name__)


@dataclass(frozen=True)
class LoadOutcome:
    """What was loaded.

    Attributes:
        tokens: rows of the slab that hold loaded KV.
        tier_tokens: of them, by the tier where kvd had them.
        reason: slug, why it is not more; "" if all that was asked for is there.
    """

    tokens: int = 0
    tier_tokens: Mapping[str, int] = field(default_factory=dict)
    load_s: float = 0.0
    reason: str = ""


class SessionStore(Protocol):
    """What the engine loop needs of a store."""

    @property
    def state(self) -> StoreState:
        """For people."""

    @property
    def saves(self) -> bool:
        """Whether slabs must keep position-free keys."""

    async def load(self, slab: KVSlab, key: SessionKey, token_ids: Sequence[int]) -> LoadOutcome:
        """Fill an empty slab with stored KV of token_ids; the last token is never loaded."""

    async def save(self, slab: KVSlab, key: SessionKey, token_ids: Sequence[int]) -> None:
        """Store the slab's KV of token_ids."""

    async def end_session(self, key: SessionKey) -> None:
        """Say that the session will not come back."""

    async def forget(self, key: SessionKey, token_ids: Sequence[int]) -> None:
        """Drop the KV of a deleted session that was these tokens."""

    def push_queue(self, jobs: Sequence[QueuedJob]) -> None:
        """Say which sessions wait, in order."""


class NoSessionStore:
    """The store of `--mode recompute`: nothing is kept."""

    state: StoreState = "off"
    saves = False

    async def load(self, slab: KVSlab, key: SessionKey, token_ids: Sequence[int]) -> LoadOutcome:
        """Load nothing."""
        del slab, key, token_ids
        return LoadOutcome(reason="mode_recompute")

    async def save(self, slab: KVSlab, key: SessionKey, token_ids: Sequence[int]) -> None:
        """Keep nothing."""

    async def end_session(self, key: SessionKey) -> None:
        """Nobody to tell."""

    async def forget(self, key: SessionKey, token_ids: Sequence[int]) -> None:
        """Nothing to drop."""

    def push_queue(self, jobs: Sequence[QueuedJob]) -> None:
        """Nobody to tell."""


class KvdSessionStore:
    """The store behind kvd.

    Args:
        loads: False for `--load-policy never`.
        deadline_s: how long one load, or one save, may wait for kvd.
    """

    saves = True

    def __init__(
        self,
        client: KvdClient,
        calibration: Calibration,
        copy_thread: WorkerThread,
        counters: Counters,
        *,
        loads: bool,
        deadline_s: float,
    ) -> None:
        self._client = client
        self._calibration = calibration
        self._copy_thread = copy_thread
        self._counters = counters
        self._loads = loads
        self._deadline_s = deadline_s
        self._last_problem = ""

    @property
    def state(self) -> StoreState:
        """Whether kvd is there."""
        return "attached" if self._client.attached else "detached"

    async def load(self, slab: KVSlab, key: SessionKey, token_ids: Sequence[int]) -> LoadOutcome:
        """See SessionStore. Rows loaded before a failure are given up too: the failure is rare."""
        if not self._loads:
            return LoadOutcome(reason="load_policy_never")
        started_s = time.monotonic()
        tiers: Counter[str] = Counter()
        try:
            reason = await self._load_all(slab, key, token_ids[:-1], tiers)
        except Exception as error:  # noqa: BLE001  # whatever it is, the turn can be recomputed
            slab.reset()
            tiers.clear()
            reason = self._note_problem("load", error)
        else:
            self._note_success()
        self._counters.add("load_hits" if slab.num_tokens else "load_misses")
        load_s = time.monotonic() - started_s
        return LoadOutcome(slab.num_tokens, dict(tiers), load_s, reason)

    async def save(self, slab: KVSlab, key: SessionKey, token_ids: Sequence[int]) -> None:
        """See SessionStore."""
        try:
            refused_reason = await self._save_all(slab, key, token_ids)
        except Exception as error:  # noqa: BLE001  # whatever it is, the turn has been answered
            self._counters.add("save_errors")
            self._note_problem("save", error)
            return
        self._note_success()
        self._counters.add("saves_refused" if refused_reason else "saves")

    async def end_session(self, key: SessionKey) -> None:
        """See SessionStore. A hint: if it is lost, the session goes by its age."""
        try:
            await self._client.end_session(key)
        except ReportedError as error:
            self._note_problem("end_session", error)

    async def forget(self, key: SessionKey, token_ids: Sequence[int]) -> None:
        """See SessionStore. Without kvd the KV stays there until its TTL ends it."""
        if not token_ids:
            return
        try:
            await self._client.discard(key, _as_bytes(token_ids), [(0, len(token_ids))])
        except ReportedError as error:
            self._note_problem("forget", error)

    def push_queue(self, jobs: Sequence[QueuedJob]) -> None:
        """See SessionStore."""
        self._client.push_queue(jobs)

    async def _load_all(
        self, slab: KVSlab, key: SessionKey, token_ids: Sequence[int], tiers: Counter[str]
    ) -> str:
        """Load as much as there is; return why it is not all.

        kvd is asked for what it is still reading, too. Once such a load has failed, the rest is
        asked for again without that: kvd then grants only what it could read.
        """
        wanted = _as_bytes(token_ids)
        deadline_s = time.monotonic() + self._deadline_s
        accept_pending = True
        while slab.num_tokens < len(token_ids):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return "deadline"
            grant = await self._client.prepare_load(
                key, wanted, slab.num_tokens, left_s, accept_pending=accept_pending
            )
            if grant.lookup is Lookup.MISS:
                return "partial" if slab.num_tokens else grant.miss_reason
            if not await self._load_grant(slab, grant, deadline_s):
                accept_pending = False
                continue
            for span in grant.spans:
                tiers[span.tier] += span.num_tokens
            if not grant.more:
                break
        return "" if slab.num_tokens == len(token_ids) else "partial"

    async def _load_grant(self, slab: KVSlab, grant: LoadGrant, deadline_s: float) -> bool:
        """Copy a grant; False if kvd could not read all of it: the slab is as it was before."""
        try:
            if grant.progress is None:
                wait_layer: Callable[[int], None] = no_wait
            else:
                wait_layer = _waits(grant.progress, deadline_s)
                # Not on the copy thread, where others would queue behind a slow disk.
                await asyncio.to_thread(wait_layer, 0)
            await self._copy_thread.run(
                load_spans, slab, grant.arena, grant.spans, self._calibration, wait_layer
            )
        except LoadFailedError as error:
            if grant.progress is None:
                raise
            log.info("load_failed_under_way", error=str(error))
            self._counters.add("loads_retried")
            with suppress(ReportedError):  # the lease may have ended with the load
                await self._client.complete_load(grant)
            return False
        except BaseException:
            await self._client.complete_load(grant)
            raise
        await self._client.complete_load(grant)
        return True

    async def _save_all(self, slab: KVSlab, key: SessionKey, token_ids: Sequence[int]) -> str:
        """Store as much as there is room for; return why it is not all."""
        tokens = _as_bytes(token_ids)
        deadline_s = time.monotonic() + self._deadline_s
        from_token = slab.save_from
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            grant = await self._client.prepare_store(key, tokens, from_token, left_s)
            await self._save_grant(slab, grant)
            if grant.refused_reason or not grant.more or grant.end_token <= from_token:
                return grant.refused_reason
            from_token = grant.end_token

    async def _save_grant(self, slab: KVSlab, grant: StoreGrant) -> None:
        is_copied = False
        try:
            await self._copy_thread.run(
                store_blocks, slab, grant.arena, grant.blocks, self._calibration
            )
            is_copied = True
        finally:
            await self._client.complete_store(grant, success=is_copied)

    def _note_problem(self, what: str, error: Exception) -> str:
        """Count and log a failure, the log once until something works again; return its slug."""
        if what == "load":
            self._counters.add("load_errors")
        slug = error.reason if isinstance(error, ReportedError) else "copy_failed"
        if slug != self._last_problem:
            # An error that is not of kvd's making is ours: it needs its traceback.
            trace = None if isinstance(error, ReportedError) else error
            log.warning("session_store_failed", what=what, reason=slug, exc_info=trace)
        self._last_problem = slug
        return slug

    def _note_success(self) -> None:
        if self._last_problem:
            log.info("session_store_works_again", after=self._last_problem)
        self._last_problem = ""


def _waits(progress: LoadProgress, deadline_s: float) -> Callable[[int], None]:
    """Wait for a layer until the deadline, in the thread that will copy it."""

    def wait_layer(layer_index: int) -> None:
        progress.wait_layer(layer_index, max(0.0, deadline_s - time.monotonic()))

    return wait_layer


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    """Little-endian uint32, as kvd takes them."""
    return np.asarray(token_ids, dtype="<u4").tobytes()
