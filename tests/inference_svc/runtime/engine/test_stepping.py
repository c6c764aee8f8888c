"""A step of several requests: its counts, its time, and the gates it waits for."""

import pytest

from inference_svc.core.answers import SamplingParams
from inference_svc.core.counters import Counters
from inference_svc.core.rates.rates import Rates, pairs
from inference_svc.core.turn_histograms import TurnHistograms
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.decode_graphs import StepShape
from inference_svc.runtime.compute.sampling import Sampler
from inference_svc.runtime.engine.engine_request import EngineRequest
from inference_svc.runtime.engine.stepping import StepInput, Stepper, settle_load
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.worker_thread import WorkerThread
from shared.types.errors import LoadFailedError
from shared.types.session_key import SessionKey
from tests.paged_steps import PagedSteps
from tests.recorded_graph import RecordedGraphs

SAMPLING = SamplingParams(max_tokens=4)
WAITED_S = 1e6


class SlowGate(LayerGate):
    """A gate that opens after a million seconds."""

    def wait(self, layer_index, timeout_s=0.0):
        super().wait(layer_index, 0.0)
        self._waited_s += WAITED_S


class NotedRates(Rates):
    """Records the noted steps."""

    def __init__(self):
        super().__init__()
        self.noted = []
        self.steps.note = lambda *step: self.noted.append(step)


@pytest.fixture
def stepper(tiny):
    """Make a stepper of a model with two layers."""
    thread = WorkerThread("compute")
    yield Stepper(tiny("llama").runner, thread, Counters(), NotedRates(), TurnHistograms())
    thread.close()


class NotedSampler(Sampler):
    """Records how many tokens were computed when it starts, and when it samples."""

    def __init__(self):
        super().__init__(SAMPLING)
        self.kv, self.started, self.sampled = None, [], []

    def start(self):
        self.started.append(self.kv.num_tokens)
        super().start()

    def sample(self, logits_row, prior_token_ids):
        self.sampled.append(self.kv.num_tokens)
        return super().sample(logits_row, prior_token_ids)


def make_request(tiny, number, token_ids):
    """Make a request with memory, with all tokens computed but those."""
    key = SessionKey("default", "m", str(number))
    request = EngineRequest(number, key, token_ids, 4, 1, sampler=Sampler(SAMPLING), sink=None)
    request.kv = tiny("llama").new_kv(32)
    return request


def part_of(request, num_tokens):
    """Make the chunk of its next tokens; the last one is sampled afterwards."""
    start = request.computed_tokens
    chunk = Chunk(request.kv, request.token_ids[start : start + num_tokens], want_logits=True)
    return StepInput(request, chunk)


async def test_a_step_counts_its_work(tiny, stepper):
    """Turns, tokens, and attended pairs: each token with those before it and itself."""
    one, other = (make_request(tiny, number, list(range(5, 25))) for number in (1, 2))
    await stepper.step([part_of(one, 3)])
    one.computed_tokens = 3
    outputs = await stepper.step([part_of(one, 4), part_of(other, 6)])
    assert [output.error for output in outputs] == [None, None]
    noted = stepper._rates.noted
    assert [step[:2] for step in noted] == [(3, pairs(0, 3)), (10, pairs(3, 7) + pairs(0, 6))]
    assert stepper.busy_s == noted[0][2] + noted[1][2]
    histograms = stepper._histograms
    assert (histograms.step_turns.total.total, histograms.step_tokens.total.total) == (3, 13)
    assert stepper._counters.snapshot()["steps"] == 2
    assert stepper._counters.snapshot()["steps_failed"] == 0


async def test_sampling_is_started_before_the_pass(tiny, stepper):
    """Again if a step is repeated; not where no token is sampled."""
    one, other, third = (make_request(tiny, number, list(range(5, 25))) for number in (1, 2, 3))
    for request in (one, other, third):
        request.sampler = NotedSampler()
        request.sampler.kv = request.kv
    third.kv.gate = failed = LayerGate(2)
    failed.fail(LoadFailedError("it broke off", "compute"))
    unsampled = StepInput(other, Chunk(other.kv, other.token_ids[:3], want_logits=False))
    outputs = await stepper.step([part_of(one, 4), unsampled, part_of(third, 2)])
    assert [len(output.tokens) for output in outputs] == [1, 0, 0]
    assert isinstance(outputs[2].error, LoadFailedError)
    assert (one.sampler.started, one.sampler.sampled) == ([0, 0], [4])
    assert (other.sampler.started, other.sampler.sampled) == ([], [])
    assert (third.sampler.started, third.sampler.sampled) == ([0, 0], [])


async def test_a_replayed_step_says_nothing_about_prompts(tiny):
    """It is counted as busy time; but its time is not that of computing."""
    model, thread = tiny("llama"), WorkerThread("compute")
    steps = PagedSteps(model.loaded, model.calibration)
    runner = steps.replaying(RecordedGraphs(), [StepShape(1, 64)])
    stepper = Stepper(runner, thread, Counters(), NotedRates(), TurnHistograms())
    request = make_request(tiny, 1, list(range(5, 25)))
    request.kv, _ = steps.sequence([5, 6, 7], 32, is_stored=False)
    for size in (4, 1, 1):
        request.computed_tokens = request.kv.num_tokens
        (output,) = await stepper.step([part_of(request, size)])
        assert output.error is None
    thread.close()
    assert [step[:2] for step in stepper._rates.noted] == [(4, pairs(3, 7))]
    assert stepper.busy_s > stepper._rates.noted[0][2]
    assert stepper._histograms.step_tokens.total.total == 6
    counts = stepper._counters.snapshot()
    assert (counts["steps"], counts["steps_replayed"]) == (3, 2)


async def test_waiting_for_history_does_not_count_as_computing(tiny, stepper):
    """The step's time is without it; earlier waits do not belong to the step."""
    request = make_request(tiny, 1, list(range(5, 25)))
    request.kv.gate = gate = SlowGate(2)
    gate._waited_s = 7 * WAITED_S
    gate.open(2)
    gate.confirm()
    await stepper.step([part_of(request, 3)])
    ((_, _, seconds),) = stepper._rates.noted
    assert gate.waited_s == 9 * WAITED_S
    assert -2 * WAITED_S <= seconds < -WAITED_S


async def test_a_wait_belongs_to_its_turn(tiny):
    """Once its history is known to have arrived; otherwise the step fails."""
    request = make_request(tiny, 1, list(range(5, 25)))
    settle_load(request)
    request.kv.gate = gate = SlowGate(2)
    gate._waited_s = 3.0
    request.outcome.stall_s = 1.0
    settle_load(request)
    assert (request.outcome.stall_s, request.kv.gate) == (1.0, gate)
    gate.open(2)
    gate.confirm()
    settle_load(request)
    assert (request.outcome.stall_s, request.kv.gate) == (4.0, None)
    request.kv.gate = failed = LayerGate(2)
    failed.fail(LoadFailedError("it broke off", "compute"))
    settle_load(request)
    assert request.kv.gate is failed
