"""Slots are registered chunk by chunk, as far as the system allows, and unregistered."""

import mmap
import threading

import pytest
import torch

from shared.cuda.driver_calls import DriverError
from shared.cuda.registered_memory import RegisteredMemory
from tests.simulated_device import SimulatedDevice

PAGE = mmap.PAGESIZE


def memory_of(num_bytes):
    return memoryview(mmap.mmap(-1, num_bytes))


def address_of(memory):
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


@pytest.mark.parametrize(
    ("slot_bytes", "chunk_bytes", "sizes"),
    [
        (PAGE, 4 * PAGE, [4, 4, 2]),  # in pages
        (PAGE, 1, [1] * 10),  # a chunk has at least one slot
        (5 * PAGE // 2, 6 * PAGE, [5, 5, 5, 5, 5]),  # chunks begin at a slot and a page
    ],
)
def test_no_page_belongs_to_two_chunks(slot_bytes, chunk_bytes, sizes):
    """All slots are registered, in order; the device refuses a page twice."""
    device, memory = SimulatedDevice(), memory_of(10 * slot_bytes)
    registered = RegisteredMemory(device, memory, slot_bytes, chunk_bytes)
    assert registered.wait() == 10
    begin = address_of(memory)
    firsts = [sum(sizes[:index]) * PAGE for index in range(len(sizes))]
    assert device.registered == {
        begin + first: size * PAGE for first, size in zip(firsts, sizes, strict=True)
    }
    registered.close()
    assert not device.registered
    assert not registered.has(0)


def test_registration_stops_at_the_systems_limit(caplog):
    """The registered slots are used."""
    device = SimulatedDevice()
    device.fails_at = 2
    registered = RegisteredMemory(device, memory_of(10 * PAGE), PAGE, 3 * PAGE)
    assert registered.wait() == 6
    assert registered.has(5)
    assert not registered.has(6)
    registered.close()
    assert not device.registered


def test_registration_can_be_stopped():
    """Between two chunks; registered ones are released."""

    class Slow(SimulatedDevice):
        """Registers a chunk, and waits for the test before the next."""

        def __init__(self):
            super().__init__()
            self.has_begun, self.may_go_on = threading.Event(), threading.Event()

        def register(self, address, num_bytes):
            super().register(address, num_bytes)
            self.has_begun.set()
            assert self.may_go_on.wait(60)

    device = Slow()
    registered = RegisteredMemory(device, memory_of(10 * PAGE), PAGE, PAGE)
    assert device.has_begun.wait(60)
    closing = threading.Thread(target=registered.close)
    closing.start()
    while not registered._is_closed.is_set():
        pass
    device.may_go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not device.registered


def test_a_failure_to_unregister_is_no_error():
    """The system does so when the process ends."""

    class Stubborn(SimulatedDevice):
        def unregister(self, address):
            raise DriverError("CUDA_ERROR_INVALID_CONTEXT")

    registered = RegisteredMemory(Stubborn(), memory_of(2 * PAGE), PAGE)
    assert registered.wait() == 2
    registered.close()
    assert not registered.has(0)


def test_unregistered_memory_may_be_unmapped():
    """Registered memory stays mapped."""
    mapped = mmap.mmap(-1, 2 * PAGE)
    registered = RegisteredMemory(SimulatedDevice(), memoryview(mapped), PAGE)
    registered.wait()
    with pytest.raises(BufferError):
        mapped.close()
    registered.close()
    mapped.close()
