"""A device with streams, on any machine: it refuses races that would be garbage on a GPU.

Its memory is the host's, and work enqueued on a stream is done at once; but no code may rely on
that. Each byte remembers which piece of work wrote it last, and which read it; each stream, and the
host, knows which work ends before its own: the work it has waited for, directly or through
others (vector clocks). Work that reads bytes which may still be written, or writes bytes which may
still be read, is refused with `RaceError`, whatever the bytes are. Memory that was made for one
stream (`lend`) and is given back while another may still use it is noted in `races`: an allocator
    would lend it again.

`SimulatedDevice` is the driver (`runtime/cuda/driver.py`), and the module of streams and events in
the place of `torch.cuda`. Inside `running()`, work on the device's memory is found by watching
torch; memory is its own if it was handed to `own`, or made from such.
"""

import os
import random
import threading
import time
import weakref
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from shared.cuda.driver_calls import DriverError

HOST = 0
COPY = torch.ops.aten.copy_.default
ONLY_WRITING = {COPY, torch.ops.aten.index_copy_.default, torch.ops.aten._foreach_copy_.default}
MAKING = {  # operations that look at a shape only
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
}
BY_ROWS = {  # of the first argument, by dimension and index
    torch.ops.aten.index_copy_.default,
    torch.ops.aten.index_select.default,
    torch.ops.aten.index_select.out,
}
WORK_S = 0.003  # operations whose wait is not reported to the waiting code
MOST_STREAMS = 1 << 10  # one piece of work is number * MOST_STREAMS + stream


class RaceError(AssertionError):
    """Work was enqueued that does not wait for work it depends on."""


class Stream:
    """A queue of work; `clock` has, per stream, the newest work that ends before what follows."""

    def __init__(self, device, number):
        self._device = device
        self.number = number
        self.clock = {}

    def wait_stream(self, other):
        _merge(self.clock, other.clock)


class Event:
    """A point in a stream."""

    def __init__(self, device):
        self._device = device
        self._clock = {}

    def record(self, stream=None):
        self._clock = dict((stream or self._device.current_stream()).clock)

    def wait(self, stream=None):
        _merge((stream or self._device.current_stream()).clock, self._clock)

    def synchronize(self):
        if not self._is_known():
            time.sleep(WORK_S)  # other threads enqueue more in the meantime
        _merge(self._device.host.clock, self._clock)

    def elapsed_time(self, _other):
        """Time is not simulated."""
        return 0.0

    def query(self):
        """Return whether it is reached: always if it was waited for; a yes counts as a wait."""
        if self._is_known():
            return True
        if self._device.chance.random() >= self._device.promptness:
            return False
        _merge(self._device.host.clock, self._clock)
        return True

    def _is_known(self):
        host = self._device.host.clock
        return all(host.get(stream, 0) >= number for stream, number in self._clock.items())


