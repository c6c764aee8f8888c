"""Histograms of turns and steps: how long they take, and where their tokens came from. Pure.

They complement `counters.py`, which counts how often. Labels are bounded: a tenant has a label of
its own only if the settings name it; all others share OTHER.
"""

from collections.abc import Collection

from inference_svc.core.turn_record import Usage
from shared.types.histogram import SIZE_BOUNDS, Histogram, Tally
from shared.types.session_key import DEFAULT_TENANT

OTHER = "other"


class TurnHistograms:
    """The histograms and tallies of turns and steps.

    Args:
        tenants: tenants with labels of their own, besides the default one.

    Attributes:
        ended: number of turns by how they ended: a finish reason, or the slug of an error.
        ttft_s, prefill_s, total_s: seconds of turns, by the state of the history: `_history_state`.
        itl_s: seconds between two tokens of an answer, as they were sampled.
        reused_tokens: number of reused tokens, by the tier where they were found.
        recomputed_tokens: number of recomputed tokens, by reason.
        missed_tokens: number of tokens computed because a conversation's wording differed, by
            cause.
        buffer_layers: the start gate's choices (`Request.buffer_layers`), by the slowest tier.
        refused: number of turns that did not begin, by reason.
        tenant_turns: number of turns by tenant and "finished", "failed", "refused", "cancelled".
        tenant_tokens: number of tokens by tenant and kind: "computed", "reused", "output".
        step_turns, step_tokens, step_s: turns, tokens and seconds of each forward pass.
    """

    def __init__(self, tenants: Collection[str] = ()) -> None:
        self.ended = Tally()
        self.ttft_s = Histogram()
        self.prefill_s = Histogram()
        self.total_s = Histogram()
        self.tpot_s = Histogram()
        self.itl_s = Histogram()
        self.queue_s = Histogram()
        self.load_s = Histogram()
        self.stall_s = Histogram()
        self.reused_tokens = Tally()
        self.recomputed_tokens = Tally()
        self.missed_tokens = Tally()
        self.buffer_layers = Histogram(SIZE_BOUNDS)
        self.refused = Tally()
        self.tenant_turns = Tally()
        self.tenant_tokens = Tally()
        self.step_turns = Histogram(SIZE_BOUNDS)
        self.step_tokens = Histogram(SIZE_BOUNDS)
        self.step_s = Histogram()
        self.name_tenants(tenants)

    def name_tenants(self, tenants: Collection[str]) -> None:
        """Give these tenants labels of their own from now on."""
        self._tenants = frozenset(tenants) | {DEFAULT_TENANT}

    def on_join(self, buffer_layers: float, tiers: Collection[str]) -> None:
        """Count a turn that joined the batch while its history was loaded from these tiers."""
        self.buffer_layers.observe(buffer_layers, max(tiers))  # "ssd" > "dram"

    def on_finish(self, tenant: str, finish_reason: str, usage: Usage, *, cancelled: bool) -> None:
        """Count a turn that was answered, or cancelled by its client in its answer."""
        self.ended.add(finish_reason)
        label = self._label(tenant)
        self.tenant_turns.add(label, "cancelled" if cancelled else "finished")
        for kind, num_tokens in (
            ("computed", usage.recomputed_tokens + usage.new_tokens),
            ("reused", usage.reused_tokens),
            ("output", usage.output_tokens),
        ):
            self.tenant_tokens.add(label, kind, amount=num_tokens)
        for tier, num_tokens in usage.tier_tokens.items():
            self.reused_tokens.add(tier, amount=num_tokens)
        if usage.recomputed_tokens:
            self.recomputed_tokens.add(usage.recompute_reason, amount=usage.recomputed_tokens)
        if usage.miss is not None:
            self.missed_tokens.add(usage.miss.cause, amount=usage.miss.lost_tokens)
        if not cancelled:
            self._observe_times(usage)

    def on_failure(self, tenant: str, reason: str, *, cancelled: bool) -> None:
        """Count a turn that ended with an error."""
        self.ended.add(reason)
        self.tenant_turns.add(self._label(tenant), "cancelled" if cancelled else "failed")

    def on_refusal(self, tenant: str, reason: str) -> None:
        """Count a turn that was refused."""
        self.refused.add(reason)
        self.tenant_turns.add(self._label(tenant), "refused")

    def on_step(self, num_turns: int, num_tokens: int, seconds: float) -> None:
        """Count a forward pass."""
        self.step_turns.observe(num_turns)
        self.step_tokens.observe(num_tokens)
        self.step_s.observe(seconds)

    def as_gauges(self) -> dict[str, float]:
        """Return quantiles of answered turns' times in seconds; those without data are left out.

        The totals and the number of turns let a reader compute the means between two readings.
        """
        ttft, tpot = self.ttft_s.total, self.tpot_s.total
        found: dict[str, float | None] = {
            "timed_turns": ttft.count,
            "ttft_total_s": ttft.total,
            "ttft_p50_s": self.ttft_s.quantile(0.5),
            "ttft_p95_s": self.ttft_s.quantile(0.95),
            "tpot_p50_s": self.tpot_s.quantile(0.5) if tpot.count else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _observe_times(self, usage: Usage) -> None:
        history = _history_state(usage)
        self.ttft_s.observe(usage.ttft_s, history)
        self.prefill_s.observe(usage.prefill_s, history)
        self.total_s.observe(usage.total_s, history)
        self.queue_s.observe(usage.queue_s)
        if usage.output_tokens > 1:
            self.tpot_s.observe(usage.tpot_s)
        if usage.history_tokens:
            self.load_s.observe(usage.load_s)
            self.stall_s.observe(usage.stall_s)

    def _label(self, tenant: str) -> str:
        return tenant if tenant in self._tenants else OTHER


def _history_state(usage: Usage) -> str:
    """Return the state of a history: "none" (no history), "reused", "partial", "recomputed"."""
    if not usage.history_tokens:
        return "none"
    if not usage.recomputed_tokens:
        return "reused"
    return "partial" if usage.reused_tokens else "recomputed"
