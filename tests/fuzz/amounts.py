"""The amount of fuzzing: few fixed examples per run, or with the mark `long` many new ones."""

from hypothesis import HealthCheck, settings

LONG_FACTOR = 50


def few(num_examples: int) -> settings:
    """Set the number of examples of every run."""
    return settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,  # machines are slow now and then
        suppress_health_check=list(HealthCheck),  # a daemon per module is intended
    )


def many(num_examples: int) -> settings:
    """Set the number for the long run of a test that otherwise has so few examples."""
    return settings(
        few(num_examples),
        max_examples=LONG_FACTOR * num_examples,
        derandomize=False,
        print_blob=True,
    )
