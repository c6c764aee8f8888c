"""What is said of each figure: all of it is somewhere in the report, and every number is filled."""

import re

from kvd.plan.paper import reasons
from kvd.plan.paper.reproduction import Reproduction
from kvd.plan.paper.runs import Sample

NUMBER = re.compile(r"\{[^}]*\}")


def beginning(text):
    """The words in front of the first number that is filled in."""
    return " ".join(NUMBER.split(text)[0].split())[:60]


def test_every_reason_is_given_in_the_report():
    """A reason that no figure gives is of a figure that is gone; a brace is a number forgotten."""
    report = Reproduction(Sample(seed=5, scale=0.004)).make(1, lambda _num_turns: None)
    said = " ".join(" ".join(" ".join(table.notes).split()) for table in report.tables)
    texts = {name: text for name, text in vars(reasons).items() if name.isupper()}
    assert len(texts) > 8
    assert [name for name, text in texts.items() if beginning(text) not in said] == []
    assert not NUMBER.search(said)
