"""Part `rotation`: how exact keys are at new positions, by how they get there.

The real keys of a model, of a text that fills the window once, lose their oldest neighbours several
times and move to the front each time. They get there in one of these ways:

    before rope      stored before RoPE, embedded once by the model's own arithmetic
    double rotation  stored after RoPE; each time rotated back, and embedded again
    single turn      stored after RoPE; each time rotated by the difference, in float32, and
                     rounded once

and are compared with two references: keys embedded in float64, and those that the model itself
computes at the new positions in its dtype. Keys before RoPE are taken as exact, rounded to the
dtype.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from inference_svc.core.errors import UnsupportedModelError
from inference_svc.eval.eval_model import EvalModel, UnusableTextError, load_text
from inference_svc.eval.figures import RotationError, RotationReport
from inference_svc.eval.options import RotationOptions, Truncation, check_truncation, dropped
from inference_svc.eval.sequence import Sequence as Context
from inference_svc.runtime.positions.rotary import RotaryTable
from shared.types.errors import InvalidInputError

LEAST_LENGTH = 1e-30  # of a key; avoids a division by zero
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Takes the table in a dtype, keys before RoPE [n, heads, dim] in this dtype, and the positions of
# the first key before each truncation and after the last; returns keys at the last position.
Way = Callable[[RotaryTable, Tensor, list[int]], Tensor]


def measure_rotation(model: EvalModel, options: RotationOptions) -> RotationReport:
    """Compare all ways in all dtypes after 1, 2, 4, … truncations.

    Args:
        model: loaded in float32.
        options: options of this part.

    Raises:
        UnusableTextError: the text does not fill the window.
        InvalidInputError: so many truncations leave no key.
        UnsupportedModelError: no layer of the model has rotary keys.
    """
    window = model.window_tokens
    truncation = Truncation(options.ratio, sink_tokens=0)
    check_truncation(truncation, window)
    (_, drop) = dropped(truncation, window)[0]
    if options.num_moves * drop >= window:
        raise InvalidInputError(
            f"{options.num_moves} truncations of {drop} tokens leave nothing of a window of "
            f"{window}",
            "give fewer --moves or a smaller --ratio",
        )
    layers = list(_rotary_keys(model, options, window))
    if not layers:
        raise UnsupportedModelError(
            f"{model.loaded.name} has no rotary keys", "measure another model"
        )
    moves = [1 << i for i in range(options.num_moves.bit_length())]
    errors = [
        error_of(name, dtype, num_moves, drop, layers)
        for dtype in DTYPES
        for num_moves in moves
        for name in WAYS
    ]
    num_keys = sum(keys.shape[0] * keys.shape[1] for _, keys in layers)
    return RotationReport(options.text.name, num_keys, window, drop, tuple(errors))


def error_of(
    way: str,
    dtype: torch.dtype,
    num_moves: int,
    dropped_tokens: int,
    layers: list[tuple[RotaryTable, Tensor]],
) -> RotationError:
    """Measure one way over all layers: (table, keys before RoPE [n, heads, dim] float32) each."""
    to_exact, to_own = [], []
    for table, keys in layers:
        first = num_moves * dropped_tokens
        places = list(range(first, -1, -dropped_tokens))
        free = keys[first:].to(dtype)
        exact = table.with_dtypes(torch.float32, torch.float64).rotate(free.double(), 0)
        in_dtype = table.with_dtypes(dtype, dtype)
        found = WAYS[way](in_dtype, free, places)
        to_exact.append(_relative(found, exact))
        to_own.append(_relative(found, in_dtype.rotate(free, 0)))
    all_exact, all_own = torch.cat(to_exact), torch.cat(to_own)
    return RotationError(
        way=way,
        dtype=str(dtype).removeprefix("torch."),
        num_moves=num_moves,
        root_mean_square=float(all_exact.square().mean().sqrt()),
        largest=float(all_exact.max()),
        to_own=float(all_own.square().mean().sqrt()),
    )


def _rotary_keys(
    model: EvalModel, options: RotationOptions, window: int
) -> Iterator[tuple[RotaryTable, Tensor]]:
    """Yield each rotary component's table and the text's keys before RoPE, [window, heads, dim]."""
    token_ids = load_text(options.text, model).token_ids[:window]
    if len(token_ids) < window:
        raise UnusableTextError(
            f"{options.text} has {len(token_ids)} tokens, which are fewer than the window of "
            f"{window}",
            "give a longer text or a smaller --window",
        )
    with Context(model, "ca") as context:
        context.feed(token_ids, want="none")
        for recipe, free in context.stored_kv():
            if recipe.rotary is not None:
                yield recipe.rotary, free.clone()


def _before_rope(table: RotaryTable, free: Tensor, places: list[int]) -> Tensor:
    return table.rotate(free, places[-1])


def _double_rotation(table: RotaryTable, free: Tensor, places: list[int]) -> Tensor:
    keys = table.rotate(free, places[0])
    for old, new in pairwise(places):
        back = torch.empty_like(keys)
        table.unrotate_into(keys, old, back)
        keys = table.rotate(back, new)
    return keys


def _single_turn(table: RotaryTable, free: Tensor, places: list[int]) -> Tensor:
    keys = table.rotate(free, places[0])
    for old, new in pairwise(places):
        turned = torch.empty_like(keys)
        table.move_into(keys, old, new, turned)
        keys = turned
    return keys


WAYS: dict[str, Way] = {
    "before rope": _before_rope,
    "double rotation": _double_rotation,
    "single turn": _single_turn,
}


def _relative(found: Tensor, truth: Tensor) -> Tensor:
    """Return the relative distance of each key, [n * heads]; 0 for a key of zeros."""
    distance = torch.linalg.vector_norm(found.double() - truth.double(), dim=-1)
    length = torch.linalg.vector_norm(truth.double(), dim=-1).clamp_min(LEAST_LENGTH)
    relative: Tensor = (distance / length).flatten()
    return relative
