"""The engine's jobs, until their KV is given up, and how they end without an answer.

Invariants: 1. a job is here from its submission until it is kept or released, once; 2. memory that
a load uses is released by that load, when it ends.
"""

import time
from collections.abc import Callable, Iterator

from inference_svc.core.counters import Counters
from inference_svc.core.errors import DeadlineExceededError
from inference_svc.core.scheduling.request import Request, RequestState
from inference_svc.core.scheduling.scheduler import Scheduler
from inference_svc.runtime.engine.engine_job import EngineJob
from inference_svc.runtime.engine.job_memory import JobMemory


class Jobs:
    """See the module docstring.

    Args:
        is_loading: whether a load still uses a job's memory.
        changed: called when a job was forgotten.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        memory: JobMemory,
        counters: Counters,
        is_loading: Callable[[EngineJob], bool],
        changed: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._counters = counters
        self._is_loading = is_loading
        self._changed = changed
        self._jobs: dict[int, EngineJob] = {}  # by request number
        self._dropped: list[EngineJob] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[EngineJob]:
        return iter(self._jobs.values())

    def of(self, request: Request) -> EngineJob:
        """The job of a request."""
        return self._jobs[request.number]

    def add(self, job: EngineJob) -> None:
        """Look after a job that was submitted."""
        self._jobs[job.request.number] = job

    def forget(self, job: EngineJob) -> bool:
        """Forget a job that is over; False if it was before."""
        is_known = self._jobs.pop(job.request.number, None) is not None
        self._changed()
        return is_known

    def drop(self, job: EngineJob) -> bool:
        """Have a job given up between two steps; False if it is kept or released already."""
        if job.is_kept or job.request.number not in self._jobs:
            return False
        self._dropped.append(job)
        return True

    def settle_dropped(self) -> None:
        """No step is under way: stop what was dropped, and release it unless a load uses it."""
        dropped, self._dropped = self._dropped, []
        for job in dropped:
            if not job.request.is_over:
                self._scheduler.stop(job.request, RequestState.CANCELLED, time.monotonic_ns())
            self.give_up(job)

    def restart(self, job: EngineJob) -> None:
        """Its history did not arrive: what was computed over it is void, it is admitted anew."""
        job.num_failed_loads += 1
        self._memory.void(job)
        self._scheduler.restart(job.request, time.monotonic_ns())

    def expire(self, job: EngineJob) -> None:
        """Its deadline passed, which the scheduler has found."""
        self._counters.add("expired")
        job.end(
            DeadlineExceededError(
                "the turn's deadline passed before it was complete",
                "submit it again with more time, or when the service is less busy",
            )
        )
        self.give_up(job)

    def fail(self, job: EngineJob, error: Exception) -> None:
        """End a job with an error."""
        if not job.request.is_over:
            self._scheduler.stop(job.request, RequestState.FAILED, time.monotonic_ns())
        job.end(error)
        self.give_up(job)

    def give_up(self, job: EngineJob) -> None:
        """Release a job that has no answer, unless its load is under way, which does it then."""
        job.in_batch.set()  # a load that waits for it goes on
        if not self._is_loading(job) and self.forget(job):
            self._memory.give_up(job)
