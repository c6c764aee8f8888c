"""ScoreKeeper: how much attention each token of a sequence got; what compression policies go by.

Kernels return no weights, so they are computed a second time, for sequences that are to be
compressed only: query·key products of each attention call, softmax over the visible keys, summed
over queries, heads and calls into one float32 number per token. The demo model's prefill of 1,500
tokens (float32, one thread) takes 1.06 of its time with a window of 32 queries, 1.56 with all
(`docs/compression.md`): all queries' weights cost as much as attention itself.

What counts:
- "window": the prompt's last `window_tokens` queries. Those of earlier chunks are held until the
  prompt's last chunk brings the keys that they are judged with;
- "accumulated": every query that is computed while the keeper lives: of one turn. Keys of a history
  that was loaded are scored, its queries are not known.

Invariants: 1. a query counts once: a step that failed, or whose history never arrived, leaves no
trace, as nothing counts before `commit`; nor do queries that are computed again; 2. score i is
that of token slot i, also after a discard.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from inference_svc.core.discards import Range, kept_runs, position_after
from inference_svc.runtime.attention.softmax_attention import AttentionOptions, tiles, visible_mask

TILE_TOKENS = 64  # query rows whose weights are held together, in a cache if there is room
MAX_WEIGHTS = 2**22  # elements of them: 16 MiB


class ScoreKeeper:
    """Scores of one sequence in one turn; see the module docstring.

    Belongs to a request. `note` and `commit` are called by the compute thread while a step runs,
    the others between steps.
    """

    def __init__(
        self, needs: Literal["window", "accumulated"], window_tokens: int, prompt_tokens: int
    ) -> None:
        """Begin without scores.

        Args:
            needs: which queries count; see the module docstring.
            window_tokens: number of queries at the prompt's end that count; for "window" only.
            prompt_tokens: position after the prompt's last token.
        """
        self._is_window = needs == "window"
        self._window_tokens = window_tokens
        self._prompt_tokens = prompt_tokens
        self._end = 0  # position after the last query that counted
        self._sums = torch.zeros(0)  # [_end]
        self._held: dict[int, Tensor] = {}  # by call: [heads, queries up to `_end`, dim]
        self._last_call: int | None = None  # of the last step; None: it is of no use any more
        self._new_end = 0
        self._new_sums = torch.zeros(0)
        self._new_held: dict[int, Tensor] = {}

    @torch.inference_mode()
    def note(
        self, call: int, query: Tensor, keys: Tensor, options: AttentionOptions, first_token: int
    ) -> None:
        """Take the queries of one attention call of a step; counted by `commit`.

        Args:
            call: number of the call in its forward, from 0 on.
            query: [heads, tokens, dim], after RoPE.
            keys: [kv_heads, keys, dim], after RoPE, up to that of the last query; those are missing
                which a layer with a window does not hold any more.
            options: scale, softcap, sinks and window of the call.
            first_token: position of the first query.
        """
        length = first_token + query.shape[1]
        if self._is_window and self._end >= self._prompt_tokens:
            return
        if self._last_call is None or call <= self._last_call:
            self._begin(length, query.device)
        self._last_call = call
        query = query[:, max(0, self._end - first_token) :]
        if self._is_window:
            query = self._window(call, query, first_token, length)
            if length < self._prompt_tokens:
                self._new_held[call] = query.clone()
                return
        query = query[:, max(0, query.shape[1] - keys.shape[1]) :]
        if query.shape[1]:
            add_weights(self._new_sums, query, keys, options)

    @torch.inference_mode()
    def commit(self) -> None:
        """Count what the step noted: it succeeded, and its history is certain."""
        if self._last_call is not None and self._new_end > self._end:
            self._new_sums[: self._end] += self._sums
            self._end, self._sums, self._held = self._new_end, self._new_sums, self._new_held

    def scores(self) -> list[float] | None:
        """Return the score of each of the first tokens; None if no query has counted.

        Those beyond are tokens that no counted query saw: for a "window", all after the prompt.
        """
        if not self._end or (self._is_window and self._end < self._prompt_tokens):
            return None
        found: list[float] = self._sums.tolist()
        return found

    @torch.inference_mode()
    def discard(self, ranges: Sequence[Range]) -> None:
        """Follow a discard of merged ranges.

        Held queries are dropped: their distances to the keys before a dropped range have changed.
        """
        runs = kept_runs(ranges, self._sums.shape[0])
        pieces = [self._sums[start:end] for start, end in runs]
        self._sums = torch.cat(pieces) if pieces else self._sums[:0]
        self._end = position_after(self._end, ranges)
        self._prompt_tokens = position_after(self._prompt_tokens, ranges)
        self._held, self._last_call = {}, None

    def _begin(self, length: int, device: torch.device) -> None:
        """Begin a step, and forget one that was not committed."""
        self._new_end = length
        self._new_sums = torch.zeros(length, device=device)
        self._new_held = {}

    def _window(self, call: int, query: Tensor, first_token: int, length: int) -> Tensor:
        """Return the last queries up to `length` that are in the prompt's window, without gaps.

        Both are [heads, queries, dim].
        """
        held = self._held.get(call)
        if held is not None and first_token <= self._end:
            query = torch.cat((held, query), dim=1)
        num_wanted = length - max(0, self._prompt_tokens - self._window_tokens)
        return query[:, query.shape[1] - min(max(0, num_wanted), query.shape[1]) :]


def keeper_for(
    needs: Literal["nothing", "window", "accumulated"], window_tokens: int, prompt_tokens: int
) -> ScoreKeeper | None:
    """Make the score keeper for a turn whose compression needs these scores; None: it needs none.

    Args:
        needs: what its policy needs.
        window_tokens: see ScoreKeeper.
        prompt_tokens: likewise.
    """
    return None if needs == "nothing" else ScoreKeeper(needs, window_tokens, prompt_tokens)


def add_weights(sums: Tensor, query: Tensor, keys: Tensor, options: AttentionOptions) -> None:
    """Add the attention weights of a sequence's last tokens, summed over them and all heads.

    Args:
        sums: [tokens of the sequence] float32, changed in place.
        query: [heads, tokens, dim], of the last tokens.
        keys: [kv_heads, length, dim], of as many last tokens; see `ScoreKeeper.note`.
        options: scale, softcap, sinks and window of the call; a sink takes its part of the weight.
    """
    num_heads, num_tokens = query.shape[:2]
    length, first = keys.shape[1], len(sums) - keys.shape[1]
    sums = sums[first:]
    tile_tokens = max(1, min(TILE_TOKENS, MAX_WEIGHTS // (num_heads * length)))
    for new, seen in tiles(num_tokens, length, tile_tokens, options, first):
        sums[seen] += _tile_weights(query[:, new], keys[:, seen], options)


def _tile_weights(query: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    """Return [length]: the weights of the last tokens, which are held all at once."""
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
    elif num_tokens > 1:  # all see what is before the tile
        visible = visible_mask(num_tokens, num_tokens, None, query.device)
        scores[..., length - num_tokens :].masked_fill_(~visible, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(num_heads, 1, 1).expand(-1, num_tokens, 1)
        scores = torch.cat((scores.float(), sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    weights = weights.view(num_heads * num_tokens, -1)[:, :length]
    return weights.new_ones(len(weights)) @ weights  # a product: 0.8 of the time of a sum
