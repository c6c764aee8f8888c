"""Man pages and documents describe the existing commands."""

import pytest

from tests.docs.command_pages import Page
from tests.docs.man_pages import KVD, MAN, PROGRAMS, ROOT, all_files, man_page

each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


def test_man_pages_and_docs_are_up_to_date():
    """If not, run: python -m tests.docs.man_pages."""
    files = all_files()
    found = {path: (ROOT / path).read_text(encoding="utf-8") for path in files}
    assert found == files
    pages_there = {MAN / path.name for path in (ROOT / MAN).iterdir()}
    assert pages_there == {path for path in files if path.parent == MAN}


@each_program
def test_every_command_is_explained(program):
    """Each has a summary, each option a help text, and each example uses an existing command."""
    found = program.pages()
    for page in found:
        assert page.summary, page.title
        for entry in page.options:
            assert entry.text, (page.title, entry.name)
    commands = {" ".join(page.words[1:]): page for page in found}
    assert set(program.examples) <= set(commands)


@each_program
def test_examples_can_be_parsed(program):
    """Every option in an example exists."""
    found = program.pages()
    assert sum(len(page.examples) for page in found) >= len(program.examples)
    for page in found:
        known = {name for entry in page.options for name in entry.name.replace(",", "").split()}
        for example in page.examples:
            words = example.replace("(", " ").replace(")", " ").split()
            assert {word for word in words if word.startswith("--")} <= known, example


def test_roffs_special_characters_are_escaped():
    """A hyphen stays a hyphen, and a line that begins with a dot is no macro."""
    page = Page(("kvd", "x"), "Do it", "", (".dot \\ and -dash",), (), (), ())
    lines = man_page(KVD, page, [page]).splitlines()
    assert "\\&.dot \\e and \\-dash" in lines
    assert "kvd\\-x \\- do it" in lines
