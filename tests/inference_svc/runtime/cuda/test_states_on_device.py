"""States between a device's streams: read once they are written, given back once they were read."""

import pytest
import torch

from inference_svc.runtime.kv import copy_stream, states
from inference_svc.runtime.kv.copy_stream import CopyStream
from inference_svc.runtime.kv.states import SequenceStates, StatePlace, StateShape
from tests.simulated_device import RaceError, SimulatedDevice

CPU = torch.device("cpu")
SHAPES = (
    StateShape(0, "conv", 0, (1, 4, 3), torch.float32, is_overwritten=False),
    StateShape(1, "recurrent", 0, (1, 2, 5), torch.float32),
)


@pytest.fixture
def device(monkeypatch):
    """A simulated device in the place of the one that torch has for the CPU."""
    made = SimulatedDevice()
    made.promptness = 0.0
    monkeypatch.setattr(copy_stream.torch, "get_device_module", lambda _device: made)
    empty = torch.empty

    def lent(*sizes, **options):
        tensor = empty(*sizes, **options)
        made.lend(tensor)
        return tensor

    monkeypatch.setattr(states.torch, "empty", lent)
    return made


def computed(device, num_tokens, value):
    """States behind a step that is still under way."""
    sequence = SequenceStates(SHAPES, CPU)
    step(device, sequence, num_tokens, value)
    return sequence


def step(device, sequence, num_tokens, value):
    """Enqueue a step of a sequence."""
    sequence.begin()
    for shape in SHAPES:
        before = sequence.read(shape.place)
        made = torch.full(shape.shape, value)
        if before is not None:
            made += before
        device.lend(made)
        sequence.put(shape.place, made)
    sequence.commit(num_tokens)


def test_a_state_is_copied_once_its_step_has_written_it(device):
    """Behind the mark that it has from where it was noted; without, it is refused."""
    with device.running():
        noted = computed(device, 7, 1.5).fork()
        stream = CopyStream(CPU)
        with stream.copies(behind_computing=False):
            with pytest.raises(RaceError, match="reads what may still be written"):
                noted.snapshot()
            stream.wait(noted.written)
            packed = noted.snapshot()
    restored = SequenceStates(SHAPES, CPU)
    restored.restore(packed)
    assert restored.num_tokens == 7
    assert torch.equal(restored.read(StatePlace(0, "conv", 0)), torch.full((1, 4, 3), 1.5))


def test_the_step_that_is_under_way_is_not_waited_for(device):
    """What it writes is other memory."""
    with device.running():
        sequence = computed(device, 7, 1.5)
        noted = sequence.fork()
        step(device, sequence, 9, 2.0)
        stream = CopyStream(CPU)
        with stream.copies(behind_computing=False):
            stream.wait(noted.written)
            noted.snapshot()
            with pytest.raises(RaceError, match="reads what may still be written"):
                sequence.snapshot()


def test_memory_is_given_back_once_it_was_read(device):
    """Whoever copies a state holds it until the copies are done; else another gets its memory."""
    for is_held in (True, False):
        noted = computed(device, 7, 1.5).fork()
        stream = CopyStream(CPU)
        with device.running(), stream.copies(behind_computing=False):
            stream.wait(noted.written)
            noted.snapshot()
            if not is_held:
                noted = None
        noted = None
        assert bool(device.races) != is_held


def test_a_loaded_state_is_in_memory_of_the_stream_that_computes(device):
    """That reads it, and is not done when it is given back."""
    for has_room in (True, False):
        with device.running():
            packed = computed(device, 7, 1.5).snapshot()
            sequence = SequenceStates(SHAPES, CPU)
            room = sequence.allocate() if has_room else None
            with CopyStream(CPU).copies(behind_computing=True):
                sequence.restore(packed, room)
            room = None
            step(device, sequence, 9, 2.0)
            assert bool(device.races) != has_room
