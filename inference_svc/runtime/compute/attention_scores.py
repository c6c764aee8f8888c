"""ScoreKeeper: how much attention each token of a sequence has received, for compression policies.

Attention kernels return no weights. So they are computed a second time, only for sequences that
will be compressed: query·key products of each attention call, softmax over the visible keys, summed
over queries, heads and calls into one float32 number per token. The demo model's prefill of 1,500
tokens (float32, one thread) takes 1.06 times as long with a window of 32 queries, and 1.56 times as
long with all (`docs/compression.md`): the weights of all queries cost as much as attention itself.

Which queries count:
- "window": the prompt's last `window_tokens` queries. Queries of earlier chunks are held until the
  prompt's last chunk, because they are compared with all keys of the prompt;
- "accumulated": every query computed while the keeper lives, which is one turn. The keys of a
  loaded history are scored; its queries are not known.

Invariants:
1. a query counts once. Nothing counts before `commit`, so a step that failed, or whose history
   never arrived, leaves no trace; queries that are computed again do not count again;
2. score i belongs to token slot i, also after a discard.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from inference_svc.core.ranges import Range, kept_runs, position_after
from inference_svc.runtime.attention.softmax_attention import AttentionOptions, tiles, visible_mask

TILE_TOKENS = 64  # query rows per tile, so that a tile's weights fit into a CPU cache if possible
MAX_WEIGHTS = 2**22  # weights of one tile at most: 16 MiB


class ScoreKeeper:
    """The attention scores of one sequence in one turn.

    Belongs to a request. The compute thread calls `note` and `commit` while a step runs; the other
    methods are called between steps.
    """

    def __init__(
        self, needs: Literal["window", "accumulated"], window_tokens: int, prompt_tokens: int
    ) -> None:
        """Start without scores.

        Args:
            needs: which queries count; see the module docstring.
            window_tokens: number of queries at the prompt's end that count ("window" only).
            prompt_tokens: position after the prompt's last token.
        """
        self._is_window = needs == "window"
        self._window_tokens = window_tokens
        self._prompt_tokens = prompt_tokens
        self._end = 0  # position after the last query that has counted
        self._sums = torch.zeros(0)  # [_end]
        self._held: dict[int, Tensor] = {}  # by call: [heads, queries up to `_end`, dim]
        # The last step's last call; None: nothing of that step may be committed any more.
        self._last_call: int | None = None
        self._new_end = 0
        self._new_sums = torch.zeros(0)
        self._new_held: dict[int, Tensor] = {}

    @torch.inference_mode()
    def note(
        self, call: int, query: Tensor, keys: Tensor, options: AttentionOptions, first_token: int
    ) -> None:
        """Add the queries of one attention call of a step; `commit` makes them count.

        Args:
            call: index of the call in its forward, from 0 on.
            query: [heads, tokens, dim], after RoPE.
            keys: [kv_heads, keys, dim], after RoPE, up to the last query's; without the first ones
                where a layer with a window no longer holds them.
            options: scale, softcap, sinks and window of the call.
            first_token: position of the first query.
        """
        length = first_token + query.shape[1]
        if self._is_window and self._end >= self._prompt_tokens:
            return
        if self._last_call is None or call <= self._last_call:  # the first call of a new step
            self._begin_step(length, query.device)
        self._last_call = call
        query = query[:, max(0, self._end - first_token) :]
        if self._is_window:
            query = self._window_queries(call, query, first_token, length)
            if length < self._prompt_tokens:
                self._new_held[call] = query.clone()
                return
        query = query[:, max(0, query.shape[1] - keys.shape[1]) :]
        if query.shape[1]:
            add_weights(self._new_sums, query, keys, options)

    @torch.inference_mode()
    def commit(self) -> None:
        """Count the step's queries: the step succeeded, and its history has arrived."""
        if self._last_call is not None and self._new_end > self._end:
            self._new_sums[: self._end] += self._sums
            self._end, self._sums, self._held = self._new_end, self._new_sums, self._new_held

    def scores(self) -> list[float] | None:
        """Return the scores of the first tokens, [tokens]; None if no query has counted.

        Later tokens were not seen by any counted query: with "window", all after the prompt.
        """
        if not self._end or (self._is_window and self._end < self._prompt_tokens):
            return None
        found: list[float] = self._sums.tolist()
        return found

    @torch.inference_mode()
    def discard(self, ranges: Sequence[Range]) -> None:
        """Remove the scores of discarded tokens.

        Held queries are dropped: their distances to the keys before a discarded range have changed.

        Args:
            ranges: the discarded token positions, merged and in order.
        """
        runs = kept_runs(ranges, self._sums.shape[0])
        pieces = [self._sums[start:end] for start, end in runs]
        self._sums = torch.cat(pieces) if pieces else self._sums[:0]
        self._end = position_after(self._end, ranges)
        self._prompt_tokens = position_after(self._prompt_tokens, ranges)
        self._held, self._last_call = {}, None

    def _begin_step(self, length: int, device: torch.device) -> None:
        """Begin a step, and forget the one before if it was not committed."""
        self._new_end = length
        self._new_sums = torch.zeros(length, device=device)
        self._new_held = {}

    def _window_queries(self, call: int, query: Tensor, first_token: int, length: int) -> Tensor:
        """Return the last queries up to `length` that are in the prompt's window, without gaps.

        Queries are [heads, queries, dim], in the arguments and in the result.
        """
        held = self._held.get(call)
        if held is not None and first_token <= self._end:
            query = torch.cat((held, query), dim=1)
        num_wanted = length - max(0, self._prompt_tokens - self._window_tokens)
        return query[:, query.shape[1] - min(max(0, num_wanted), query.shape[1]) :]