class SimulatedDevice:
    """See the module docstring.

    Attributes:
        promptness: the probability that work is reported as over.
        registered: sizes of registered host memory, by address.
        fails_at: how many calls of `register` succeed before one fails; None: all.
        num_batches: number of pieces of work that copied slots.
        races: the races so far, for tests where threads catch exceptions.
    """

    def __init__(self, seed=0):
        self.chance = random.Random(seed)  # noqa: S311 - nothing is secret
        self.host = Stream(self, HOST)
        self._streams = [self.host]
        self._usual = self.Stream()
        self._current = threading.local()
        self._lock = threading.RLock()
        self._memory = {}  # by the storage's address: _Memory
        self._works = 0
        self.promptness = 0.5
        self.registered = {}
        self.fails_at = None
        self.num_batches = 0
        self.races = []

    # --- the module of streams and events ---

    def Stream(self, **_):  # noqa: N802 - as torch calls it
        self._streams.append(Stream(self, len(self._streams)))
        assert len(self._streams) <= MOST_STREAMS
        return self._streams[-1]

    def Event(self, **_):  # noqa: N802
        return Event(self)

    def current_stream(self, _device=None):
        return getattr(self._current, "stream", self._usual)

    @contextmanager
    def stream(self, stream):
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    # --- the driver ---

    def register(self, address, num_bytes):
        if self.fails_at is not None and len(self.registered) >= self.fails_at:
            raise DriverError("CUDA_ERROR_OUT_OF_MEMORY")
        pages = {page // 4096 for page in range(address, address + num_bytes, 4096)}
        for other, size in self.registered.items():
            assert not pages & {page // 4096 for page in range(other, other + size, 4096)}
        self.registered[address] = num_bytes

    def unregister(self, address):
        for stream in self._streams:
            _merge(self.host.clock, stream.clock)
        del self.registered[address]

    def gather(self, slots, here):
        self._copy(slots, here, to_slots=False)

    def scatter(self, here, slots):
        self._copy(slots, here, to_slots=True)

    def _copy(self, slots, here, *, to_slots):
        """Copy as the kernel would, adjacent tokens in one piece."""
        size = here.memory[0].nbytes
        assert here.memory[0].is_contiguous()
        offsets = slots.offsets.tolist()
        assert all(offset % slots.step == 0 for offset in offsets)
        places = range(len(offsets)) if here.places is None else here.places.tolist()
        apart = here.memory.stride(0) * here.memory.itemsize
        pieces = [[-1, -1, 0]]
        for offset, place in zip(offsets, places, strict=True):
            last = pieces[-1]
            if (last[0] + last[2], last[1] + last[2]) == (offset, place * apart):
                last[2] += size
            else:
                pieces.append([offset, place * apart, size])
        moves = [
            (slots.address + in_slot + offset, here.memory.data_ptr() + on_device + place, num)
            for in_slot, on_device in zip(slots.layers, here.layers, strict=True)
            for offset, place, num in pieces[1:]
        ]
        in_slots, on_device, sizes = zip(*moves, strict=True)
        self.copy_batch(*((in_slots, on_device) if to_slots else (on_device, in_slots)), sizes)

    def copy_batch(self, targets, sources, sizes):
        with self._lock, _disable_current_modes():
            self.num_batches += 1
            work = self._begin(self.current_stream())
            for target, source, size in zip(targets, sources, sizes, strict=True):
                to, of = self._found(target, size), self._found(source, size)
                of.read(work)
                to.write(work)
                to.bytes().copy_(of.bytes())

    def staging(self, num_bytes):
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.own(memory, is_host=True)
        return memory

    def share(self, num_bytes):
        """Return memory of the device; its importer is in this process, and needs no descriptor."""
        return self.own(torch.empty(num_bytes, dtype=torch.uint8)), os.memfd_create("ring")

    # --- memory ---

    def own(self, tensor, *, is_host=False):
        """Make a tensor's memory the device's, or host memory that the device may reach."""
        storage = tensor.untyped_storage()
        self._memory[storage.data_ptr()] = _Memory(storage, is_host)
        return tensor

    def lend(self, tensor):
        """Make a tensor the device's that the current stream created and will take back."""
        with self._lock, _disable_current_modes():
            if not self.is_its(tensor):
                self.own(tensor)
                self.ran([], [tensor])
                memory = self._memory[tensor.untyped_storage().data_ptr()]
                stream = self.current_stream()
                weakref.finalize(tensor, self._given_back, memory, stream).atexit = False

    def _given_back(self, memory, owner):
        """Note which work may still use memory that its owner frees now."""
        with self._lock, _disable_current_modes():
            for noted in (memory.written, *memory.read.values()):
                for work in noted.unique().tolist():
                    number, stream = divmod(work, MOST_STREAMS)
                    clocks = (owner.clock, self.host.clock)
                    if number > max(clock.get(stream, 0) for clock in clocks):
                        self.races.append(f"stream {stream} uses what {owner.number} gives away")

    @property
    def is_copying(self):
        """Return whether this thread's stream is one of copies: computing reads its own results."""
        return self.current_stream() is not self._usual

    def is_its(self, tensor):
        """Return whether a tensor lies in the device's own memory."""
        part = self._part(tensor)
        return part is not None and not part.memory.is_host

    @contextmanager
    def running(self):
        """Watch this thread's computations."""
        with _Watched(self):
            yield self

    def ran(self, inputs, outputs, rows=None):
        """Note work that torch has done, or is about to do, on tensors that may be the device's.

        Args:
            inputs: tensors that are read.
            outputs: tensors that are written.
            rows: tensor, dimension and index of a call that takes some rows only.
        """
        read = [self._part(tensor, rows) for tensor in inputs]
        written = [self._part(tensor, rows) for tensor in outputs]
        parts = [part for part in (*read, *written) if part is not None]
        if not parts:
            return False
        is_ours = any(not part.memory.is_host for part in parts)
        work = self._begin(self.current_stream() if is_ours else self.host)
        for part in read:
            if part is not None:
                part.read(work)
        for part in written:
            if part is not None:
                part.write(work)
        return is_ours

    def _begin(self, stream):
        """Begin a piece of work; all work that the host knows to be over ends before it."""
        _merge(stream.clock, self.host.clock)
        self._works += 1
        stream.clock[stream.number] = self._works
        if stream is self.host:  # the host's finished work ends before everything that follows
            for other in self._streams:
                other.clock[HOST] = self._works
        return stream, self._works

    def _part(self, tensor, rows=None):
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        if memory is None or not tensor.numel():
            return None
        size = tensor.itemsize
        shape, strides = (*tensor.shape, size), (*(step * size for step in tensor.stride()), 1)
        part = _Part(memory, shape, strides, tensor.storage_offset() * size)
        if rows is not None and rows[0] is tensor:
            part.rows = rows[1] % tensor.dim(), rows[2].long()
        return part

    def _found(self, address, num_bytes):
        """Find the memory at an address; host memory must be registered."""
        for first, memory in self._memory.items():
            if first <= address and address + num_bytes <= first + memory.num_bytes:
                if memory.is_host and not any(
                    at <= address and address + num_bytes <= at + size
                    for at, size in self.registered.items()
                ):
                    raise DriverError("CUDA_ERROR_INVALID_VALUE")
                return _Part(memory, (num_bytes,), (1,), address - first)
        raise DriverError("CUDA_ERROR_INVALID_VALUE")


class _Memory:
    """Some memory; for each byte the newest work that wrote it and, per stream, read it."""

    def __init__(self, storage, is_host):
        self.storage = storage
        self.is_host = is_host
        self.num_bytes = storage.nbytes()
        self.written = torch.zeros(self.num_bytes, dtype=torch.int64)
        self.read = {}


class _Part:
    """Some bytes of a memory, as a view selects them."""

    rows = None  # dimension and index; None: all

    def __init__(self, memory, *place):
        self.memory = memory
        self._place = place

    def bytes(self):
        whole = torch.tensor([], dtype=torch.uint8).set_(self.memory.storage)
        return whole.as_strided(*self._place)

    def read(self, work):
        stream, number = work
        self._require(stream, self.memory.written, "reads what may still be written")
        read = self.memory.read
        if stream.number not in read:
            read[stream.number] = torch.zeros(self.memory.num_bytes, dtype=torch.int64)
        self._note(read[stream.number], number * MOST_STREAMS + stream.number)

    def write(self, work):
        stream, number = work
        self._require(stream, self.memory.written, "writes what may still be written")
        for noted in self.memory.read.values():
            self._require(stream, noted, "writes what may still be read")
        self._note(self.memory.written, number * MOST_STREAMS + stream.number)

    def _note(self, noted, work):
        here = noted.as_strided(*self._place)
        if self.rows is None:
            here.fill_(work)
        else:
            here.index_fill_(*self.rows, work)

    def _require(self, stream, noted, what):
        """Refuse unless all work noted here is over."""
        here = noted.as_strided(*self._place)
        if self.rows is not None:
            here = here.index_select(*self.rows)
        for work in here.unique().tolist():
            number, other = divmod(work, MOST_STREAMS)
            if number > stream.clock.get(other, 0):
                raise RaceError(f"stream {stream.number} {what} by stream {other}")


class _Watched(TorchDispatchMode):
    """Reports every call of torch to a device, and owns the results made from its memory."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = self._device
        if func.is_view:
            return func(*args, **kwargs)
        with device._lock:
            schema = func._schema.arguments
            given = dict(zip((each.name for each in schema), args, strict=False)) | kwargs
            written = {each.name for each in schema if each.alias_info and each.alias_info.is_write}
            # Tensors that are only written: `out` of a call, and the target of a copy.
            unread = (
                written if func in ONLY_WRITING else {each.name for each in schema if each.is_out}
            )
            outputs = [t for name in written for t in _tensors(given.get(name))]
            inputs = [t for name in given if name not in unread for t in _tensors(given[name])]
            rows = args[:3] if func in BY_ROWS else None
            if func in MAKING:
                is_ours = device.is_its(inputs[0])
            else:
                is_ours = device.ran(inputs, outputs, rows)
            results = func(*args, **kwargs)
            known = {t.untyped_storage().data_ptr() for t in _tensors(list(given.values()))}
            for made in _tensors(results):
                if is_ours and device.is_copying and made.untyped_storage().data_ptr() not in known:
                    device.own(made)
                    device.ran([], [made])
            return results


def _tensors(value):
    return [each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor)]


def _merge(clock, other):
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
