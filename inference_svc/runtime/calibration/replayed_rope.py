"""ReplayedRope: a model's RoPE at other positions, found by running the model up to it.

For models whose cosines come out of no rotary module, or not straight: GPT-J and CodeGen look them
up in a buffer of each attention. The model runs at the positions asked for, until its first layer
calls its apply function; that call is then repeated with other keys.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from inference_svc.runtime.calibration.rope_calls import ApplyCall, as_tuple
from inference_svc.runtime.model.capture import CaptureCache, RotaryTap, under
from inference_svc.runtime.model.forward_call import ForwardCall

RUN_TOKENS = 512  # at once; attention masks grow with their square
TOKEN_ID = 0  # any: cosines do not depend on tokens


class RopeOutOfReachError(Exception):
    """The first layer caches something before the call that is looked for."""


class ReplayedRope:
    """As `rotary.Rope`: applies the model's RoPE to keys [1, heads, n, dim] at n positions."""

    def __init__(
        self, model: Any, *, call_index: int, arg_index: int, result_index: int, seq_dim: int
    ) -> None:
        """Store what to look for.

        Args:
            model: with our hooks installed.
            call_index: which apply call of the first layer.
            arg_index: which of its arguments is the key.
            result_index: which of its results is the key after RoPE.
            seq_dim: the dimension of that argument that counts tokens.
        """
        self._model = model
        self._call_index = call_index
        self._arg_index = arg_index
        self._result_index = result_index
        self._seq_dim = seq_dim

    def __call__(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Apply it; elements beyond those that the model passes to its function stay.

        Raises:
            RopeOutOfReachError: if the call is not there.
        """
        firsts = range(0, len(positions), RUN_TOKENS)
        pieces = ((keys[:, :, i : i + RUN_TOKENS], positions[i : i + RUN_TOKENS]) for i in firsts)
        return torch.cat([self._apply(*piece) for piece in pieces], dim=2)

    def _apply(self, keys: Tensor, positions: Tensor) -> Tensor:
        call = self._seen_at(positions)
        width = call.args[self._arg_index].shape[-1]
        turning = keys[..., :width]
        args = list(call.args)
        args[self._arg_index] = turning if self._seq_dim == 2 else turning.transpose(1, 2)
        turned: Tensor = as_tuple(call.apply(*args, **call.options))[self._result_index]
        turned = turned if self._seq_dim == 2 else turned.transpose(1, 2)
        return torch.cat((turned, keys[..., width:]), dim=-1)

    def _seen_at(self, positions: Tensor) -> ApplyCall:
        """Run the model at these positions until it makes the call."""
        search = _Search(self._call_index)
        try:
            with under(search):
                ForwardCall(self._model)(
                    torch.full_like(positions, TOKEN_ID)[None],
                    positions[None],
                    torch.zeros(1, dtype=torch.long, device=positions.device),
                    CaptureCache(),
                )
        except _FoundError as found:
            return found.call
        raise RopeOutOfReachError("the model ran to its end without it")


class _FoundError(Exception):
    """Ends the forward."""

    def __init__(self, call: ApplyCall) -> None:
        super().__init__()
        self.call = call


class _Search:
    """A forward that ends at an apply call."""

    def __init__(self, call_index: int) -> None:
        self._calls_left = call_index

    def rotated(
        self, tap: RotaryTap, args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        """End at the call."""
        if self._calls_left == 0:
            raise _FoundError(ApplyCall(tap.apply, args, options, as_tuple(result)))
        self._calls_left -= 1

    def cached(self, layer_index: int, key: Tensor, value: Tensor) -> NoReturn:  # noqa: ARG002
        """Give up: later layers are not searched."""
        raise RopeOutOfReachError(f"layer {layer_index} is cached before it")

    def attend(self, *_args: Any) -> NoReturn:
        """Give up, as above."""
        raise RopeOutOfReachError("the model attends before it")

    def masked(self, _allowed: Any) -> None:
        """Nothing is attended to."""
