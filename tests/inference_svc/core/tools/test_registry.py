"""The formats by the names of their families."""

import pytest

from inference_svc.core.tools.reader import read_whole
from inference_svc.core.tools.registry import FORMATS, PLAIN
from tests.inference_svc.core.tools.written_calls import FAMILIES, NAMES, called, wrote

CALL = ("weather", {"city": "Bern"})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_the_first_format_that_reads_a_call_is_its_own(family):
    """So that the format of a model can be found by trying them."""
    text = wrote(family, [CALL]).text
    read = [
        name for name, made in FORMATS.items() if read_whole(made.reader(NAMES, None), text).calls
    ]
    assert read[0] == (FAMILIES[family] if family.__name__ != "plain_json" else "llama3")
    assert FAMILIES[family] in read


def test_names_are_those_of_the_formats():
    """What is only JSON is tried last."""
    assert [made.name for made in FORMATS.values()] == list(FORMATS)
    assert list(FORMATS)[-1] == "json"


def test_the_plain_format_reads_no_calls():
    """All is text."""
    text = "".join(wrote(family, [CALL]).text for family in FAMILIES)
    answer = read_whole(PLAIN.reader(NAMES, None), text)
    assert (answer.content, called(answer)) == (text, [])
    assert PLAIN.reader(NAMES, None).push("") == []
    assert PLAIN.marks == ()
