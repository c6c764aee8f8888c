"""Expansions: finds the matrices by which a model makes keys and values of cached latents.

Weights are not inspected. In a separate forward the cache returns unit vectors to the layers, so
that the keys and values at attention are the matrix, row by row. Products with 0 and 1 are exact,
and so is the matrix, in whatever form its weights are stored. Other vectors, one of them at two
positions, show whether the model transforms latents by anything else than a matrix.
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
        probe: a probe in this mode, in which each layer cached a single head.

    Raises:
        ModelModeMissingError: a layer transforms its latents in another way than by a matrix.
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
    return tuple(_expansion(loaded, response) for response in forward.responses)


@dataclass(frozen=True, eq=False)
class _Response:
    """The keys and values that a layer made of the test vectors returned by the cache.

    Attributes:
        latents: [tokens, latent_dim + rotated_dim], the test vectors: zeros, the unit vectors, and
            two cached vectors, the first of which is repeated at the end.
        latent_dim: width of a latent.
        keys: [heads, tokens, key_dim].
        values: [heads, tokens, value_dim].
    """

    latents: Tensor
    latent_dim: int
    keys: Tensor
    values: Tensor


class _UnitForward:
    """A forward that returns test vectors to each layer, and records the keys and values."""

    def __init__(self, layers: dict[int, SeenLayer]) -> None:
        self._layers = layers
        self._latents: tuple[Tensor, int] | None = None  # of the last layer, and their width
        self.responses: list[_Response] = []

    def on_rotary(
        self,
        _apply: Callable[..., Any],
        _args: tuple[Any, ...],
        _options: dict[str, Any],
        _result: Any,
    ) -> None:
        """Ignore the call."""

    def update_cache(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the test vectors, [1, 1, latent_dim + rotated_dim + 4, dim] both."""
        seen = self._layers[layer_index]
        widths = [key.shape[3], value.shape[3]]
        joint = torch.cat((seen.key, seen.value), dim=3)[0, 0].to(key)
        first, second = joint[:2]
        units = torch.eye(sum(widths), dtype=key.dtype, device=key.device)
        latents = torch.cat(
            (torch.zeros_like(first)[None], units, torch.stack((first, second, first)))
        )
        self._latents = latents, widths[0]
        latent, rotated = latents[None, None].split_with_sizes(widths, 3)
        return latent.contiguous(), rotated.contiguous()

    def update_index(self, _layer_index: int, index: Tensor) -> Tensor:
        """Return the index keys: the choice of latents does not matter here."""
        return index

    def history_positions(self) -> None:
        """Return None: the sequence is before its first token."""

    def token_groups(self) -> Iterator[TokenGroup]:
        """Yield nothing: there is one sequence."""
        return iter(())

    def has_states(self) -> bool:
        """Return False: the sequence is before its first token."""
        return False

    def state(self, _place: StatePlace) -> None:
        """Return None: the sequence is before its first token."""

    def update_state(self, _place: StatePlace, _state: Tensor) -> None:
        """Ignore it: no later forward needs it."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, _mask: Any, _options: dict[str, Any]
    ) -> Tensor:
        """Record the keys and values; return zeros, [1, tokens, heads, value_dim]."""
        if self._latents is None:
            raise AssertionError("attention before anything is cached")
        self.responses.append(_Response(*self._latents, key[0], value[0]))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def make_mask(self, _allowed: Callable[..., Tensor]) -> None:
        """Refuse: our attention implementation has no mask function, so no mask is requested."""
        raise AssertionError("our attention name has no mask function")


def _expansion(loaded: LoadedModel, response: _Response) -> Expansion:
    """Read the matrices from the unit vectors, and check them against the other vectors.

    Raises:
        ModelModeMissingError: see `find_expansions`.
    """
    num_units = response.latents.shape[1]
    rotated_dim = num_units - response.latent_dim
    heads, num_tokens, key_dim = response.keys.shape
    if num_tokens != len(response.latents) or response.values.shape[:2] != (heads, num_tokens):
        raise _refusal(loaded, "they belong to other tokens or to fewer heads")
    units, checks = slice(1, 1 + num_units), slice(1 + num_units, None)
    for expanded in (response.keys, response.values):
        expected = response.latents[checks].to(expanded) @ expanded[:, units]
        is_linear = distance(expanded[:, checks], expected) <= TOLERANCE[loaded.dtype]
        if not is_linear or bool(expanded[:, 0].any()):
            raise _refusal(loaded, "more than a matrix is involved")
    keys, values = response.keys[:, units], response.values[:, units]
    of_latents, of_rotated = keys[:, : response.latent_dim], keys[:, response.latent_dim :]
    for first in (key_dim - rotated_dim, 0):  # the rotated part is at the end or the beginning
        unrotated = slice(0, first) if first else slice(rotated_dim, None)
        copied = torch.zeros_like(of_rotated)
        copied[:, :, first : first + rotated_dim] = torch.eye(rotated_dim).to(copied)
        is_apart = not of_latents[:, :, first : first + rotated_dim].any()
        if (
            torch.equal(of_rotated, copied)
            and is_apart
            and not values[:, response.latent_dim :].any()
        ):
            return Expansion(
                of_latents[:, :, unrotated].transpose(1, 2).contiguous(),
                values[:, : response.latent_dim].contiguous(),
                rotated_dim,
                is_rotated_first=first == 0,
            )
    raise _refusal(loaded, "rotated parts are involved, too")


def _refusal(loaded: LoadedModel, how: str) -> ModelModeMissingError:
    return ModelModeMissingError(
        f"keys and values of {loaded.architecture} cannot be computed by one matrix from "
        f"what it caches: {how}",
        REMEDY,
    )
