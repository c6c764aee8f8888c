"""Random KV of some sequences on scattered pages, and the result of plain attention over it."""

import torch

from inference_svc.runtime.attention.paged_attention import PageStep
from inference_svc.runtime.cuda.page_attention import SPLIT_TOKENS, attend_pages

# (new tokens, length) of each part: short, of several splits, all new, more than a tile.
PARTS = [(1, 7), (1, 2 * SPLIT_TOKENS + 88), (5, 5), (40, 130), (1, 1)]


def plain(query, keys, values, call):
    """Attend one sequence's last tokens in float64, [tokens, heads, value_dim]."""
    num_tokens, num_heads, _ = query.shape
    length = len(keys)
    keys, values = (
        kept.double().repeat_interleave(num_heads // kept.shape[1], dim=1)
        for kept in (keys, values)
    )
    scores = torch.einsum("nhd,lhd->hnl", query.double(), keys) * call.scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    position = torch.arange(length - num_tokens, length)[:, None]
    seen = torch.arange(length)[None]
    visible = seen <= position
    if call.window:
        visible &= seen > position - call.window
    if call.chunk:
        visible &= seen >= position - position % call.chunk
    scores = scores.masked_fill(~visible, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.double().view(num_heads, 1, 1).expand(-1, num_tokens, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hnl,lhd->nhd", weights, values)


def placed_step(parts, page_tokens, device):
    """A step where all layers are one group: pages, new tokens and length of each part."""
    by_group = [([pages], size, length) for pages, size, length in parts]
    return PageStep.copy_to(by_group, [page_tokens], device)[0]


class Pages:
    """Random KV of some parts on scattered pages, and a query."""

    def __init__(self, parts, shape, page_tokens, dtype, device="cpu"):
        torch.manual_seed(3)
        self.device = torch.device(device)
        heads, kv_heads, dim, value_dim = shape
        counts = [-(-length // page_tokens) for _, length in parts]
        free = torch.randperm(sum(counts) + 3).tolist()
        self.parts = parts
        self.page_tokens = page_tokens
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        num_slots = (sum(counts) + 3) * page_tokens
        # What no query sees is NaN: reading it would show.
        self.keys = torch.full((num_slots, kv_heads, dim), float("nan"), dtype=dtype)
        self.values = torch.full((num_slots, kv_heads, value_dim), float("nan"), dtype=dtype)
        for part in range(len(parts)):
            for kept in (self.keys, self.values):
                slots = self.slots(part)
                kept[slots] = torch.randn(len(slots), *kept.shape[1:]).to(dtype)
        num_tokens = sum(size for size, _ in parts)
        self.query = torch.randn(heads, num_tokens, dim).to(dtype).transpose(0, 1)

    def slots(self, part):
        """Return the slots of a part's tokens."""
        firsts = torch.tensor(self.tables[part]) * self.page_tokens
        slots = firsts[:, None] + torch.arange(self.page_tokens)
        return slots.flatten()[: self.parts[part][1]]

    def queries(self, part):
        """Return the query of one part."""
        return self.query.split([size for size, _ in self.parts])[part]

    def attended(self, call, parts=None):
        """Return the kernel's result for some parts in one call."""
        parts = range(len(self.parts)) if parts is None else parts
        tables = [torch.tensor(self.tables[part], dtype=torch.int32) for part in parts]
        of_parts = [(table, *self.parts[part]) for table, part in zip(tables, parts, strict=True)]
        step = placed_step(of_parts, self.page_tokens, self.device)
        query, keys, values = (
            tensor.to(self.device)
            for tensor in (
                torch.cat([self.queries(part) for part in parts]),
                self.keys,
                self.values,
            )
        )
        if call.sinks is not None:
            call = call._replace(sinks=call.sinks.to(self.device))
        return attend_pages(query, keys, values, step, call).cpu()

    def expected(self, part, call):
        """Return the result of plain attention for one part."""
        slots = self.slots(part)
        return plain(self.queries(part), self.keys[slots], self.values[slots], call)
