"""Finds by what a model makes keys and values of the latents that it caches.

No weights are looked for: in a forward of its own the layers get unit vectors back from the cache,
and what arrives at attention is the matrix, row by row. Products with 0 and 1 are exact, so is the
matrix, whatever its weights are stored as. Other vectors, one of them at two places, tell whether
the model does something to latents that a matrix does not.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference_svc.runtime.attention.latents import Expansion
from inference_svc.runtime.calibration.mode_probe import (
    probe_mask,
    probe_tokens,
    refused_if_it_fails,
)
from inference_svc.runtime.calibration.probe import Probe, SeenLayer
from inference_svc.runtime.calibration.stock import TOLERANCE, distance
from inference_svc.runtime.kv.states import StatePlace
from inference_svc.runtime.model.capture import CaptureCache, ForwardCall
from inference_svc.runtime.model.forward import TokenGroup, forward_context
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.refusals import REMEDY, ModelModeMissingError
from inference_svc.runtime.positions.recipes import Mode


def find_expansions(loaded: LoadedModel, mode: Mode, probe: Probe) -> tuple[Expansion, ...]:
    """Return the expansion of each attention call of a forward.

    Args:
        loaded: the model, set to our attention.
        mode: "latent" or "indexed".
        probe: of this mode: each layer caches one head, and no more.

    Raises:
        ModelModeMissingError: if a layer makes something else of what it caches.
    """
    forward = _UnitForward(probe.layers)
    token_ids = probe_tokens(loaded)
    places = torch.arange(len(token_ids), device=loaded.device)
    with (
        refused_if_it_fails(loaded, "over latents"),
        torch.inference_mode(),
        forward_context(forward),
    ):
        ForwardCall(loaded.model)(
            torch.tensor([token_ids], device=loaded.device),
            places[None],
            places[:1],
            CaptureCache(),
            **probe_mask(loaded, mode),
        )
    return tuple(_expansion(loaded, seen) for seen in forward.made)


@dataclass(frozen=True, eq=False)
class _Made:
    """What a layer made of the tokens that it was given in the place of those it cached.

    Attributes:
        latents: [tokens, latent_dim + rotated_dim]: nothing, unit vectors, and three others, the
            last of which is the first.
        latent_dim: width of a latent.
        keys: [heads, tokens, key_dim].
        values: [heads, tokens, value_dim].
    """

    latents: Tensor
    latent_dim: int
    keys: Tensor
    values: Tensor


class _UnitForward:
    """Gives unit vectors to each layer, and records what it makes of them."""

    def __init__(self, layers: dict[int, SeenLayer]) -> None:
        self._layers = layers
        self._given: tuple[Tensor, int] | None = None
        self.made: list[_Made] = []

    def on_rotary(
        self,
        _apply: Callable[..., Any],
        _args: tuple[Any, ...],
        _options: dict[str, Any],
        _result: Any,
    ) -> None:
        """Nothing is asked of positions."""

    def update_cache(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit vectors, [1, 1, latent_dim + rotated_dim + others, dim] both."""
        seen = self._layers[layer_index]
        widths = [key.shape[3], value.shape[3]]
        joint = torch.cat((seen.key, seen.value), dim=3)[0, 0].to(key)
        one, other = joint[:2]
        units = torch.eye(sum(widths), dtype=key.dtype, device=key.device)
        latents = torch.cat((torch.zeros_like(one)[None], units, torch.stack((one, other, one))))
        self._given = latents, widths[0]
        latent, rotated = latents[None, None].split_with_sizes(widths, 3)
        return latent.contiguous(), rotated.contiguous()

    def update_index(self, _layer_index: int, index: Tensor) -> Tensor:
        """Return the index keys: which latents are chosen is of no concern."""
        return index

    def history_positions(self) -> None:
        """Return none: the sequence is before its first token."""

    def token_groups(self) -> Iterator[TokenGroup]:
        """Yield nothing: there is one sequence."""
        return iter(())

    def has_states(self) -> bool:
        """Return False: the sequence is before its first token."""
        return False

    def state(self, _place: StatePlace) -> None:
        """Return no state: the sequence is before its first token."""

    def update_state(self, _place: StatePlace, _state: Tensor) -> None:
        """Drop it: nothing goes on from there."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, _mask: Any, _options: dict[str, Any]
    ) -> Tensor:
        """Record what was made; return zeros, [1, tokens, heads, value_dim]."""
        if self._given is None:
            raise AssertionError("attention before anything is cached")
        self.made.append(_Made(*self._given, key[0], value[0]))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def make_mask(self, _allowed: Callable[..., Tensor]) -> None:
        """Refuse: our attention has no mask function, so nobody asks for a mask."""
        raise AssertionError("our attention name has no mask function")


def _expansion(loaded: LoadedModel, seen: _Made) -> Expansion:
    """Read what was made of unit vectors, and check it against what was made of others."""
    num_units = seen.latents.shape[1]
    rotated_dim = num_units - seen.latent_dim
    heads, num_tokens, key_dim = seen.keys.shape
    if num_tokens != len(seen.latents) or seen.values.shape[:2] != (heads, num_tokens):
        raise _other(loaded, "for other tokens than it caches, or for fewer heads")
    units, others = slice(1, 1 + num_units), slice(1 + num_units, None)
    for made in (seen.keys, seen.values):
        expected = seen.latents[others].to(made) @ made[:, units]
        is_linear = distance(made[:, others], expected) <= TOLERANCE[loaded.dtype]
        if not is_linear or bool(made[:, 0].any()):
            raise _other(loaded, "by more than a matrix")
    keys, values = seen.keys[:, units], seen.values[:, units]
    of_latents, of_rotated = keys[:, : seen.latent_dim], keys[:, seen.latent_dim :]
    for first in (key_dim - rotated_dim, 0):  # where heads have the rotated part
        free = slice(0, first) if first else slice(rotated_dim, None)
        copied = torch.zeros_like(of_rotated)
        copied[:, :, first : first + rotated_dim] = torch.eye(rotated_dim).to(copied)
        is_apart = not of_latents[:, :, first : first + rotated_dim].any()
        if torch.equal(of_rotated, copied) and is_apart and not values[:, seen.latent_dim :].any():
            return Expansion(
                of_latents[:, :, free].transpose(1, 2).contiguous(),
                values[:, : seen.latent_dim].contiguous(),
                rotated_dim,
                is_rotated_first=first == 0,
            )
    raise _other(loaded, "of what is rotated, too")


def _other(loaded: LoadedModel, how: str) -> ModelModeMissingError:
    return ModelModeMissingError(
        f"{loaded.architecture} makes keys and values of what it caches {how}", REMEDY
    )
