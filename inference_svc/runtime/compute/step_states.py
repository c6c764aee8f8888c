"""StepStates: the states of a step's sequences, and the token groups of recurrent modules.

A recurrent module is called once per token group. Chunks of a single token whose sequence has a
state form one group, a batch: so all decoding sequences are computed at once. Every other chunk is
a group of its own. Some models can continue a state by one token only
(`Calibration.is_one_by_one`): then a longer chunk over a state is one group per token.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.kv.states import JointStates, SequenceStates, StatePlace
from inference_svc.runtime.memory import copy_to_device
from inference_svc.runtime.model.forward import TokenGroup


class _Group(NamedTuple):
    """Tokens that a recurrent module computes in one call.

    Attributes:
        tokens: indices into the step's tokens.
        sequences: states of their sequences; if there are several, each has one of the tokens.
    """

    tokens: TokenGroup
    sequences: list[SequenceStates]


class StepStates:
    """The states that one forward reads and replaces; empty for a model without states."""

    def __init__(self, chunks: Sequence[Chunk], *, is_one_by_one: bool) -> None:
        """Begin a forward: new states of an earlier forward that were not committed are dropped.

        Args:
            chunks: the chunks to compute.
            is_one_by_one: whether states can be continued by one token only.
        """
        self._chunks = [chunk for chunk in chunks if chunk.kv.states is not None]
        self._is_one_by_one = is_one_by_one
        self._groups: list[_Group] | None = None  # None: not planned yet
        self._active: SequenceStates | JointStates | None = None  # of the last yielded group
        for states in self._all():
            states.begin()

    def token_groups(self) -> Iterator[TokenGroup]:
        """Yield the groups; nothing if the step has a single group of one sequence."""
        for group in self._all_groups():
            if len(group.sequences) > 1:
                joint = self._active = JointStates(group.sequences)
                yield group.tokens
                joint.split()
            else:
                self._active = group.sequences[0]
                if len(self._all_groups()) > 1:
                    yield group.tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the active states cover; the least, if there are several."""
        return self._current().num_tokens

    def read(self, place: StatePlace) -> Tensor | None:
        """Return a tensor of the active states, [sequences, ...]; None: there is none."""
        return self._current().read(place)

    def put(self, place: StatePlace, state: Tensor) -> None:
        """Keep a new tensor of the active states, [sequences, ...]."""
        self._current().put(place, state)

    def check(self) -> None:
        """Raise AssertionError unless every tensor of each state is new or was there before."""
        for states in self._all():
            states.check_pending()

    def _all(self) -> Iterator[SequenceStates]:
        return (chunk.kv.states for chunk in self._chunks if chunk.kv.states is not None)

    def _current(self) -> SequenceStates | JointStates:
        if self._active is None:  # no module has a tap, so the step has a lone sequence
            (group,) = self._all_groups()
            (self._active,) = group.sequences
        return self._active

    def _all_groups(self) -> list[_Group]:
        """Return all groups; the first call waits for states that are being loaded.

        Raises:
            AssertionError: a sequence's state is not at the end of its KV.
            Exception: a load has failed.
        """
        if self._groups is None:
            for chunk in self._chunks:
                if chunk.kv.gate is not None:
                    chunk.kv.gate.wait(0)
            for chunk, states in zip(self._chunks, self._all(), strict=True):
                if states.num_tokens != chunk.kv.num_tokens:
                    raise AssertionError(
                        f"the state of {states.num_tokens} tokens beside KV of "
                        f"{chunk.kv.num_tokens}"
                    )
            self._groups = self._plan()
        return self._groups

    def _plan(self) -> list[_Group]:
        groups: list[_Group] = []
        singles: list[tuple[int, SequenceStates]] = []
        first = 0
        for chunk, states in zip(self._chunks, self._all(), strict=True):
            size = len(chunk.token_ids)
            if size == 1 and states.num_tokens:
                singles.append((first, states))
            elif self._is_one_by_one and states.num_tokens:
                groups += (
                    _sequence_group(token, 1, states) for token in range(first, first + size)
                )
            else:
                groups.append(_sequence_group(first, size, states))
            first += size
        if len(singles) == 1:
            ((token, states),) = singles
            groups.append(_sequence_group(token, 1, states))
        elif singles:
            tokens = _index([token for token, _ in singles], self._chunks[0].kv.device)
            groups.append(_Group(TokenGroup(tokens, True), [states for _, states in singles]))
        return groups


def _sequence_group(first: int, num_tokens: int, states: SequenceStates) -> _Group:
    return _Group(TokenGroup(slice(first, first + num_tokens), False), [states])


def _index(tokens: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return an index that selects tokens, which are in order; a slice if they are adjacent."""
    if tokens[-1] - tokens[0] == len(tokens) - 1:
        return slice(tokens[0], tokens[-1] + 1)
    return copy_to_device(device, torch.tensor(tokens))
