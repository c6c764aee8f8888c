"""The stand-in for graphs repeats what a device would, and refuses what a device would."""

import pytest
import torch

from tests.recorded_graph import CaptureError, RecordedGraphs


class Step:
    """Doubles what `given` holds into `answer`, in a way that a test chooses."""

    def __init__(self, compute):
        self.given, self.answer = torch.ones(4), torch.zeros(4)
        self._compute = compute

    def run(self):
        self.answer.copy_(self._compute(self.given))

    def answers(self, number):
        """What a replay answers after another number was put in."""
        self.given.fill_(number)
        self.replay()
        return self.answer.tolist()


def captured(compute):
    step = Step(compute)
    with torch.inference_mode():
        step.given, step.answer = torch.ones(4), torch.zeros(4)
        step.replay = RecordedGraphs()(step.run)
    return step


@torch.inference_mode()
def test_what_tensors_hold_is_computed_again():
    """Through views, calls in place, and several answers of one call."""

    def compute(given):
        made = torch.zeros(2, 2)
        made.view(4)[1:3].add_(given[1:3])
        made += torch.cat(given.split(1)).view(2, 2)
        return made.flatten() + torch.where(torch.tensor_split(given, 2)[0][0] > 0, given, 0.0)

    step = captured(compute)
    assert step.answers(3.0) == [6.0, 9.0, 9.0, 6.0]
    assert step.answers(-1.0) == [-1.0, -2.0, -2.0, -1.0]


@torch.inference_mode()
def test_what_python_knows_is_what_it_knew():
    """Numbers of one step are not those of the next."""
    factors = [2.0]
    step = captured(lambda given: given * factors[-1])
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
    """A device that captures cannot be asked what it holds."""
    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        captured(compute)


@torch.inference_mode()
def test_memory_that_is_gone_is_found_out():
    """A device would have given it to others; what somebody keeps is read."""
    kept = [torch.full((4,), 2.0)]
    step = captured(lambda given: given * kept[0])
    assert step.answers(3.0) == [6.0] * 4
    kept[0].fill_(3.0)
    assert step.answers(3.0) == [9.0] * 4
    kept.clear()
    with pytest.raises(CaptureError, match="memory that is gone"):
        step.answers(3.0)


@torch.inference_mode()
def test_nothing_is_there_before_it_is_replayed():
    """What was recorded was not computed."""
    made = []

    def compute(given):
        made.append(given * 2)
        return made[-1]

    step = captured(compute)
    assert made[-1].isnan().all()
    step.answers(4.0)
    assert made[-1].tolist() == [8.0] * 4
