"""How soon sessions that wait for tools return: by tenant and tool, in bounded memory."""

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
    """The statistics of one tenant's tools."""

    def __init__(self) -> None:
        self.hazards = ReturnHazards()
        self.returns = ToolReturns(self.hazards)

    def call(self, *names: str, tenant: str = "t"):
        return self.returns.class_of(tenant, names)

    def see(self, name: str, after_s: float, num_times: int = 300) -> None:
        """Let a tool answer so often after so long, and learn from it."""
        of = self.call(name)
        last = bucket_at(round(after_s * NS_PER_S))
        for _ in range(num_times):
            for bucket in range(last + 1):
                observe(of, bucket, has_returned=bucket == last)
        self.hazards.learn()

    def slow_s(self, name: str, tenant: str = "t") -> float:
        return self.returns.slow_ns(self.call(name, tenant=tenant)) / NS_PER_S


@pytest.mark.parametrize(("share", "seconds"), [(0.5, 0.3), (0.9, 13.6), (0.99, 216.0)])
def test_an_unknown_tool_has_published_return_times(share, seconds):
    """To the end of the bucket; two octaves below a second, and as far as hazards are smoothed."""
    tools = Tools()
    hazards = tools.hazards.hazards(tools.call("new"))
    assert seconds <= quantile_ns(hazards, share) / NS_PER_S <= 3.5 * seconds


def test_a_tool_has_its_observed_return_times():
    """After some three hundred calls, whatever others' are.

    A new one starts with the others' times.
    """
    tools = Tools()
    tools.see("read", 0.1)
    tools.see("test", 100.0)
    assert tools.slow_s("read") <= 1
    assert 64 <= tools.slow_s("test") <= 182
    assert tools.slow_s("read") < tools.slow_s("new") <= tools.slow_s("test")


def test_tools_of_other_tenants_are_separate():
    """Even with the same name."""
    tools = Tools()
    tools.see("read", 0.1)
    assert tools.call("read") is tools.call("read")
    assert tools.call("read", tenant="u") is not tools.call("read")
    assert tools.slow_s("read", tenant="u") > tools.slow_s("read")


def test_the_slowest_of_several_tools_counts():
    """In any order; an unknown one has the usual times."""
    tools = Tools()
    tools.see("read", 0.1)
    tools.see("test", 1000.0)
    tools.see("edit", 0.1, 2000)
    assert tools.call("read", "test", "read") is tools.call("test", "read") is tools.call("test")
    assert tools.call("read", "new") is tools.call("new")
    assert tools.call("new", "test") is tools.call("test")


def test_of_very_many_tools_only_the_first_count():
    """So a call takes bounded time."""
    tools = Tools()
    tools.see("test", 1000.0)
    tools.see("read", 0.1, 2000)
    others = [str(number) for number in range(MOST_AT_ONCE)]
    assert tools.call(*others, "test") is tools.call("0")
    assert tools.call(*others[1:], "test") is tools.call("test")


def test_names_are_distinguished_by_their_beginning():
    """So they take bounded room."""
    tools = Tools()
    begin = "x" * MOST_NAME_CHARS
    assert tools.call(begin + "a") is tools.call(begin + "b")
    assert tools.call(begin[1:] + "a") is not tools.call(begin[1:] + "b")


def test_a_frequent_tool_stays_whatever_names_are_made_up():
    """It is called more often than once in MOST_TOOLS calls.

    There are never more entries than that.
    """
    tools = Tools()
    tools.see("read", 0.1)
    often = tools.call("read")
    for number in range(20 * MOST_TOOLS):
        tools.call(f"made up {number}")
        if number % (MOST_TOOLS // 2) == 0:
            assert tools.call("read") is often
    assert len(tools.returns._tools) == MOST_TOOLS
    assert tools.slow_s("read") <= 1


def test_a_tool_in_anothers_place_starts_over():
    """The other's counts are no evidence of it."""
    tools = Tools()
    tools.see("slow", 1000.0)
    slow = tools.call("slow")
    for number in range(2 * MOST_TOOLS * tools.returns._tools["t", "slow"].num_calls):
        tools.call(f"made up {number}")
    assert ("t", "slow") not in tools.returns._tools
    assert sum(slow.seen) == 0
    assert tools.returns.slow_ns(slow) == tools.returns.slow_ns(tools.returns._any_tool)


def test_a_share_that_is_never_reached_gives_the_last_bucket():
    """For example when only half of the sessions return."""
    assert quantile_ns([0.5] + [0.0] * 40, 0.5) == EDGES_NS[1]
    assert quantile_ns([0.5] + [0.0] * 40, 0.9) == EDGES_NS[-1]
