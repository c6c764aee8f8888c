"""The explanations of figures: all appear in the report, with every number filled in."""

import re

from kvd.plan.paper import reasons

NUMBER = re.compile(r"\{[^}]*\}")


def beginning(text):
    """Return the words before the first number that is filled in."""
    return " ".join(NUMBER.split(text)[0].split())[:60]


def test_every_reason_is_given_in_the_report(report):
    """An unused one belongs to a removed figure; a brace is a missing number."""
    said = " ".join(" ".join(" ".join(table.notes).split()) for table in report.tables)
    texts = {name: text for name, text in vars(reasons).items() if name.isupper()}
    assert len(texts) > 8
    assert [name for name, text in texts.items() if beginning(text) not in said] == []
    assert not NUMBER.search(said)
