"""Computes a planned step on the compute thread: one forward pass, then the next tokens.

If the pass raises, its requests are computed one by one, so that only the one at fault fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from inference_svc.core.counters import Counters
from inference_svc.core.errors import EngineFailedError
from inference_svc.runtime.engine_job import EngineJob
from inference_svc.runtime.model_runner import Chunk, ModelRunner
from inference_svc.runtime.sampling import Sampled
from inference_svc.runtime.worker_thread import WorkerThread
from shared.errors import ReportedError
from shared.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class StepInput:
    """One job's part of a step."""

    job: EngineJob
    chunk: Chunk


@dataclass(frozen=True)
class StepOutput:
    """What became of one job's part: a token if one was wanted, or an error."""

    token: Sampled | None = None
    error: Exception | None = None


class Stepper:
    """Runs steps, one at a time."""

    def __init__(
        self, runner: ModelRunner, compute_thread: WorkerThread, counters: Counters
    ) -> None:
        self._runner = runner
        self._compute_thread = compute_thread
        self._counters = counters

    async def step(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        """Compute; slabs of parts without error have advanced, the others are as they were."""
        self._counters.add("steps")
        try:
            return await self._compute_thread.run(self._compute, inputs)
        except Exception as error:
            self._counters.add("steps_failed")
            log.exception("step_failed", num_requests=len(inputs))
            if len(inputs) == 1:
                return [StepOutput(error=_as_reported(error))]
        return [output for single in inputs for output in await self.step([single])]

    def _compute(self, inputs: Sequence[StepInput]) -> list[StepOutput]:
        logits = self._runner.step([part.chunk for part in inputs])  # [chunks that want, vocab]
        rows = iter(logits)
        return [
            _sample(part.job, next(rows)) if part.chunk.want_logits else StepOutput()
            for part in inputs
        ]


def _sample(job: EngineJob, logits_row: Tensor) -> StepOutput:
    try:
        return StepOutput(token=job.sampler.sample(logits_row, job.request.token_ids))
    except Exception as error:  # noqa: BLE001  # one request's logits must not fail the others
        return StepOutput(error=_as_reported(error))


def _as_reported(error: Exception) -> Exception:
    if isinstance(error, ReportedError):
        return error
    return EngineFailedError(
        f"the model failed to compute this turn ({type(error).__name__})",
        "submit it again; the session is as it was",
    )
