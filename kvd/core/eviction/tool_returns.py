"""ToolReturns: how soon sessions return that wait for a tool; learned for each tenant and tool.

Pure. A session whose answer calls a tool returns with the tool's result: within seconds, where a
person takes minutes. Such sessions are counted apart from the others, by tool instead of by traits.
A tool's class (return_hazards.py) is a child of the class of all tools, which begins as if
PRIOR_SESSIONS sessions had returned like published ones did. Of several tools called at once the
slowest stands for all, because the session waits for the last of them. A tool that was never seen
is taken to be as slow as tools are in general.

At most MOST_TOOLS are known. A new tool beyond that replaces the one with the fewest calls, and
takes over its count. So however many names are made up, a tool that has more than one in MOST_TOOLS
of the calls stays.

*Source:* TraceLab, arXiv 2606.30560 (times of 4,265 sessions' tools); Space-Saving, Metwally et
al., 2005 (which counters stay).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log

from kvd.core.eviction.return_hazards import (
    EDGES_NS,
    Hazards,
    ReturnHazards,
    SessionClass,
)
from shared.types.units import NS_PER_S

MOST_TOOLS = 256  # 4 KiB each
MOST_NAME_CHARS = 128  # of a tool's name; the rest is ignored
MOST_AT_ONCE = 16  # tools that are considered of those that one answer calls
SLOW_SHARE = 0.9  # tools are compared by the time in which this share of sessions returns
SHAPE_WEIGHT = 20.0  # sessions; low, because tools differ more than sessions of people do
PRIOR_SESSIONS = 200.0
# Seconds, and the share of sessions back by then. The first and the last point are our estimates.
PRIOR_QUANTILES = ((0.01, 0.0), (0.3, 0.5), (13.6, 0.9), (216.0, 0.99), (3600.0, 1.0))

ToolKey = tuple[str, str]  # tenant, name


@dataclass(slots=True)
class _Tool:
    """One known tool."""

    session_class: SessionClass
    num_calls: int


class ToolReturns:
    """Classes of tools. A call costs O(tools called), and O(MOST_TOOLS) for each new one."""

    def __init__(self, hazards: ReturnHazards) -> None:
        self._hazards = hazards
        self._any_tool = _prior()
        self._tools: dict[ToolKey, _Tool] = {}

    def class_of(self, tenant: str, names: Sequence[str]) -> SessionClass:
        """Return the class of a tenant's sessions that wait for these tools, at least one.

        A tool that is not known is added. Each tool's calls are counted.
        """
        called = dict.fromkeys(name[:MOST_NAME_CHARS] for name in names[:MOST_AT_ONCE])
        classes = [self._count_call((tenant, name)) for name in called]
        return max(classes, key=self.slow_ns) if len(classes) > 1 else classes[0]

    def slow_ns(self, session_class: SessionClass) -> int:
        """Return the time after which SLOW_SHARE of a tool's sessions have returned."""
        return quantile_ns(self._hazards.hazards(session_class), SLOW_SHARE)

    def _count_call(self, key: ToolKey) -> SessionClass:
        tool = self._tools.get(key)
        if tool is None:
            tool = self._tools[key] = self._new_tool()
        tool.num_calls += 1
        return tool.session_class

    def _new_tool(self) -> _Tool:
        """Return a new tool, perhaps in place of one that is replaced.

        The class object of a replaced tool is reused. So sessions that still wait for that tool now
        wait for the new one, and do not keep its counts alive.
        """
        if len(self._tools) < MOST_TOOLS:
            return _Tool(SessionClass(self._any_tool, SHAPE_WEIGHT), 0)
        least = min(self._tools, key=lambda key: self._tools[key].num_calls)
        tool = self._tools.pop(least)
        tool.session_class.forget()
        return tool


def quantile_ns(hazards: Hazards, share: float) -> int:
    """Return the end of the bucket by which this share has returned, or of the last bucket."""
    left = 1.0
    for hazard, end_ns in zip(hazards, EDGES_NS[1:], strict=True):
        left *= 1 - hazard
        if left <= 1 - share:
            return end_ns
    return EDGES_NS[-1]


def _prior() -> SessionClass:
    """Return the class of all tools' sessions, before any was observed."""
    counts = SessionClass(None)
    shares = [_share_back(edge_ns / NS_PER_S) for edge_ns in EDGES_NS]
    for bucket, (at_start, at_end) in enumerate(pairwise(shares)):
        counts.seen[bucket] = PRIOR_SESSIONS * (1 - at_start)
        counts.returned[bucket] = PRIOR_SESSIONS * (at_end - at_start)
    return counts


def _share_back(after_s: float) -> float:
    """Return the share of sessions back after a time: PRIOR_QUANTILES, log-linear between them."""
    for (start_s, before), (end_s, share) in pairwise(PRIOR_QUANTILES):
        if start_s <= after_s < end_s:
            return before + (share - before) * log(after_s / start_s) / log(end_s / start_s)
    return PRIOR_QUANTILES[0 if after_s < PRIOR_QUANTILES[0][0] else -1][1]
