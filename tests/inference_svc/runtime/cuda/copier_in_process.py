"""A copier's channel inside the test's process, on a simulated device."""

import os
import socket
from contextlib import contextmanager
from types import SimpleNamespace

from inference_svc.runtime.cuda.copier_channel import PLACES, CopierChannel
from kvd.copier.channel import Channel
from kvd.copier.channel import CopierArena as PinnedArena


class SimulatedGpu:
    """The copier's view of the device: its own streams, beside the engine's."""

    def __init__(self, device, ring):
        self._device, self._ring = device, ring
        self.register, self.unregister = device.register, device.unregister

    def ring(self, _fd, _num_bytes):
        return SimpleNamespace(address=self._ring.data_ptr(), close=lambda: None)

    def stream(self):
        return self._device.Stream()

    def end_stream(self, stream):
        """Do nothing: the simulated stream needs no end."""

    def copy(self, targets, sources, sizes, stream):
        with self._device.stream(stream):
            self._device.copy_batch(targets, sources, sizes)
        event = self._device.Event()
        event.record(stream)
        return event

    def wait(self, copied):
        copied.synchronize()


@contextmanager
def copier_of(device, memory, place_bytes):
    """Run a copier for the slots of an arena; yield the engine's end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ring, fd = device.share(PLACES * place_bytes)
    gpu = SimulatedGpu(device, ring)
    pinned = PinnedArena(gpu, memory)
    assert pinned.registered.wait() == memory.num_slots
    served = Channel(
        gpu, theirs, pinned, gpu.ring(fd, len(ring)), len(ring), lambda _job: None, lambda: None
    )
    served.start()
    channel = CopierChannel(ours, os.pidfd_open(os.getpid()), ring, memory, lambda: None)
    while not channel.has(memory.num_slots - 1):
        os.sched_yield()
    try:
        yield channel
    finally:
        channel.close()
        channel.join()
        served.join()
        pinned.registered.close()
        os.close(fd)
    assert channel.is_gone
