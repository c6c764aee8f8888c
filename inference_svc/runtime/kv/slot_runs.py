"""TokenRun: tokens in slots of the arena that are copied in one call."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from inference_svc.runtime.memory import copy_to_device


class TokenRun(ABC):
    """An ordered selection of tokens in slots."""

    @property
    @abstractmethod
    def last_slot(self) -> int:
        """The highest slot id of the tokens."""

    @abstractmethod
    def by_token(self, tokens: Tensor) -> Tensor:
        """View contiguous tokens, as `ArenaKv.gather` fills them, as [num_tokens, *shape]."""

    @abstractmethod
    def by_slot(self, tokens: Tensor) -> Tensor:
        """View contiguous [num_tokens, *shape] as `ArenaKv.gather` fills it."""

    @abstractmethod
    def distances(self, slot_size: int, token_size: int) -> Tensor:
        """Return each token's distance from the first token of slot 0, [n] int64.

        Args:
            slot_size: distance between two slots, in any unit.
            token_size: distance between two tokens of a slot, in the same unit.
        """

    def distances_on(self, device: torch.device, slot_size: int, token_size: int) -> Tensor:
        """Return `distances` on a device, for work on this thread's current stream."""
        cache = self._device_distances
        key = (threading.get_ident(), device, slot_size, token_size)
        if key not in cache:
            cache[key] = copy_to_device(device, self.distances(slot_size, token_size))
        return cache[key]

    @cached_property
    def _device_distances(self) -> dict[tuple[int, torch.device, int, int], Tensor]:
        """Cached distances, by thread: another thread's stream would not wait for their copy."""
        return {}


@dataclass(frozen=True)
class SlotRun(TokenRun):
    """Tokens [start, start + tokens_per_slot) of each of one or more slots, in their order."""

    slot_ids: Sequence[int]
    start: int
    tokens_per_slot: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all slots together."""
        return len(self.slot_ids) * self.tokens_per_slot

    def split(self, max_tokens: int) -> "list[SlotRun]":
        """Split into runs of at most `max_tokens`, or of one slot if a slot has more."""
        step = max(1, max_tokens // self.tokens_per_slot)
        if step >= len(self.slot_ids):
            return [self]
        return [
            SlotRun(self.slot_ids[begin : begin + step], self.start, self.tokens_per_slot)
            for begin in range(0, len(self.slot_ids), step)
        ]

    def by_slot(self, tokens: Tensor) -> Tensor:
        """View contiguous tokens [num_tokens, *shape] as [slots, tokens_per_slot, *shape]."""
        return tokens.view(len(self.slot_ids), self.tokens_per_slot, *tokens.shape[1:])

    @cached_property
    def indices(self) -> Tensor:
        """The slot ids as a tensor, [slots] int64."""
        return torch.tensor(self.slot_ids)

    def by_token(self, tokens: Tensor) -> Tensor:
        """View contiguous [slots, tokens_per_slot, *shape] as [num_tokens, *shape]."""
        return tokens.flatten(0, 1)

    @property
    def last_slot(self) -> int:
        """The highest of the slots."""
        return max(self.slot_ids)

    def distances(self, slot_size: int, token_size: int) -> Tensor:
        """Return each token's distance from the first token of slot 0, [n] int64."""
        in_slot = torch.arange(self.start, self.start + self.tokens_per_slot) * token_size
        return (self.indices[:, None] * slot_size + in_slot).flatten()

    @cached_property
    def is_consecutive(self) -> bool:
        """Whether the slots are adjacent, and in order."""
        first = self.slot_ids[0]
        return first >= 0 and list(self.slot_ids) == list(range(first, first + len(self.slot_ids)))


@dataclass(frozen=True, eq=False)
class ScatteredTokens(TokenRun):
    """Single tokens of any slots: for the many short runs that a discard leaves.

    Attributes:
        slot_ids: [n] int64, each token's slot.
        offsets: [n] int64, each token's offset in its slot.
    """

    slot_ids: Tensor
    offsets: Tensor
    tokens_per_slot: ClassVar = 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.offsets)

    @property
    def last_slot(self) -> int:
        """The highest of the slots."""
        return int(self.slot_ids.max())

    def by_token(self, tokens: Tensor) -> Tensor:
        """Return [num_tokens, *shape] as it is."""
        return tokens

    def by_slot(self, tokens: Tensor) -> Tensor:
        """Return [num_tokens, *shape] as it is."""
        return tokens

    def distances(self, slot_size: int, token_size: int) -> Tensor:
        """Return each token's distance from the first token of slot 0, [n] int64."""
        return self.slot_ids * slot_size + self.offsets * token_size

    def split(self, max_tokens: int) -> "list[ScatteredTokens]":
        """Split into parts of at most `max_tokens`."""
        return [
            ScatteredTokens(
                *(ids[first : first + max_tokens] for ids in (self.slot_ids, self.offsets))
            )
            for first in range(0, self.num_tokens, max_tokens)
        ]
