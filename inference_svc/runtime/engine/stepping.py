"""Steps: compute a planned step on the compute thread, one forward pass, and sample next tokens.

If the pass raises, its requests are computed one by one, so that only the one at fault fails. A
result computed over a history that is still being loaded counts only once that load is confirmed.

Invariant: KV computed over a history that is still being loaded is not saved before that load is
confirmed.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from inference_svc.core.counters import Counters
from inference_svc.core.errors import EngineFailedError
from inference_svc.core.rates.rates import Rates, pairs
from inference_svc.core.scheduling.step_plan import PlannedChunk
from inference_svc.core.turn_histograms import TurnHistograms
from inference_svc.runtime.compute.chunk import Chunk, retract
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.compute.sampling import Sampled
from inference_svc.runtime.engine.engine_request import EngineRequest
from inference_svc.runtime.kv.layer_gate import StepClock, StepNotDoneError
from inference_svc.runtime.worker_thread import WorkerThread
from shared.process.log import get_logger
from shared.types.errors import LoadFailedError, ReportedError

log = get_logger(__name__)

POOLED = Sampled(0, None, ())  # ends a pooled request in place of an answer's token; never read


@dataclass(frozen=True)
class StepInput:
    """One request's part of a step.

    Attributes:
        request: the request.
        chunk: the tokens to compute, and the memory of their KV.
        draft: the last tokens of the chunk, which are a draft and may be wrong.
        window_from: first token that layers with a window have to hold from now on.
    """

    request: EngineRequest
    chunk: Chunk
    draft: Sequence[int] = ()
    window_from: int = 0


@dataclass(frozen=True)
class StepOutput:
    """The result of one request's part: the tokens that were sampled, or an error.

    A LoadFailedError means that its history did not arrive: the request is restarted.

    Attributes:
        tokens: one if the part was to be sampled, and one more for each drafted token that was
            right.
        error: why the part was not computed; None: it was.
    """

    tokens: Sequence[Sampled] = ()
    error: Exception | None = None


class Stepper:
    """Runs steps, one at a time.

    Attributes:
        busy_s: seconds spent computing so far.
    """

    def __init__(
        self,
        runner: ModelRunner,
        compute_thread: WorkerThread,
        counters: Counters,
        rates: Rates,
        histograms: TurnHistograms,
    ) -> None:
        self.busy_s = 0.0
        self._runner = runner
        self._compute_thread = compute_thread
        self._counters = counters
        self._rates = rates
        self._histograms = histograms

    async def step(
        self, inputs: Sequence[StepInput], clock: StepClock | None = None
    ) -> list[StepOutput]:
        """Compute a step; if it fails, compute its parts one by one.

        Args:
            inputs: the parts, of different requests.
            clock: opens with each layer whose KV is in the write buffers; fails if the pass does.
                None: no save follows this step.

        Returns:
            One output per part, in order. The KV of parts without an error has advanced, that of
            the others is unchanged.
        """
        self._counters.add("steps")
        try:
            computed = await self._compute_thread.run(self._compute, inputs, clock)
        except BaseException as error:
            if clock is not None:
                clock.fail(StepNotDoneError("the step failed"))
            if not isinstance(error, Exception):
                raise
            self._counters.add("steps_failed")
            if len(inputs) == 1:
                return [StepOutput(error=_as_reported(error))]
            if isinstance(error, LoadFailedError):  # no fault of the model; logged by the load
                log.info("step_without_history", num_requests=len(inputs), error=str(error))
            else:
                log.exception("step_failed", num_requests=len(inputs))
        else:
            num_tokens, num_pairs = _work_of(inputs, computed.starts)
            is_replayed = computed.is_replayed
            if is_replayed:  # its time says nothing about prompts, which are never replayed
                self._counters.add("steps_replayed")
            else:
                self._rates.steps.note(num_tokens, num_pairs, computed.seconds)
            if num_tokens == sum(part.chunk.num_logits for part in inputs):
                self._rates.decodes.note(num_tokens, computed.seconds, is_replayed=is_replayed)
            self._histograms.on_step(len(inputs), num_tokens, computed.seconds)
            self.busy_s += computed.seconds
            return computed.outputs
        return [output for single in inputs for output in await self.step([single])]

    def _compute(self, inputs: Sequence[StepInput], clock: StepClock | None) -> "_Computed":
        """Compute a step on the compute thread; does not raise once the pass has succeeded."""
        with ExitStack() as held:
            for part in inputs:
                held.enter_context(part.chunk.kv.hold())
                if part.chunk.write_buffer is not None:
                    held.enter_context(part.chunk.write_buffer.hold())
            starts = [part.chunk.kv.num_tokens for part in inputs]
            # A step that is repeated must find everything as it was: KV is appended once.
            assert starts == [part.request.computed_tokens for part in inputs]  # noqa: S101
            for part in inputs:
                part.chunk.kv.keep_from(part.window_from)
            gates = [gate for part in inputs if (gate := part.chunk.kv.gate) is not None]
            waited_s = sum(gate.waited_s for gate in gates)
            num_replayed = self._runner.num_replayed
            began_s = time.monotonic()
            for part in inputs:
                if part.chunk.want_logits and part.request.sampler is not None:
                    part.request.sampler.start()
            logits = self._runner.step([part.chunk for part in inputs], clock)
            stalled_s = sum(gate.waited_s for gate in gates) - waited_s
            computed_s = time.monotonic() - began_s - stalled_s
            if clock is not None:
                clock.confirm()
            rows = logits.split_with_sizes([part.chunk.num_logits for part in inputs])
            outputs = [_answer(*part) for part in zip(inputs, rows, strict=True)]
            is_replayed = self._runner.num_replayed > num_replayed
            return _Computed(outputs, starts, computed_s, is_replayed)


@dataclass(frozen=True)
class _Computed:
    """A step that succeeded.

    Attributes:
        starts: number of tokens that each part's KV had before.
        seconds: time spent computing, not waiting for layers.
        is_replayed: whether it was replayed from a graph.
    """

    outputs: list[StepOutput]
    starts: Sequence[int]
    seconds: float
    is_replayed: bool


def _work_of(inputs: Sequence[StepInput], starts: Sequence[int]) -> tuple[int, int]:
    """Count the tokens of a step, and the (query, key) pairs that it attends to."""
    sizes = [len(part.chunk.token_ids) for part in inputs]
    num_pairs = sum(pairs(start, start + size) for start, size in zip(starts, sizes, strict=True))
    return sum(sizes), num_pairs


def _answer(part: StepInput, logits: Tensor) -> StepOutput:
    """Sample a part's tokens, if it has logits and its history is confirmed.

    Args:
        part: the request's part of the step.
        logits: [n, vocab] float32, after its last n tokens; n = 0: no token is to be sampled.
    """
    try:
        gate = part.chunk.kv.gate
        if gate is not None:
            gate.wait_confirmed()
        if part.chunk.scores is not None:
            part.chunk.scores.commit()
        if part.chunk.pooler is not None:
            part.chunk.pooler.commit()
            return StepOutput((POOLED,) if part.chunk.pooler.is_complete else ())
        if not len(logits):
            return StepOutput()
        tokens = _sample(part, logits)
    except Exception as error:  # noqa: BLE001  # one request's error must not fail the others
        return StepOutput(error=_as_reported(error))
    retract(part.chunk, len(part.draft) + 1 - len(tokens))
    return StepOutput(tokens)


def _sample(part: StepInput, logits: Tensor) -> list[Sampled]:
    """Sample the next token, and one more behind each drafted token that was right.

    A draw depends on the logits, the tokens before it and the number of the draw. So a draft, right
    or wrong, changes when a token is sampled, never which.
    """
    sampler = part.request.sampler
    assert sampler is not None, "who is not pooled has an answer"  # noqa: S101
    prior_ids = part.request.token_ids
    tokens = [sampler.sample(logits[0], prior_ids)]
    if part.draft and tokens[0].token_id == part.draft[0]:
        prior_ids = prior_ids.copy()
    for drafted, row in zip(part.draft, logits[1:], strict=True):
        if tokens[-1].token_id != drafted:
            break
        prior_ids.append(drafted)
        tokens.append(sampler.sample(row, prior_ids))
    return tokens


def _as_reported(error: Exception) -> Exception:
    """Return the error that the turn's client gets; an unexpected one is logged."""
    if isinstance(error, ReportedError):
        return error
    log.error("turn_not_computed", exc_info=error)
    return EngineFailedError(
        f"the model failed to compute this turn ({type(error).__name__})",
        "submit it again; the session is unchanged",
    )


