"""Summaries in a list of commands."""

from shared.config.lazy_commands import first_sentence


def test_a_summary_is_a_sentence():
    """Up to the first full stop, without it, on one line."""
    assert first_sentence("Do a\nthing. Then more.\n\nAnd more.") == "Do a thing"
