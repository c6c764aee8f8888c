"""One small reproduction of the paper's figures, for all tests of a report."""

import pytest

from kvd.plan.paper.reproduction import Reproduction
from kvd.plan.paper.runs import Sample
from kvd.plan.paper.tables import PaperReport

TINY = Sample(seed=5, scale=0.004)


@pytest.fixture(scope="session")
def report() -> PaperReport:
    """Return all figures of a sample of 36 sessions."""
    progress: list[int] = []
    reproduction = Reproduction(TINY)
    found = reproduction.make(1, progress.append)
    assert progress == sorted(progress)
    assert progress[-1] == reproduction.num_turns == found.num_turns
    return found
