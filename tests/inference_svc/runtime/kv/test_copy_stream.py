"""The order of copies and computing, with marks that tests control."""

import torch

from inference_svc.runtime.kv.copy_stream import CopyProgress, CopyStream

CPU = torch.device("cpu")


class _Mark:
    """A point that is reached when a test sets it, or when it is waited for."""

    def __init__(self, *, is_reached=False) -> None:
        self.is_reached = is_reached

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True


def test_parts_end_in_order_and_two_are_active():
    """A part that ends at once is reported at once, but never before an earlier one."""
    done = []
    parts = CopyProgress(done.append)
    parts.add(_Mark(is_reached=True))
    assert done == [1]
    slow, fast = _Mark(), _Mark(is_reached=True)
    parts.add(slow)
    assert done == [1]
    parts.add(_Mark())
    assert slow.is_reached, "the one before is waited for"
    assert done == [1, 2]
    parts.add(fast)
    assert done == [1, 2, 3, 4]
    last = _Mark()
    parts.add(last)
    assert done == [1, 2, 3, 4]
    parts.finish()
    assert last.is_reached
    assert done == [1, 2, 3, 4, 5]


def test_on_a_cpu_a_copy_has_ended_when_it_returns():
    """Every mark is reached, so that a layer opens as soon as it is copied."""
    stream = CopyStream(CPU)
    source, target = torch.arange(8), torch.zeros(8, dtype=torch.long)
    done = []
    parts = CopyProgress(done.append)
    with stream.copies(behind_computing=True):
        target.copy_(source)
        parts.add(stream.mark())
        assert done == [1]
    assert torch.equal(source, target)
