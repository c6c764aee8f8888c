"""ThreadScratch: memory for intermediate results, allocated once per thread and used again.

Fresh memory would cost a page fault every few kilobytes, more than the arithmetic done in it.
"""

import threading
from math import prod

import torch
from torch import Tensor


class ThreadScratch(threading.local):
    """One growing tensor per thread; each thread sees its own.

    Invariant: what `take` returned is overwritten by the same thread's next use of the same
    scratch, and by nobody else.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Store where and of what; called again in each thread."""
        self._device = device
        self._dtype = dtype
        self._flat: Tensor | None = None

    def take(self, *sizes: int) -> Tensor:
        """View the first items as a contiguous tensor of these sizes; they hold garbage."""
        num_items = prod(sizes)
        if self._flat is None or self._flat.numel() < num_items:
            with torch.inference_mode(mode=False):  # else later uses outside of it would be refused
                self._flat = torch.empty(num_items, device=self._device, dtype=self._dtype)
        return self._flat[:num_items].view(sizes)
