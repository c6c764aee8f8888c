"""A second device on any machine: its tensors lie in CPU memory, but report another device.

Inside `other_device()` tensors may be made on `OTHER`, and torch's own rule is enforced for them:
operands must lie on one device (a tensor without dimensions may be the CPU's, copies
and `to` cross over). Like a GPU, it reveals tables that were left on the CPU.
"""

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

# torch lets anybody make tensors of this device, and never computes with them
OTHER = torch.device("meta")
CPU = torch.device("cpu")
CROSSING = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class OtherTensor(torch.Tensor):
    """A tensor on `OTHER`; `inner` has its values."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=OTHER,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """Converts literals: torch knows no values of `OTHER`, and makes no subclass from a list."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == OTHER:
            return OtherTensor(func(*args, **{**kwargs, "device": CPU}))
        if func is torch.Tensor.tolist:
            return to_cpu(args[0]).tolist()
        return func(*args, **kwargs)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


@contextmanager
def other_device():
    """Allow tensors on `OTHER` inside the block."""
    with _Literals(), _Mode():
        yield OTHER


def _run(func, args, kwargs):
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    others = [tensor for tensor in tensors if isinstance(tensor, OtherTensor)]
    strangers = [t for t in tensors if not isinstance(t, OtherTensor) and t.dim()]
    if others and strangers and func not in CROSSING:
        raise RuntimeError(f"{func} of tensors on two devices")
    target = kwargs.get("device")
    is_other = bool(others) if target is None else torch.device(target) == OTHER
    if func is torch.ops.aten.copy_.default:
        is_other = isinstance(args[0], OtherTensor)
    if target is not None:
        kwargs = {**kwargs, "device": CPU}
    wrapped = {id(tensor.inner): tensor for tensor in others}
    inner_args, inner_kwargs = tree_map_only(OtherTensor, lambda t: t.inner, (args, kwargs))
    results = func(*inner_args, **inner_kwargs)
    if not is_other:
        return results
    # In place or into `out`: return the tensor that was passed in.
    return tree_map_only(
        torch.Tensor, lambda t: wrapped[id(t)] if id(t) in wrapped else OtherTensor(t), results
    )


def to_cpu(tensor):
    """Return the values of a tensor of either device."""
    return tensor.inner if isinstance(tensor, OtherTensor) else tensor
