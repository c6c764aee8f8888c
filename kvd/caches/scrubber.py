"""The scrubber of `kvd verify`: reads and verifies all blocks, one run at a time (D11).

The core chooses the next blocks and collects the results; pace and clock are here. The rate is
bounded. A run belongs to its caller, and ends when the caller stops iterating.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from functools import partial

from kvd.core.engine import CacheEngine
from kvd.core.records.records import ScrubReport, ScrubStep
from kvd.errors import VerifyRunningError
from kvd.host.pacing import Pace
from kvd.runtime.cache import Cache

REPORT_S = 1.0  # between two reports of progress
STEP_S = 0.1  # a step requests as many bytes as the rate allows in this time


@dataclass(frozen=True, slots=True)
class ScrubProgress:
    """The progress of a run.

    Attributes:
        done: whether the run has ended.
        layout: fingerprint of the layout that is being scrubbed; "" at the end.
        num_copies: number of block copies in all tiers and layouts, as counted at the begin.
        report: findings so far.
    """

    done: bool
    layout: str
    num_copies: int
    report: ScrubReport


class Scrubber:
    """Verifies stored blocks, one run at a time.

    Args:
        rate: most bytes per second.
    """

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._is_running = False

    def set_rate(self, rate: int) -> None:
        """Change the rate, in bytes per second, from the next layout on."""
        self._rate = rate

    @property
    def is_running(self) -> bool:
        """Whether a run is under way."""
        return self._is_running

    async def run(
        self, caches: Sequence[Cache], *, repair: bool
    ) -> AsyncGenerator[ScrubProgress, None]:
        """Scrub caches one after the other; yield progress every second, and `done` at the end.

        Args:
            caches: caches to scrub.
            repair: write a corrupt copy on SSD again from an intact one in DRAM, or drop the block.
                Without, it is only reported. Corrupt copies in DRAM are dropped in any case.

        Raises:
            VerifyRunningError: another run is under way.
        """
        if self._is_running:
            raise VerifyRunningError("a verification is already running", "wait until it has ended")
        self._is_running = True
        try:
            num_copies = sum(tier.num_blocks for c in caches for tier in c.stats().tiers)
            total = ScrubReport()
            for cache in caches:
                layout, before = cache.layout.fingerprint, total
                async with aclosing(self._scrub(cache, repair=repair)) as reports:
                    async for report in reports:
                        total = _sum(before, report)
                        yield ScrubProgress(False, layout, num_copies, total)
            yield ScrubProgress(True, "", num_copies, total)
        finally:
            self._is_running = False

    async def _scrub(self, cache: Cache, *, repair: bool) -> AsyncGenerator[ScrubReport, None]:
        """Scrub one cache; yield its report about once a second, and at the end."""
        loop = asyncio.get_running_loop()
        pace = Pace(self._rate)
        scrub_id = cache.act(lambda core: core.scrubs.begin(repair=repair))
        next_step = partial(_step, scrub_id, max(1, int(self._rate * STEP_S)))
        resume_at = report_at = loop.time()
        try:
            while True:
                now_s = loop.time()
                if now_s >= resume_at:
                    step = cache.act(next_step)
                    resume_at = pace.resume_at(step.issued_bytes, now_s)
                if step.done or now_s >= report_at:
                    yield step.report
                    report_at = now_s + REPORT_S
                if step.done:
                    return
                if step.issued_bytes:
                    await asyncio.sleep(max(0.0, min(resume_at - loop.time(), REPORT_S)))
                else:  # the core issues more only once running verifications have ended
                    await cache.wait_for_change(STEP_S)
        finally:
            cache.act(lambda core: core.scrubs.end(scrub_id))


def _sum(left: ScrubReport, right: ScrubReport) -> ScrubReport:
    names = [field.name for field in fields(ScrubReport)]
    return ScrubReport(*(getattr(left, name) + getattr(right, name) for name in names))


def _step(scrub_id: int, max_bytes: int, core: CacheEngine) -> ScrubStep:
    return core.scrubs.step(scrub_id, max_bytes)
