"""States on a device's streams: read after they are written, freed after they are read."""

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
    """Use a simulated device instead of the one that torch has for the CPU."""
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


def start_states(device, num_tokens, value):
    """Return states behind a step that is still running."""
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


def test_a_state_is_copied_after_its_step_has_written_it(device):
    """Behind the mark that it got when it was noted; without it, the copy is refused."""
    with device.running():
        noted = start_states(device, 7, 1.5).fork()
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


def test_a_running_step_is_not_waited_for(device):
    """It writes to other memory."""
    with device.running():
        sequence = start_states(device, 7, 1.5)
        noted = sequence.fork()
        step(device, sequence, 9, 2.0)
        stream = CopyStream(CPU)
        with stream.copies(behind_computing=False):
            stream.wait(noted.written)
            noted.snapshot()
            with pytest.raises(RaceError, match="reads what may still be written"):
                sequence.snapshot()


def test_memory_is_freed_after_it_was_read(device):
    """A copy holds its state until it has ended; otherwise another state gets the memory."""
    for is_held in (True, False):
        noted = start_states(device, 7, 1.5).fork()
        stream = CopyStream(CPU)
        with device.running(), stream.copies(behind_computing=False):
            stream.wait(noted.written)
            noted.snapshot()
            if not is_held:
                noted = None
        noted = None
        assert bool(device.races) != is_held


def test_a_loaded_state_is_in_memory_of_the_computing_stream(device):
    """That stream reads it, and has not finished when it is freed."""
    for has_room in (True, False):
        with device.running():
            packed = start_states(device, 7, 1.5).snapshot()
            sequence = SequenceStates(SHAPES, CPU)
            room = sequence.allocate() if has_room else None
            with CopyStream(CPU).copies(behind_computing=True):
                sequence.restore(packed, room)
            room = None
            step(device, sequence, 9, 2.0)
            assert bool(device.races) != has_room
