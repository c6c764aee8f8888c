"""What is said of each figure: all of it is somewhere in the report, and every number is filled."""

import re

from kvd.plan.paper import reasons

NUMBER = re.compile(r"\{[^}]*\}")


def beginning(text):
    """The words in front of the first number that is filled in."""
    return " ".join(NUMBER.split(text)[0].split())[:60]


def test_every_reason_is_given_in_the_report(report):
    """A reason that no figure gives is of a figure that is gone; a brace is a number forgotten."""
    said = " ".join(" ".join(" ".join(table.notes).split()) for table in report.tables)
    texts = {name: text for name, text in vars(reasons).items() if name.isupper()}
    assert len(texts) > 8
    assert [name for name, text in texts.items() if beginning(text) not in said] == []
    assert not NUMBER.search(said)
