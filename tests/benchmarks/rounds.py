"""Rounds: ways to do the same take turns, and are compared within each round."""

import statistics
import time


def measure_in_turns(ways, num_rounds):
    """Return the seconds of CPU time of each way, by round; a round before these warms up.

    Args:
        ways: functions by name, which run in this thread.
        num_rounds: each begins with another way.
    """
    names, found = list(ways), {name: [] for name in ways}
    for number in range(num_rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            began = time.thread_time()
            ways[name]()
            if number:
                found[name].append(time.thread_time() - began)
    return found


def median_ratio(found, name, other):
    """Return the median of the rounds' ratios of two ways."""
    return statistics.median(a / b for a, b in zip(found[name], found[other], strict=True))
