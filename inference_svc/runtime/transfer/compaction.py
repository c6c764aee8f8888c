"""Compaction in place: after a discard a sequence's tokens move up, re-embedded at new positions.

One pass, layer by layer, piece by piece from the front. A token never moves to a higher slot, so
that a piece may overwrite tokens which were read before. This holds in a layer with a window, too:
the first token that it holds stays in the first slot. On pages, where such tokens reuse the same
pages in turn, they are all read first. A piece goes through scratch memory that fits a core's
cache, in float32 for every dtype of the KV: the embedding at the old position is undone, the one at
the new position is applied, and the result is rounded once.

The modes of a model's positions (`recipes.Calibration.positions`):

    decoupled   tokens move and are re-embedded
    coupled     tokens do not move: those behind the first dropped one are lost
    naive       tokens move as they are, at the price of wrong positions (for comparison only)

Source: CachedAttention, section 3.4 (positions decoupled from stored keys).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.core.ranges import Range, num_in
from inference_svc.core.scheduling.held_slots import PageCopy
from inference_svc.runtime.kv.copy_stream import CopyStream
from inference_svc.runtime.kv.layer_tensors import TokenTensors
from inference_svc.runtime.kv.paged_kv import PagedKv
from inference_svc.runtime.kv.sequence_kv import SequenceKv
from inference_svc.runtime.memory import ThreadScratch
from inference_svc.runtime.positions.recipes import Calibration, ScaledRotary
from inference_svc.runtime.positions.rotary import RotaryTable
from inference_svc.runtime.worker_thread import WorkerThread

PIECE_ITEMS = 1 << 18  # elements moved at once: 1 MiB in float32
MOST_GAP = 64  # adjacent dropped tokens that a piece may include: cheaper than one piece more


def can_compact(calibration: Calibration) -> bool:
    """Whether a model's cached KV can be compacted after a discard.

    It can if tokens can move to other positions, or if those before the discard stay valid. It
    cannot if the model has a state: that depends on the dropped tokens.
    """
    if calibration.state_shapes:
        return False
    if calibration.positions != "decoupled":
        return True
    return all(part.can_move for layer in calibration.layers for part in layer.components)


class Compactor:
    """Compacts sequences of one model on a copy thread, while other sequences are computed."""

    def __init__(self, calibration: Calibration, thread: WorkerThread) -> None:
        """Keep the model's calibration and the thread that copies."""
        self._calibration = calibration
        self._thread = thread

    async def compact(
        self, kv: SequenceKv, kept: Sequence[Range], copies: Sequence[PageCopy] = ()
    ) -> int:
        """Compact a sequence's KV as `compact_in_place` does.

        Args:
            kv: the sequence's KV; nothing else uses it.
            kept: runs of its tokens that stay, in order, not adjacent.
            copies: copies of pages that are shared with other sequences; the KV takes them first,
                in place of the shared pages.

        Returns:
            The number of tokens left; 0 if the model's KV cannot be compacted.
        """
        if not can_compact(self._calibration):
            return 0
        if isinstance(kv, PagedKv):
            await self._thread.run(kv.copy_shared_pages, copies)
        await self._thread.run(compact_in_place, kv, kept, self._calibration)
        return kv.num_tokens


def num_left(kept: Sequence[Range], calibration: Calibration) -> int:
    """Return how many tokens `compact_in_place` leaves."""
    if calibration.positions == "coupled":
        return kept[0][1] if kept and kept[0][0] == 0 else 0
    return num_in(kept)


@torch.inference_mode()
def compact_in_place(kv: SequenceKv, kept: Sequence[Range], calibration: Calibration) -> None:
    """Move the tokens of the kept runs to the front; set `kv.num_tokens` at the end.

    If this raises, the KV must not be used any more.

    Args:
        kv: the sequence's KV, from position 0 on; nothing else uses it.
        kept: runs of its tokens that stay, in order, not adjacent.
        calibration: the calibration of the model that computed them; `can_compact` holds for it.
    """
    left = num_left(kept, calibration)
    if calibration.positions != "coupled":
        stream = CopyStream(kv.device)
        with kv.hold(), stream.copies(behind_computing=True):
            Compaction(kv, kept, calibration).run()
        kv.begin_at(_num_before(kept, kv.window_from))
    kv.num_tokens = left


