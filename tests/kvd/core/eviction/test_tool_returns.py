"""How soon sessions return that wait for tools: by tenant and tool, of a bounded number of them."""

import pytest

from kvd.core.eviction.return_hazards import EDGES_NS, ReturnHazards, bucket_at, observe
from kvd.core.eviction.tool_returns import (
    MOST_AT_ONCE,
    MOST_NAME_CHARS,
    MOST_TOOLS,
    ToolReturns,
    quantile_ns,
)
from shared.types.units import NS_PER_S


class Tools:
    """What is learned of one tenant's tools."""

    def __init__(self) -> None:
        self.hazards = ReturnHazards()
        self.returns = ToolReturns(self.hazards)

    def call(self, *names: str, tenant: str = "t"):
        return self.returns.class_of(tenant, names)

    def see(self, name: str, after_s: float, num_times: int = 300) -> None:
        """A tool answers so often after so long; what was learned shows."""
        of = self.call(name)
        last = bucket_at(round(after_s * NS_PER_S))
        for _ in range(num_times):
            for bucket in range(last + 1):
                observe(of, bucket, has_returned=bucket == last)
        self.hazards.learn()

    def slow_s(self, name: str, tenant: str = "t") -> float:
        return self.returns.slow_ns(self.call(name, tenant=tenant)) / NS_PER_S


@pytest.mark.parametrize(("share", "seconds"), [(0.5, 0.3), (0.9, 13.6), (0.99, 216.0)])
def test_a_tool_that_was_never_seen_is_as_slow_as_published_ones(share, seconds):
    """To the end of the bucket, below a second two octaves, and as far as hazards are smoothed."""
    tools = Tools()
    hazards = tools.hazards.hazards(tools.call("new"))
    assert seconds <= quantile_ns(hazards, share) / NS_PER_S <= 3.5 * seconds


def test_a_tool_is_as_slow_as_it_was_seen_to_be():
    """After some three hundred calls, whatever others are like; a new one is as the others are."""
    tools = Tools()
    tools.see("read", 0.1)
    tools.see("test", 100.0)
    assert tools.slow_s("read") <= 1
    assert 64 <= tools.slow_s("test") <= 182
    assert tools.slow_s("read") < tools.slow_s("new") <= tools.slow_s("test")


def test_tools_of_other_tenants_are_others():
    """By the same name, too."""
    tools = Tools()
    tools.see("read", 0.1)
    assert tools.call("read") is tools.call("read")
    assert tools.call("read", tenant="u") is not tools.call("read")
    assert tools.slow_s("read", tenant="u") > tools.slow_s("read")


def test_the_slowest_of_several_tools_stands_for_all():
    """In whatever order they are called; one that was never seen is as slow as tools are."""
    tools = Tools()
    tools.see("read", 0.1)
    tools.see("test", 1000.0)
    tools.see("edit", 0.1, 2000)
    assert tools.call("read", "test", "read") is tools.call("test", "read") is tools.call("test")
    assert tools.call("read", "new") is tools.call("new")
    assert tools.call("new", "test") is tools.call("test")


def test_of_very_many_tools_at_once_the_first_are_looked_at():
    """So that a call takes bounded time."""
    tools = Tools()
    tools.see("test", 1000.0)
    tools.see("read", 0.1, 2000)
    others = [str(number) for number in range(MOST_AT_ONCE)]
    assert tools.call(*others, "test") is tools.call("0")
    assert tools.call(*others[1:], "test") is tools.call("test")


def test_names_are_told_apart_by_how_they_begin():
    """So that they take bounded room."""
    tools = Tools()
    begin = "x" * MOST_NAME_CHARS
    assert tools.call(begin + "a") is tools.call(begin + "b")
    assert tools.call(begin[1:] + "a") is not tools.call(begin[1:] + "b")


def test_a_tool_that_is_called_often_stays_whatever_names_are_made_up():
    """More often than once in MOST_TOOLS calls; there are never more than so many."""
    tools = Tools()
    tools.see("read", 0.1)
    often = tools.call("read")
    for number in range(20 * MOST_TOOLS):
        tools.call(f"made up {number}")
        if number % (MOST_TOOLS // 2) == 0:
            assert tools.call("read") is often
    assert len(tools.returns._tools) == MOST_TOOLS
    assert tools.slow_s("read") <= 1


def test_a_tool_in_the_place_of_another_begins_anew():
    """What was counted of the other is no evidence of it."""
    tools = Tools()
    tools.see("slow", 1000.0)
    slow = tools.call("slow")
    for number in range(2 * MOST_TOOLS * tools.returns._tools["t", "slow"].num_calls):
        tools.call(f"made up {number}")
    assert ("t", "slow") not in tools.returns._tools
    assert sum(slow.seen) == 0
    assert tools.returns.slow_ns(slow) == tools.returns.slow_ns(tools.returns._any_tool)


def test_a_share_that_nobody_reaches_is_reached_at_the_end():
    """Of sessions that return by half only."""
    assert quantile_ns([0.5] + [0.0] * 40, 0.5) == EDGES_NS[1]
    assert quantile_ns([0.5] + [0.0] * 40, 0.9) == EDGES_NS[-1]
