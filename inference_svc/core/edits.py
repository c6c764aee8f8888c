"""Edits: which KV can be kept when a client has edited its conversation. Pure.

An edited conversation continues in a session of its own. The tokens before the edit are the same as
in the session that it resembles, and are shared with it. Behind the edit whole messages may be the
same. Their tokens are *kept runs*: their KV may be kept although it was computed over tokens that
are gone. A kept run begins at a *seam*. The setting `reuse.edits` decides:

    exact     nothing is kept behind the first edit: the answer is that of recomputation
    keep      kept runs are kept as they are
    heal:k    the first k tokens of each kept run are computed again

Messages are matched by the heaviest common subsequence: in order, with the most tokens in total.
Each kept run costs a pass through the queue, so that only the largest few are kept, and no short
ones.

*Source:* CacheBlend (EuroSys'25) recomputes some tokens of KV that is put together; the first ones
behind a seam deviate most: EPIC (arXiv 2410.15332).
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from inference_svc.core.context import Context
from inference_svc.core.scheduling.prefix_index import common_prefix
from inference_svc.core.truncation import FrameTokens

MOST_RUNS = 4  # in one turn: a turn is computed up to each seam, saved and loaded again
MOST_HEALED = 4096  # tokens behind each seam
MOST_PAIRS = 65_536  # pairs of equal messages; of more only the longest count
Span = tuple[int, int]


class EditMode(StrEnum):
    """What is kept behind an edit; see the module docstring."""

    EXACT = "exact"
    KEEP = "keep"
    HEAL = "heal"


@dataclass(frozen=True)
class EditPolicy:
    """A mode, and the number of tokens that are healed behind each seam."""

    mode: EditMode = EditMode.EXACT
    heal_tokens: int = 0

    @property
    def keeps(self) -> bool:
        """Whether any KV is kept behind an edit."""
        return self.mode is not EditMode.EXACT


_NAMED = re.compile(r"exact|keep|heal:([1-9]\d{0,3})")


def edit_policy(text: str) -> EditPolicy:
    """Parse the setting `reuse.edits`.

    Raises:
        ValueError: it is none of "exact", "keep", "heal:k"; the message names them.
    """
    found = _NAMED.fullmatch(text)
    heal_tokens = int(found[1]) if found and found[1] else 0
    if found is None or heal_tokens > MOST_HEALED:
        raise ValueError(f'write "exact", "keep", or "heal:k" with k from 1 to {MOST_HEALED}')
    return EditPolicy(EditMode(text.partition(":")[0]), heal_tokens)


@dataclass(frozen=True, order=True)
class KeptRun:
    """A run of tokens that a context has in common with another one.

    Attributes:
        start: position of the first token.
        source_start: its position in the other context.
        num_tokens: number of tokens.
        healed_tokens: number of tokens right before them that both contexts have as well, and that
            are computed again.
    """

    start: int
    source_start: int
    num_tokens: int
    healed_tokens: int = 0

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + self.num_tokens

    @property
    def source_end(self) -> int:
        """Position behind the last token in the other context."""
        return self.source_start + self.num_tokens

    def behind(self, start: int, source_start: int) -> "KeptRun":
        """Return the part of the run behind both positions; it may be empty."""
        num_cut = max(0, start - self.start, source_start - self.source_start)
        num_cut = min(num_cut, self.num_tokens)
        return KeptRun(self.start + num_cut, self.source_start + num_cut, self.num_tokens - num_cut)


def runs_to_keep(
    old: Context, new: Context, frames: FrameTokens, policy: EditPolicy, least_tokens: int
) -> list[KeptRun]:
    """Choose the runs of a new context whose KV is kept from an old one; [] if there are none.

    Args:
        old: the context of the session that the new one resembles.
        new: the new context, with all of a turn's input.
        frames: the special tokens that begin messages.
        policy: what is kept, and how much of it is healed.
        least_tokens: runs that are shorter after healing are computed instead.
    """
    if not policy.keeps:
        return []
    num_exact = exact_tokens(old, new)
    end = len(new.token_ids) - 1  # the last token is always computed
    found = []
    for run in common_runs(old, new, frames):
        is_prefix = run.start == run.source_start == 0
        left = run.behind(max(1, num_exact), 0)
        healed = 0 if is_prefix else min(policy.heal_tokens, left.num_tokens)
        most = min(end - left.start, old.computed_tokens - left.source_start) - healed
        num_tokens = min(left.num_tokens - healed, most)
        if num_tokens >= max(1, least_tokens):
            kept = (left.start + healed, left.source_start + healed, num_tokens)
            found.append(KeptRun(*kept, healed))
    largest = sorted(found, key=lambda run: run.num_tokens, reverse=True)[:MOST_RUNS]
    return sorted(largest)


def exact_tokens(old: Context, new: Context) -> int:
    """Count the first tokens of a new context that have the same KV as in an old one."""
    num_common = common_prefix(old.token_ids, new.token_ids)
    lineages = (old.lineage, new.lineage)
    return min([num_common, *(each.clean_tokens for each in lineages if not each.is_whole)])


def common_runs(old: Context, new: Context, frames: FrameTokens) -> list[KeptRun]:
    """Find the runs of tokens that two contexts have in common, in order, by whole messages.

    The first run is the common prefix, whether or not it ends with a message, unless it is empty.
    Cost: O(tokens) and O(pairs of equal messages * log).
    """
    num_common = common_prefix(old.token_ids, new.token_ids)
    ours, theirs = (_messages(context, frames) for context in (new, old))
    num_before = common_prefix(ours, theirs)
    while num_before and ours[num_before - 1][1] > num_common:
        num_before -= 1
    ours, theirs = ours[num_before:], theirs[num_before:]
    runs = [KeptRun(0, 0, num_common)] if num_common else []
    for mine, other in _heaviest(_pairs(new, ours, old, theirs)):
        last = runs[-1] if runs else KeptRun(0, 0, 0)
        run = KeptRun(ours[mine][0], theirs[other][0], ours[mine][1] - ours[mine][0])
        run = run.behind(last.end, last.source_end)
        if (run.start, run.source_start) == (last.end, last.source_end) and len(runs) > 1:
            runs[-1] = KeptRun(last.start, last.source_start, last.num_tokens + run.num_tokens)
        elif run.num_tokens:
            runs.append(run)
    return runs


def _messages(context: Context, frames: FrameTokens) -> list[Span]:
    """Return the token ranges of messages, with that before the first one; [] if there are none."""
    starts = frames.starts(context.token_ids, context.framed)
    if not starts:
        return []
    ends = dict.fromkeys((0, *starts, len(context.token_ids)))
    return list(pairwise(ends))


_Pair = tuple[int, int, int]  # index of a new message, of an old one, number of tokens


def _pairs(new: Context, ours: Sequence[Span], old: Context, theirs: Sequence[Span]) -> list[_Pair]:
    """Pair messages with equal tokens: at most MOST_PAIRS, the longest ones."""
    places: Mapping[tuple[int, ...], list[int]] = defaultdict(list)
    for index, (start, end) in enumerate(theirs):
        places[old.token_ids[start:end]].append(index)
    pairs = [
        (index, other, end - start)
        for index, (start, end) in enumerate(ours)
        for other in places.get(new.token_ids[start:end], ())
    ]
    if len(pairs) > MOST_PAIRS:
        pairs = sorted(pairs, key=lambda pair: pair[2])[-MOST_PAIRS:]
    return sorted(pairs, key=lambda pair: (pair[0], -pair[1]))


def _heaviest(pairs: Sequence[_Pair]) -> list[tuple[int, int]]:
    """Choose pairs that ascend in both indices and have the most tokens together.

    Args:
        pairs: ascending by the first index, then descending by the second.
    """
    # The best chains so far, by their end in the old context; ends and weights both ascend.
    ends: list[int] = []
    best: list[tuple[int, int]] = []  # weight, index of the chain's last pair
    before: list[int] = []  # for each pair: its predecessor in the chain; -1: none
    for index, (_, other, weight) in enumerate(pairs):
        at = bisect_left(ends, other)
        total, last = best[at - 1] if at else (0, -1)
        before.append(last)
        total += weight
        if at < len(ends) and ends[at] == other and best[at][0] >= total:
            continue
        stop = at
        while stop < len(ends) and best[stop][0] <= total:
            stop += 1
        ends[at:stop], best[at:stop] = [other], [(total, index)]
    chosen: list[tuple[int, int]] = []
    at = best[-1][1] if best else -1
    while at >= 0:
        chosen.append(pairs[at][:2])
        at = before[at]
    return chosen[::-1]
