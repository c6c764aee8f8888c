"""Loads before a job runs and saves after it: slabs come from here and go away here.

A session's load waits for the save of its previous turn, so that it finds what that turn computed.
"""

import asyncio
from collections.abc import Sequence

from inference_svc.runtime.engine_job import EngineJob
from inference_svc.runtime.model_runner import ModelRunner
from inference_svc.runtime.session_store import SessionStore
from inference_svc.runtime.worker_thread import WorkerThread
from shared.session_key import SessionKey


class Transfers:
    """See the module docstring."""

    def __init__(self, runner: ModelRunner, store: SessionStore, copy_thread: WorkerThread) -> None:
        self._runner = runner
        self._store = store
        self._copy_thread = copy_thread
        self._saves: dict[SessionKey, asyncio.Event] = {}  # set when the save is over

    async def load(self, job: EngineJob) -> None:
        """Give the job a slab with as much of its history as is stored.

        Raises:
            Exception: whatever the allocation raises; kvd's failures only make it a miss.
        """
        await self._saved(job.key)
        slab = await self._copy_thread.run(
            self._runner.new_slab, job.request.capacity_tokens, save=self._store.saves
        )
        job.outcome = await self._store.load(slab, job.key, job.request.token_ids)
        job.slab = slab

    async def save(self, job: EngineJob, token_ids: Sequence[int]) -> None:
        """Store the job's KV; never raises because of kvd."""
        assert job.slab is not None, "a finished job has a slab"  # noqa: S101
        await self._store.save(job.slab, job.key, token_ids)
        if job.is_final:
            await self._store.end_session(job.key)

    async def forget(self, key: SessionKey, token_ids: Sequence[int]) -> None:
        """Have a deleted session's KV dropped, after the save of its last turn."""
        await self._saved(key)
        await self._store.forget(key, token_ids)

    def announce_save(self, key: SessionKey) -> asyncio.Event:
        """Let the session's next load wait until the returned event is set."""
        save = self._saves[key] = asyncio.Event()
        return save

    def finish_save(self, key: SessionKey, save: asyncio.Event) -> None:
        """Let waiting loads go on."""
        save.set()
        if self._saves.get(key) is save:
            del self._saves[key]

    async def _saved(self, key: SessionKey) -> None:
        """Wait for the session's save; the deadlines inside SessionStore.save bound it."""
        save = self._saves.get(key)
        if save is not None:
            await save.wait()
