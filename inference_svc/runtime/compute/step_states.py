"""The states of a step's sequences, and how modules that go on from them are given its tokens.

Tokens of a sequence that has a state, and no more than one each, go at once, as a batch: so it is
when all decode. Every other chunk goes by itself. Of a model whose states only a single token can
follow (`Calibration.is_one_by_one`), chunks over a state go token by token.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.kv.states import JointStates, SequenceStates, StatePlace
from inference_svc.runtime.memory import placed_on
from inference_svc.runtime.model.forward import TokenGroup


class _Group(NamedTuple):
    """What is computed at once.

    Attributes:
        tokens: which of the step's.
        sequences: whose; several: a token of each.
    """

    tokens: TokenGroup
    sequences: list[SequenceStates]


class StepStates:
    """See the module docstring; without states it is empty."""

    def __init__(self, chunks: Sequence[Chunk], *, is_one_by_one: bool) -> None:
        """Begin a forward: what one before has put, and nobody has committed, is forgotten.

        Args:
            chunks: what it computes.
            is_one_by_one: see the module docstring.
        """
        self._chunks = [chunk for chunk in chunks if chunk.kv.states is not None]
        self._is_one_by_one = is_one_by_one
        self._groups: list[_Group] | None = None  # not yet planned
        self._now: SequenceStates | JointStates | None = None
        for states in self._all():
            states.begin()

    def token_groups(self) -> Iterator[TokenGroup]:
        """Yield the groups; nothing: there is one only, of one sequence."""
        for group in self._planned():
            if len(group.sequences) > 1:
                joint = self._now = JointStates(group.sequences)
                yield group.tokens
                joint.hand_out()
            else:
                self._now = group.sequences[0]
                if len(self._planned()) > 1:
                    yield group.tokens

    @property
    def num_tokens(self) -> int:
        """How many tokens the states that are gone on from now are behind, at least."""
        return self._current().num_tokens

    def read(self, place: StatePlace) -> Tensor | None:
        """Return a tensor of the states that are gone on from now."""
        return self._current().read(place)

    def put(self, place: StatePlace, state: Tensor) -> None:
        """Keep a new tensor of them."""
        self._current().put(place, state)

    def check(self) -> None:
        """Raise AssertionError unless the forward has left, or kept, every tensor of each."""
        for states in self._all():
            states.check_pending()

    def _all(self) -> Iterator[SequenceStates]:
        return (chunk.kv.states for chunk in self._chunks if chunk.kv.states is not None)

    def _current(self) -> SequenceStates | JointStates:
        if self._now is None:  # no module has a tap: the states are those of a lone sequence
            (group,) = self._planned()
            (self._now,) = group.sequences
        return self._now

    def _planned(self) -> list[_Group]:
        """Return all groups, once the states are there that loads may have had to bring.

        Raises:
            AssertionError: the state of a sequence is that of another position.
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
                groups += (_run(token, 1, states) for token in range(first, first + size))
            else:
                groups.append(_run(first, size, states))
            first += size
        if len(singles) == 1:
            ((token, states),) = singles
            groups.append(_run(token, 1, states))
        elif singles:
            tokens = _chosen([token for token, _ in singles], self._chunks[0].kv.device)
            groups.append(_Group(TokenGroup(tokens, True), [states for _, states in singles]))
        return groups


def _run(first: int, num_tokens: int, states: SequenceStates) -> _Group:
    return _Group(TokenGroup(slice(first, first + num_tokens), False), [states])


def _chosen(tokens: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return an index of tokens, which are in order."""
    if tokens[-1] - tokens[0] == len(tokens) - 1:
        return slice(tokens[0], tokens[-1] + 1)
    return placed_on(device, torch.tensor(tokens))
