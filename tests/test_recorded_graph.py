"""The stand-in for graphs repeats what a device would, and refuses what a device would."""

import pytest
import torch

from tests.recorded_graph import CaptureError, RecordedGraphs


class Step:
    """Writes twice the value in `given` to `answer`, in a way that a test chooses."""

    def __init__(self, compute):
        self.given, self.answer = torch.ones(4), torch.zeros(4)
        self._compute = compute

    def run(self):
        self.answer.copy_(self._compute(self.given))

    def answers(self, number):
        """Return the results of replays after other numbers were put in."""
        self.given.fill_(number)
        self.replay()
        return self.answer.tolist()


def capture(compute):
    step = Step(compute)
    with torch.inference_mode():
        step.given, step.answer = torch.ones(4), torch.zeros(4)
        step.replay = RecordedGraphs()(step.run)
    return step


@torch.inference_mode()
def test_a_replay_computes_with_the_tensors_present_contents():
    """It does so through views, calls in place, and several results of one call."""

    def compute(given):
        made = torch.zeros(2, 2)
        made.view(4)[1:3].add_(given[1:3])
        made += torch.cat(given.split(1)).view(2, 2)
        return made.flatten() + torch.where(torch.tensor_split(given, 2)[0][0] > 0, given, 0.0)

    step = capture(compute)
    assert step.answers(3.0) == [6.0, 9.0, 9.0, 6.0]
    assert step.answers(-1.0) == [-1.0, -2.0, -2.0, -1.0]


@torch.inference_mode()
def test_numbers_that_python_computed_stay_as_captured():
    """A replay uses the captured step's numbers, not those of the next step."""
    factors = [2.0]
    step = capture(lambda given: given * factors[-1])
    factors.append(3.0)
    assert step.answers(5.0) == [10.0] * 4


@pytest.mark.parametrize(
    "compute",
    [
        lambda given: given * float(given[0]),
        lambda given: given if given[0] > 0 else -given,
        lambda given: given[given > 0],
        lambda given: given.cpu(),
        lambda given: given * torch.tensor([2.0, 2.0, 2.0, 2.0]),
    ],
    ids=["number", "branch", "mask", "copy to the host", "copy from the host"],
)
def test_waiting_for_the_device_is_refused(compute):
    """A device cannot be asked for contents while it captures."""
    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        capture(compute)


@torch.inference_mode()
def test_a_replay_over_freed_memory_is_refused():
    """A device would have reused freed memory; memory that another object keeps is read."""
    kept = [torch.full((4,), 2.0)]
    step = capture(lambda given: given * kept[0])
    assert step.answers(3.0) == [6.0] * 4
    kept[0].fill_(3.0)
    assert step.answers(3.0) == [9.0] * 4
    kept.clear()
    with pytest.raises(CaptureError, match="memory that is gone"):
        step.answers(3.0)


@torch.inference_mode()
def test_a_capture_computes_nothing():
    """Results exist only after a replay."""
    made = []

    def compute(given):
        made.append(given * 2)
        return made[-1]

    step = capture(compute)
    assert made[-1].isnan().all()
    step.answers(4.0)
    assert made[-1].tolist() == [8.0] * 4
