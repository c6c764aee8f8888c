"""A stand-in for CUDA graphs on any machine: records calls of torch, and repeats them.

A device that captures computes nothing, and a replay computes over the very same memory: Python
does not run again. The stand-in does the same: every call of torch is recorded with its tensors,
and repeated into the tensors that it returned the first time. Numbers that Python computed for the
captured step stay those of that step; a tensor that Python creates anew for each step stays the
first one. After a capture the results are overwritten, as a device would not have computed them.

Calls that wait for the device, such as reading a number, are refused as a device refuses them; so
is a replay over memory whose last other owner is gone, which a device would have reused.
"""

from collections import defaultdict
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
# Calls whose result depends on the contents of tensors: a device would have to be waited for.
WAITING = {
    aten._local_scalar_dense.default,
    aten._unique2.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.item.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
}
# Functions that copy from or to the host, which cannot be seen where the host is the device.
HOST = {
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.as_tensor,
    torch.from_numpy,
    torch.tensor,
}


class CaptureError(RuntimeError):
    """A captured call cannot be captured, or a replay uses memory that is gone."""


class RecordedGraphs:
    """Captures as a device does; see `Capture`.

    Attributes:
        num_bytes: of all results that are kept.
        num_captured: how many graphs there are.
        num_replayed: how many times one of them was replayed.
    """

    def __init__(self):
        self.num_bytes = self.num_captured = self.num_replayed = 0

    def __call__(self, run):
        run()
        recording = _Recording()
        # Models check this, and leave out what cannot be captured.
        capturing = patch("torch.cuda.is_current_stream_capturing", return_value=True)
        with capturing, _OnDevice(), recording:
            run()
        recording.spoil()
        self.num_captured += 1
        self.num_bytes += sum(answer.nbytes for answer in recording.answers)

        def replay():
            self.num_replayed += 1
            recording.replay()

        return replay


class _OnDevice(TorchFunctionMode):
    """Refuses calls that go through the host's memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in HOST:
            raise CaptureError(f"operation not permitted when stream is capturing: {func}")
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    """The recorded calls of torch, in order; views are taken once, as they stay where they are."""

    def __init__(self):
        super().__init__()
        self._calls = []
        self._others = defaultdict(list)  # by address: our tensors over memory of others
        self.answers = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in WAITING or _counts(func, args):
            raise CaptureError(f"operation not permitted when stream is capturing: {func}")
        with torch._C.DisableTorchFunction():  # calls inside a call are not recorded
            made = func(*args, **kwargs)
        given = {_place(tensor) for tensor in _tensors((args, kwargs))}
        new = [answer for answer in _tensors(made) if _place(answer) not in given]
        if new or not func.is_view:  # some of the so-called views copy
            self.answers += new
            own = {_place(answer) for answer in self.answers}
            recorded = args, kwargs, _tensors(made)
            self._calls.append((func, *tree_map(lambda each: self._kept(each, own), recorded)))
        return made

    def _kept(self, value, own):
        """Keep no tensor of others alive, but our own tensor over the same memory."""
        if not _has_place(value) or _place(value) in own:
            return value
        if not value.dim():  # a number is passed by value
            return value
        alias = value.detach()
        self._others[_place(value)].append(alias)
        return alias

    @torch.inference_mode()
    def spoil(self):
        """Overwrite every result that was computed while this was recorded."""
        for answer in self.answers:
            answer.fill_(float("nan") if answer.is_floating_point() else 1)

    @torch.inference_mode()
    def replay(self):
        for aliases in self._others.values():
            storage = aliases[0].untyped_storage()  # which counts as well
            if torch._C._storage_Use_Count(storage._cdata) <= len(aliases) + 1:
                shape = tuple(aliases[0].shape)
                raise CaptureError(f"replayed over memory that is gone: of a tensor {shape}")
        for func, args, kwargs, answers in self._calls:
            for answer, made in zip(answers, _tensors(func(*args, **kwargs)), strict=True):
                if _place(answer) != _place(made):
                    answer.copy_(made)


def _place(tensor):
    return tensor.untyped_storage().data_ptr()


def _tensors(value):
    return [each for each in tree_flatten(value)[0] if _has_place(each)]


def _counts(func, args):
    """Return whether a call takes as many elements as a mask has."""
    return func is aten.index.Tensor and any(
        index is not None and index.dtype is torch.bool for index in args[1]
    )


def _has_place(value):
    """Return whether the value is a tensor that a kernel has not laid out in its own order."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
