"""Facts about the machine."""

from shared.measuring.workspace import cpu_name, private_huge_pages, shared_huge_pages


def test_the_facts_of_this_machine_can_be_read():
    assert cpu_name()
    assert private_huge_pages() in {"", "always", "madvise", "never"}
    assert isinstance(shared_huge_pages(), str)
