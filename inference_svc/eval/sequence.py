"""One context in the working KV, truncated by one of the methods.

It consists of the service's parts without the engine: tokens are fed through a `ModelRunner` into
KV, and a discard changes the KV as its method says. Nothing is saved or loaded; "ca" keeps the KV
that a save would store in a write buffer, and embeds it again as a load would.

Invariants: 1. the sequence KV is that of `context_ids`, in this order; 2. so is the content of the
write buffer, if the method has one; 3. it is used by one thread only.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor

from inference_svc.core.ranges import Range, kept_runs, merge_ranges, without
from inference_svc.eval.edits import Edit, MeasuredMode
from inference_svc.eval.eval_model import EvalModel
from inference_svc.eval.options import Method, positions_of
from inference_svc.runtime.calibration.sinks import embed_kept
from inference_svc.runtime.compute.attention_scores import ScoreKeeper
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.kv.sequence_kv import WriteBuffer
from inference_svc.runtime.positions.recipes import ComponentRecipe
from inference_svc.runtime.transfer.compaction import compact_in_place

PIECE_TOKENS = 512  # tokens fed at once: 256 MiB of logits with a vocabulary of 128 thousand


class Sequence:
    """One context. A context manager: its KV is released at the end.

    Attributes:
        kv: the sequence's KV.
        stored: the write buffer that a save would store; None: the method needs none.
        context_ids: the tokens that were fed and not dropped.
        num_computed: number of tokens that went through the model so far, with recomputed ones: the
            cost.
    """

    def __init__(self, model: EvalModel, method: Method) -> None:
        """Begin with an empty context."""
        positions = positions_of(method)
        self._method = method
        self._pool = model.pool
        self._runner = model.runners[positions]
        self._calibration = model.calibrations[positions]
        self.kv = model.pool.new_kv(model.window_tokens)
        self.stored = (
            model.pool.new_write_buffer(0, model.window_tokens) if method == "ca" else None
        )
        self.context_ids: list[int] = []
        self.num_computed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._pool.release(self.kv)
        if self.stored is not None:
            self._pool.release(self.stored)

    def feed(
        self,
        token_ids: Items[int],
        *,
        want: Literal["all", "last", "none"] = "all",
        scores: ScoreKeeper | None = None,
    ) -> Tensor:
        """Append tokens to the context, which has to have room for them.

        Args:
            token_ids: the tokens, at least one.
            want: the tokens after which logits are returned.
            scores: records the attention that tokens receive.

        Returns:
            [n, vocab] float32, the logits after these tokens.
        """
        logits = []
        for first in range(0, len(token_ids), PIECE_TOKENS):
            piece = list(token_ids[first : first + PIECE_TOKENS])
            is_last = want == "last" and first + len(piece) == len(token_ids)
            chunk = Chunk(
                self.kv,
                piece,
                want_logits=is_last,
                write_buffer=self.stored,
                scores=scores,
                want_all=want == "all",
            )
            logits.append(self._runner.step([chunk]))
            if scores is not None:
                scores.commit()
        self.context_ids += token_ids
        self.num_computed += len(token_ids)
        return torch.cat(logits)

    def discard(self, ranges: Items[Range]) -> None:
        """Drop ranges of the context; the others move together as the method requires.

        Raises:
            InvalidDiscardError: a range is empty or outside the context.
        """
        merged = merge_ranges(ranges, len(self.context_ids))
        kept = kept_runs(merged, len(self.context_ids))
        left = without(self.context_ids, merged)
        if self._method in {"tt", "of"}:
            self.rewind(0 if self._method == "tt" else merged[0][0])
            again = left[len(self.context_ids) :]
            if again:
                self.feed(again, want="none")
            return
        if self.stored is None:
            compact_in_place(self.kv, kept, self._calibration)
        else:
            compact(self.stored, kept)
            whole = [(0, self.stored.end_token)]
            embed_kept(self.stored, whole, self.kv, self._calibration)
        self.context_ids = left

    def stored_kv(self) -> Iterator[tuple[ComponentRecipe, Tensor]]:
        """Yield each component's recipe and tokens before RoPE, [tokens, heads, dim]; for "ca"."""
        stored = self.stored
        if stored is None:
            raise AssertionError(f"{self._method} keeps no keys before RoPE")
        for index, recipe in enumerate(self._calibration.layers):
            for component, tensors in zip(recipe.components, stored.components, strict=False):
                yield component, tensors[index][: stored.end_token]

    @torch.inference_mode()
    def copy_from(self, other: "Sequence") -> None:
        """Copy the context and KV of another sequence with the same method."""
        self.context_ids = list(other.context_ids)
        num_tokens = self.kv.num_tokens = other.kv.num_tokens
        pairs = [
            (ours.cut(0, num_tokens), theirs.cut(0, num_tokens))
            for ours, theirs in zip(self.kv.components, other.kv.components, strict=True)
        ]
        if self.stored is not None and other.stored is not None:
            self.stored.end_token = num_tokens
            pairs += [
                (ours.cut(0, num_tokens), theirs.cut(0, num_tokens))
                for ours, theirs in zip(
                    self.stored.components, other.stored.components, strict=True
                )
            ]
        for ours, theirs in pairs:
            torch._foreach_copy_(list(ours), list(theirs))

    @torch.inference_mode()
    def adopt(self, other: "Sequence", run: Range, *, moves: bool = True) -> None:
        """Append tokens of another context with their KV there; both of method "ca".

        Args:
            other: the other context.
            run: range of positions there; not empty, and with room here.
            moves: whether keys are embedded at their new positions, as a load does; else at the old
                ones, which are wrong here.
        """
        ours, theirs = self.stored, other.stored
        if ours is None or theirs is None:
            raise AssertionError("tokens without keys before RoPE are adopted")
        start, end = run
        first, new_end = self.kv.num_tokens, self.kv.num_tokens + end - start
        for index, recipe in enumerate(self._calibration.layers):
            for component, cached, kept, given in zip(
                recipe.components,
                self.kv.components,
                ours.components,
                theirs.components,
                strict=False,
            ):
                free = given[index][start:end]  # [tokens, kv_heads, dim]
                with cached.filling(index, first, end - start) as target:
                    target.copy_(component.embed(free, first if moves else start))
                kept[index][first:new_end] = free
        self.kv.num_tokens = ours.end_token = new_end
        self.context_ids += other.context_ids[start:end]

    def apply_edit(self, other: "Sequence", edit: Edit, mode: MeasuredMode) -> None:
        """Build the edited form of another context in this empty one; both of method "ca".

        From front to back: computed tokens attend to all tokens before them.

        Args:
            other: the context before the edit.
            edit: the edit.
            mode: how the KV behind the edit is treated.
        """
        pending: list[int] = []
        for (start, end), new_ids in edit.runs(len(other.context_ids)):
            healed = end if mode.healed_tokens is None else start + mode.healed_tokens
            seam_end = min(healed, end) if start else 0
            pending += other.context_ids[start:seam_end]
            if seam_end < end:
                if pending:
                    self.feed(pending, want="none")
                self.adopt(other, (seam_end, end), moves=mode.moves)
                pending = []
            pending += new_ids
        if pending:
            self.feed(pending, want="none")

    def rewind(self, num_tokens: int) -> None:
        """Drop all tokens but the first; nothing is moved or recomputed."""
        self.kv.num_tokens = num_tokens
        if self.stored is not None:
            self.stored.end_token = num_tokens
        del self.context_ids[num_tokens:]


def compact(stored: WriteBuffer, kept: Items[Range]) -> None:
    """Move kept tokens of a buffer to its front, from position 0 on; its keys have no positions."""
    index = torch.cat([torch.arange(start, end) for start, end in kept] or [torch.arange(0)])
    index = index.to(stored.device)
    for tensors in stored.components:
        for layer in tensors.layers:
            layer[: len(index)] = layer.index_select(0, index)
    stored.end_token = len(index)
