"""Names of sessions that are being imported are told from all others."""

from kvd.session_files.target import is_unfinished, unfinished_name


def test_a_name_of_its_own():
    """Each is another, and no one else's."""
    names = {unfinished_name() for _ in range(3)}
    assert len(names) == 3
    assert all(map(is_unfinished, names))
    assert not any(map(is_unfinished, ("import-1", "a", f"x{names.pop()}", "import-" + "g" * 32)))