def keeper_for(
    needs: Literal["nothing", "window", "accumulated"], window_tokens: int, prompt_tokens: int
) -> ScoreKeeper | None:
    """Make the score keeper of a turn; None if its compression policy needs no scores.

    Args:
        needs: which scores the policy needs.
        window_tokens: see ScoreKeeper.
        prompt_tokens: see ScoreKeeper.
    """
    return None if needs == "nothing" else ScoreKeeper(needs, window_tokens, prompt_tokens)


def add_weights(sums: Tensor, query: Tensor, keys: Tensor, options: AttentionOptions) -> None:
    """Add the attention weights of a sequence's last tokens, summed over these tokens and heads.

    Args:
        sums: [tokens of the sequence] float32, changed in place.
        query: [heads, tokens, dim] of the last tokens.
        keys: [kv_heads, length, dim] of the last `length` tokens; see `ScoreKeeper.note`.
        options: scale, softcap, sinks and window of the call; a sink takes its part of the weight.
    """
    num_heads, num_tokens = query.shape[:2]
    length, first = keys.shape[1], len(sums) - keys.shape[1]
    sums = sums[first:]
    tile_tokens = max(1, min(TILE_TOKENS, MAX_WEIGHTS // (num_heads * length)))
    for new, seen in tiles(num_tokens, length, tile_tokens, options, first):
        sums[seen] += _tile_weights(query[:, new], keys[:, seen], options)


def _tile_weights(query: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    """Return the weights of one tile, summed over queries and heads, [length]."""
    num_heads, num_tokens, dim = query.shape
    kv_heads, length = keys.shape[:2]
    scale = dim**-0.5 if options.scale is None else options.scale
    grouped = (query * scale).reshape(kv_heads, -1, dim)  # [kv_heads, group * tokens, dim]
    scores = torch.matmul(grouped, keys.transpose(1, 2)).view(num_heads, num_tokens, length)
    if options.softcap is not None:
        scores = torch.tanh(scores.float() / options.softcap) * options.softcap
    if options.window is not None and options.window < length:
        visible = visible_mask(num_tokens, length, options.window, query.device)
        scores.masked_fill_(~visible, float("-inf"))
    elif num_tokens > 1:  # every query sees all keys before the tile
        visible = visible_mask(num_tokens, num_tokens, None, query.device)
        scores[..., length - num_tokens :].masked_fill_(~visible, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(num_heads, 1, 1).expand(-1, num_tokens, 1)
        scores = torch.cat((scores.float(), sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    weights = weights.view(num_heads * num_tokens, -1)[:, :length]
    return weights.new_ones(len(weights)) @ weights  # 0.8 of the time of weights.sum(0)
