"""What one step computes: every answer under way, and prompt tokens up to a bound.

A long prompt is cut, so that it never holds up answers for longer than its share of a step takes.

*Source:* iteration-level scheduling: Orca (OSDI'22); prompt chunks beside decodes: Sarathi-Serve
(OSDI'24).
"""

from collections.abc import Sequence

from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.step_plan import PlannedChunk, SchedulerLimits


def prompt_budget(running: Sequence[Request], limits: SchedulerLimits) -> int:
    """Prompt tokens a step may compute."""
    is_mixed = any(request.is_decoding for request in running)
    return limits.mixed_step_tokens if is_mixed else limits.step_tokens


def plan_chunks(running: Sequence[Request], limits: SchedulerLimits) -> tuple[PlannedChunk, ...]:
    """Choose the chunks of a step; prompts are served in the order of `running`."""
    growing = [
        request for request in running if not (request.is_outgrown or request.is_overflowing)
    ]
    chunks = [PlannedChunk(r, 1, sample=True) for r in growing if r.is_decoding]
    left = prompt_budget(running, limits)
    for request in growing:
        if left and not request.is_decoding:
            num_tokens = min(left, request.uncomputed_tokens)
            sample = num_tokens == request.uncomputed_tokens
            chunks.append(PlannedChunk(request, num_tokens, sample))
            left -= num_tokens
    assert all(c.num_tokens <= c.request.unused_rows for c in chunks), "an answer is too long"
    return tuple(chunks)