class Compaction:
    """The compaction of one sequence."""

    def __init__(self, kv: SequenceKv, kept: Sequence[Range], calibration: Calibration) -> None:
        """Prepare to move the kept runs of a sequence; see `compact_in_place`."""
        self._kv = kv
        self._kept = kept
        self._layers = calibration.layers
        self._embeds = calibration.positions == "decoupled"
        self._scratch = ThreadScratch(kv.device, torch.float32)
        self._plain = ThreadScratch(kv.device, kv.keys.dtype)
        # By the most tokens of a piece, and the first token that the layer holds.
        self._pieces: dict[tuple[int, int], list[_Piece]] = {}

    def run(self) -> None:
        """Move the tokens of all layers."""
        for layer_index, layer in enumerate(self._layers):
            parts = zip(layer.components, layer.shape.parts, strict=True)
            for tokens, (recipe, (heads, dim)) in zip(self._kv.components, parts, strict=False):
                mover = recipe.mover if self._embeds else None
                first = tokens.first_token(layer_index)
                read = self._reading(tokens, layer_index, first)
                num_gone = 0
                if not tokens.lies_by_position:  # slots are counted from the first held token
                    num_gone = first - _num_before(self._kept, first)
                for piece in self._pieces_of(max(1, PIECE_ITEMS // (heads * dim)), first):
                    old, place = read(piece.start, piece.num_tokens), piece.target + num_gone
                    with tokens.filling(layer_index, place, piece.num_left) as new:
                        self._move(old, new, piece, mover)

    def _reading(
        self, tokens: TokenTensors, layer_index: int, first: int
    ) -> Callable[[int, int], Tensor]:
        """Return a function that reads old tokens, given the first one and their number."""
        if not (first and tokens.lies_by_position):
            return partial(tokens.read, layer_index)
        held = tokens.read(layer_index, first, self._kv.num_tokens - first).clone()
        return lambda start, num_tokens: held.narrow(0, start - first, num_tokens)

    def _move(
        self, old: Tensor, new: Tensor, piece: "_Piece", mover: RotaryTable | ScaledRotary | None
    ) -> None:
        """Move a piece of a component, from and to [tokens, kv_heads, dim]."""
        if mover is None:
            moved = self._plain.take(*new.shape)
            if piece.chosen is None:
                moved.copy_(old)
            else:
                torch.index_select(old, 0, piece.chosen, out=moved)
            new.copy_(moved)
        elif piece.chosen is None:
            mover.move_into(old, piece.start, piece.target, new)
        else:  # dropped tokens between the kept ones are unrotated, too: one call for all runs
            both = self._scratch.take(piece.num_tokens + piece.num_left, *new.shape[1:])
            whole, chosen = both.split_with_sizes((piece.num_tokens, piece.num_left))
            mover.unrotate_into(old, piece.start, whole)
            torch.index_select(whole, 0, piece.chosen, out=chosen)
            mover.rotate_into(chosen, piece.target, new)

    def _pieces_of(self, max_tokens: int, first: int) -> "list[_Piece]":
        """Return the pieces of a layer that holds tokens from `first` on."""
        key = max_tokens, first
        if key not in self._pieces:
            held = [(max(start, first), end) for start, end in self._kept if end > first]
            target = _num_before(self._kept, first)
            self._pieces[key] = list(_pieces(held, max_tokens, self._kv.device, target))
        return self._pieces[key]


class _Piece(NamedTuple):
    """Tokens that are moved at once.

    Attributes:
        start: slot of the first token, which stays.
        num_tokens: number of tokens from there to the last one that stays.
        target: slot that the first token goes to.
        num_left: how many of the tokens stay.
        chosen: [num_left] int64, the tokens that stay, counted from `start`; None: all.
    """

    start: int
    num_tokens: int
    target: int
    num_left: int
    chosen: Tensor | None


def _num_before(kept: Sequence[Range], token: int) -> int:
    """Count the kept tokens before a token."""
    return num_in([(start, min(end, token)) for start, end in kept if start < token])


def _pieces(
    kept: Sequence[Range], max_tokens: int, device: torch.device, target: int = 0
) -> Iterator[_Piece]:
    """Group the kept runs that move into pieces.

    Args:
        kept: the kept runs, in order.
        max_tokens: most tokens of a piece, the gaps between its runs included.
        device: the device of `_Piece.chosen`.
        target: the slot that the first kept token goes to.
    """
    runs: list[Range] = []
    for run in _cut_long(kept, max_tokens):
        if runs and (run[1] - runs[0][0] > max_tokens or run[0] - runs[-1][1] > MOST_GAP):
            yield _piece(runs, target, device)
            target += num_in(runs)
            runs = []
        if not runs and run[0] == target:  # the run stays in its place
            target = run[1]
        else:
            runs.append(run)
    if runs:
        yield _piece(runs, target, device)


def _cut_long(kept: Sequence[Range], max_tokens: int) -> Iterator[Range]:
    """Cut runs that are longer than a piece."""
    for start, end in kept:
        for first in range(start, end, max_tokens):
            yield first, min(first + max_tokens, end)


def _piece(runs: Sequence[Range], target: int, device: torch.device) -> _Piece:
    """Make the piece of some kept runs, which goes to `target`."""
    start, end = runs[0][0], runs[-1][1]
    num_tokens, num_kept = end - start, num_in(runs)
    chosen = None
    if num_kept < num_tokens:
        kept = torch.cat([torch.arange(first - start, last - start) for first, last in runs])
        chosen = kept.to(device)
    return _Piece(start, num_tokens, target, num_kept, chosen)
