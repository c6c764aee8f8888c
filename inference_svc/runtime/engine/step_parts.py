"""What a step is given of each job, and what its load and its save have to do with the step.

Invariant: rows computed over history that is still being loaded are not saved before that load is
confirmed.
"""

from collections.abc import Sequence

from inference_svc.core.scheduling.step_plan import PlannedChunk
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.engine.engine_job import EngineJob
from inference_svc.runtime.engine.stepping import StepInput
from inference_svc.runtime.kv.copy_stream import StepClock


def step_input(job: EngineJob, chunk: PlannedChunk) -> StepInput:
    """A planned chunk as the runner takes it; its job is in the batch from now on."""
    request = chunk.request
    assert job.kv is not None, "a running request has a sequence's KV"  # noqa: S101
    job.in_batch.set()
    if job.gate is not None:
        job.gate.on_change = None  # who is in the batch waits in the forward
    start = request.computed_tokens
    token_ids = request.token_ids[start : start + chunk.num_tokens]
    return StepInput(
        job, Chunk(job.kv, token_ids, chunk.sample, job.write_buffer, scores=job.scores)
    )


def follow_step(inputs: Sequence[StepInput], num_layers: int) -> StepClock | None:
    """Have saves follow a step layer by layer, where history is certain; None: nobody does."""
    clock = None
    for part in inputs:
        job, kv = part.job, part.chunk.kv
        end_token = kv.num_tokens + len(part.chunk.token_ids)
        if job.saves is not None and kv.gate is None and job.saves.wants(end_token):
            clock = clock or StepClock(num_layers, kv.device)
            job.saves.follow(job.token_bytes(end_token), clock)
    return clock


def settle_load(job: EngineJob) -> None:
    """After the first step over a load: its gate has done its duty, and saving may begin."""
    kv = job.kv
    if kv is None or kv.gate is None or not kv.gate.is_settled:
        return
    job.outcome.stall_s += kv.gate.waited_s
    if kv.gate.error is not None:
        return
    kv.gate = None
    if job.saves is not None and job.saves.wants(kv.num_tokens):
        job.saves.follow(job.token_bytes(kv.num_tokens), None)
