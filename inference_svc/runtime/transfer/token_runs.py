"""Token runs: a load's spans in groups that can be gathered in one call each."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from inference_svc.runtime.kv.slot_runs import ScatteredTokens, SlotRun
from inference_svc.runtime.transfer.spans import Span
from shared.types.units import ceil_div

SHORT_RUN = 64  # tokens; a run as short as this costs as much as its tokens copied one by one

Run = SlotRun | ScatteredTokens


def token_runs(spans: Sequence[Span]) -> Iterator[Run]:
    """Group spans that can be gathered in one call.

    Usually these are all full blocks, then the last one. After discards of scattered tokens no two
    spans lie at the same places in their slots: then tokens of short runs are gathered one by one.
    """
    short: list[SlotRun] = []
    for run in _equal_runs(spans):
        if run.num_tokens < SHORT_RUN:
            short.append(run)
            continue
        yield from _joined(short)
        short = []
        yield run
    yield from _joined(short)


def _joined(short: Sequence[SlotRun]) -> Iterator[Run]:
    """Join several short runs into one of scattered tokens."""
    if len(short) < 2:
        yield from short
        return
    slot_ids = [slot for run in short for slot in run.slot_ids for _ in range(run.tokens_per_slot)]
    offsets = [
        offset
        for run in short
        for _ in run.slot_ids
        for offset in range(run.start, run.start + run.tokens_per_slot)
    ]
    yield ScatteredTokens(torch.tensor(slot_ids), torch.tensor(offsets))


def _equal_runs(spans: Sequence[Span]) -> Iterator[SlotRun]:
    """Group successive spans that lie at the same places in their slots."""
    for place, group in groupby(spans, lambda span: (span.start, span.num_tokens)):
        yield SlotRun([span.slot_id for span in group], *place)


def balanced(runs: Sequence[Run], num_tokens: int, max_tokens: int) -> Iterator[list[Run]]:
    """Divide runs into the fewest groups of about equal size.

    Args:
        runs: the runs, at least one.
        num_tokens: number of tokens of all runs.
        max_tokens: most tokens of a group, up to a slot more: slots are not divided.
    """
    # Rounded up by a slot: groups of whole slots would else add up to less, and need one more.
    size = ceil_div(num_tokens, ceil_div(num_tokens, max_tokens))
    size += max(run.tokens_per_slot for run in runs) - 1
    group: list[Run] = []
    count = 0
    for run in runs:
        for part in run.split(size):
            if group and count + part.num_tokens > size:
                yield group
                group, count = [], 0
            group.append(part)
            count += part.num_tokens
    yield group


def placed(runs: Sequence[Run], first: int) -> Iterator[tuple[Run, int]]:
    """Pair each run with the position of its first token; the first run begins at `first`."""
    for run in runs:
        yield run, first
        first += run.num_tokens


def place_of(run: Run, tokens: Tensor, first: int) -> Tensor:
    """Return a view of [n, kv_heads, dim] from `first` on, in the shape that `gather` fills."""
    if isinstance(run, ScatteredTokens):
        return tokens.narrow(0, first, run.num_tokens)
    per_token, per_head, per_item = tokens.stride()
    _, heads, dim = tokens.shape
    return tokens.as_strided(  # one call instead of two
        (len(run.slot_ids), run.tokens_per_slot, heads, dim),
        (run.tokens_per_slot * per_token, per_token, per_head, per_item),
        tokens.storage_offset() + first * per_token,
    )
