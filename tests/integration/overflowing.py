"""Judging sessions of the live pair whose context overflows."""

import asyncio

WINDOW_TOKENS = 512
DRAM = ("--dram", "16MB")


async def identical(pair, judge, *names, coupled=False):
    """Return whether the judge agrees with every answer of these sessions."""
    for name in names:
        session = await pair.session(name)
        assert session.context_tokens <= WINDOW_TOKENS + 1  # an answer's last token has no row
        verdict = await asyncio.to_thread(judge.judge, session, coupled=coupled)
        assert verdict.is_identical, (name, verdict)


def check_all_reused(turn, *tiers):
    """Check that the turn recomputed nothing, and found its history in these tiers."""
    usage = turn.usage
    assert usage.reused_tokens == usage.history_tokens > 0
    assert (usage.recomputed_tokens, usage.recompute_reason) == (0, "")
    assert set(usage.tier_tokens) == set(tiers)