def step_input(request: EngineRequest, chunk: PlannedChunk) -> StepInput:
    """Make the input of a planned chunk; its request is in the batch from now on."""
    assert request.kv is not None, "a running request has a sequence's KV"  # noqa: S101
    request.in_batch.set()
    if request.kv.gate is not None:
        # The event loop need not be woken by layers any more: the forward waits for them itself.
        request.kv.gate.on_change = None
    start = request.computed_tokens
    token_ids = [*request.token_ids[start : start + chunk.num_tokens], *chunk.draft]
    return StepInput(
        request,
        Chunk(
            request.kv,
            token_ids,
            chunk.sample and request.pooler is None,
            request.write_buffer,
            scores=request.scores,
            want_all=bool(chunk.draft),
            pooler=request.pooler,
        ),
        chunk.draft,
        request.window_from,
    )


def follow_step(
    inputs: Sequence[StepInput], num_layers: int, *, is_tight: bool
) -> StepClock | None:
    """Let saves follow a step layer by layer, where no load and no draft is uncertain.

    Args:
        inputs: the parts of the step.
        num_layers: number of the model's layers.
        is_tight: whether there is little room for more tokens in the write ring.

    Returns:
        The clock that the step has to drive; None: no save follows it.
    """
    clock = None
    for part in inputs:
        request, kv = part.request, part.chunk.kv
        end_token = kv.num_tokens + len(part.chunk.token_ids)
        if request.saves is None or kv.gate is not None or part.draft:
            continue
        if request.saves.should_follow(end_token, is_tight=is_tight):
            clock = clock or StepClock(num_layers, kv.device)
            request.saves.follow(request.token_bytes(end_token), clock)
    return clock


def settle_load(request: EngineRequest) -> None:
    """Remove the gate after the first step over a load, and save what was computed over it."""
    kv = request.kv
    if kv is None or kv.gate is None or not kv.gate.is_settled:
        return
    request.outcome.stall_s += kv.gate.waited_s
    if kv.gate.error is not None:
        return
    kv.gate = None
    save_computed(request)


def save_computed(request: EngineRequest) -> None:
    """Save blocks that were held back until a load or a draft behind them was confirmed."""
    if request.saves is not None and request.saves.should_follow(request.computed_tokens):
        request.saves.follow(request.token_bytes(request.computed_tokens), None)
