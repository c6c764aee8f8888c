"""How much is fuzzed: the same few examples at each run, or with the mark `long` many new ones."""

from hypothesis import HealthCheck, settings

LONG_FACTOR = 50


def few(num_examples: int) -> settings:
    """For every run."""
    return settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,  # machines are slow now and then
        suppress_health_check=list(HealthCheck),  # a daemon per module is meant here
    )


def many(num_examples: int) -> settings:
    """For the long run of a test that has so few examples otherwise."""
    return settings(
        few(num_examples),
        max_examples=LONG_FACTOR * num_examples,
        derandomize=False,
        print_blob=True,
    )
