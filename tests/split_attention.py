"""Attention over pages in calls of torch, for machines without a kernel, in the kernel's manner.

Each new token is a row, and its keys are read in splits of fixed length that are merged in
order. Splits beyond its length change nothing, so that a row's result is the same to the bit,
however long the step's longest row is. No tensor's shape and no argument depends on a tensor's
contents.
"""

import torch

SPLIT = 64


def attend_pages(query, keys, values, step, call):
    """See `PageKernel`."""
    lengths, tables = step.lengths.long(), step.tables
    if step.tiles(1) is not None:  # some part has several new tokens
        sizes = step.starts.diff().tolist()
        ends = [
            length - back
            for length, size in zip(step.lengths.tolist(), sizes, strict=True)
            for back in reversed(range(size))
        ]
        lengths = torch.tensor(ends)
        tables = tables[torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))]
    grouped = query.unflatten(1, (keys.shape[1], -1)).float()  # [rows, kv_heads, group, dim]
    first = torch.zeros_like(lengths)
    if call.window:
        first = torch.clamp(lengths - call.window, min=0)
    if call.chunk:
        first = torch.maximum(first, (lengths - 1) // call.chunk * call.chunk)
    most = torch.full((*grouped.shape[:3], 1), float("-inf"))
    total, summed = torch.zeros_like(most), grouped.new_zeros(*grouped.shape[:3], values.shape[2])
    for begin in range(0, step.most_length, SPLIT):
        seen = torch.arange(begin, begin + SPLIT)
        visible = (seen < lengths[:, None]) & (seen >= first[:, None])  # [rows, SPLIT]
        # A hidden token is not read: the row's own token is read in its place.
        token = torch.where(visible, seen, lengths[:, None] - 1)
        page = tables.long().gather(1, token // step.page_tokens)
        slots = (page * step.page_tokens + token % step.page_tokens).flatten()
        key, value = (
            kept.index_select(0, slots).unflatten(0, token.shape).float().transpose(1, 2)
            for kept in (keys, values)
        )  # [rows, kv_heads, SPLIT, dim]
        scores = (grouped.unsqueeze(3) * key.unsqueeze(2)).sum(-1) * call.scale
        if call.softcap:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        scores = torch.where(visible[:, None, None], scores, float("-inf"))
        higher = torch.maximum(most, scores.amax(-1, keepdim=True))
        reference = torch.where(higher == float("-inf"), 0.0, higher)
        weights, kept = torch.exp(scores - reference), torch.exp(most - reference)
        total = total * kept + weights.sum(-1, keepdim=True)
        summed = summed * kept + (weights.unsqueeze(-1) * value.unsqueeze(2)).sum(-2)
        most = higher
    if call.sinks is not None:
        sinks = call.sinks.float().view(1, keys.shape[1], -1, 1)
        total = total + torch.exp(sinks - most)
    return (summed / total).flatten(1, 2).to(query.dtype)
